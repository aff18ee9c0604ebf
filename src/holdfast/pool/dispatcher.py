"""The dispatcher: the one thread of a pool, in the process that made it. It runs the supervisor, and settles futures.

    submit ──► waiting ──► Drawn ──► LEDGER ──► Send ──► HOST ──► worker
                              future ◄── Deliver ◄── ledger ◄── Finished, Exited

A thread that submits, cancels or shuts down only notes that (`waiting`, `withdrawn`, `closing`) and rings the bell. All
else happens in the dispatcher's thread. The thread does not know the Pool, so a pool that is dropped can end. A worker
holds a few tasks, so it need not wait for the next one. If another worker is idle, or the worker is to be killed, the
dispatcher takes back the tasks that it has not begun.
"""

import atexit
import itertools
import os
import threading
import time
from collections import deque
from typing import cast

from holdfast.core.autoscale import Autoscale
from holdfast.core.host import HasPulses, Host, KeepsJournals, Result, WorkerProcess
from holdfast.core.ledger import Ledger
from holdfast.core.messages import BootFailed, Drawn, Lost, Rested, Send, Withdrawn
from holdfast.core.supervisor import Supervisor
from holdfast.diagnose.stats import PoolStats
from holdfast.errors import HoldfastError, PoolBroken, WorkerLost
from holdfast.pool.call import Call, close_futures_in_child
from holdfast.pool.call_codec import LetterWriter
from holdfast.pool.pool_narrator import PoolNarrator, stats_of
from holdfast.pool.progress import PoolWatch
from holdfast.pool.settle import Settler
from holdfast.shm import forks

# The dispatcher sends shorter tasks many at a time: it takes as long to wake a worker.
BRISK_S = 0.002
# How often it asks again for workers that the system has refused.
LOOK_S = 1.0
# With longer tasks, a worker holds the one that it is on and the next.
SHALLOW = 2


class Dispatcher:
    """See the module. `calls`: those with workers; the narrator has them too. `deep`: how many a worker may hold."""

    def __init__(
        self,
        host: Host,
        ledger: Ledger,
        autoscale: Autoscale,
        writer: LetterWriter,
        narrator: PoolNarrator,
        calls: dict[int, Call],
        deep: int,
        numbers: "itertools.count[int]",
    ) -> None:
        self._host = host
        self._journals = host if isinstance(host, KeepsJournals) else None
        self._ledger = ledger
        self._writer = writer
        self._narrator = narrator
        self._calls = calls
        self._record = narrator.record
        self._counts = narrator.record.counts
        self._settler = Settler(host, narrator, numbers, self._send_soon, self._rewrite)
        self.watch = PoolWatch(narrator.record.kept_in, self.stats)
        self._supervisor = Supervisor(ledger, host, self._payload, autoscale)
        self._autoscale = autoscale
        self._looked_at = 0.0
        self._deep = deep
        self._pace_s = 1.0  # a task, lately
        self._last_at = time.monotonic()
        self._waiting: deque[Call] = deque()
        self._withdrawn: deque[int] = deque()
        self._written: deque[Call] = deque()  # those that are sent next
        self._asleep = False
        self._closing = False
        self._cancelling = False
        self._killing = False
        self._owner = os.getpid()
        # Between a last submit and the end of the thread. Garbage collection of a pool may close us at any time.
        self._lock = threading.RLock()
        self._over = False
        self.broken: HoldfastError | None = None
        self._claim = threading.Lock()  # taken once: by the thread as it begins, or by who gives its start up
        self.thread = threading.Thread(target=self._run, name="holdfast-pool", daemon=True)

    # From any thread -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The keeper is forked here, by the thread that submits: workers know what it knows."""
        try:
            forks.watch(self)
            self._host.open()
            self._record.workers.begin(self._host.pulses if isinstance(self._host, HasPulses) else ())
            self.thread.start()
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """The start has failed or was interrupted. The thread may have begun all the same."""
        if self._claim.acquire(blocking=False):
            self._over = True
            forks.forget(self)
            self._record.workers.end()
            self._host.close(0.0)
        else:
            self.kill()
            self.join()

    def submit(self, call: Call) -> bool:
        """False if the thread is ending and takes no more calls."""
        call.future.on_cancel(self._withdraw, call.number, self._owner)
        with self._lock:
            if self._over:
                return False
            self._waiting.append(call)
            self._counts["submitted"] += 1
        if self._asleep:
            self._ring()
        return True

    def _withdraw(self, number: int) -> None:
        self._withdrawn.append(number)
        self._ring()

    def close(self, *, cancel: bool = False) -> None:
        """No more calls will come: end when all are done. `cancel`: cancel those that no worker can begin at once."""
        self._cancelling = self._cancelling or cancel
        self._closing = True
        self._ring()

    def kill(self) -> None:
        """End at once. Calls that run are lost."""
        self._killing = True
        self.close(cancel=True)

    def _ring(self) -> None:
        if os.getpid() != self._owner:
            return  # a forked child cannot use the pool, and the bell's descriptor may be another file there
        with self._lock:
            if not self._over:
                try:
                    self._asleep = False
                    self._host.ring()
                except BaseException:  # a signal handler raised before the bell has rung: the next caller rings it
                    self._asleep = True
                    raise

    def finish(self) -> None:
        """The interpreter ends. It waits for all calls that were submitted, as with the standard library's pools."""
        self.close()
        self.join()

    def join(self) -> None:
        """Wait until all calls are done and all processes have ended. At once in a forked child or a callback."""
        if self._owner == os.getpid() and threading.current_thread() is not self.thread:
            self.thread.join()

    def close_in_child(self) -> None:
        """In a forked child of the trainer. No thread settles futures there."""
        close_futures_in_child()

    @property
    def handles(self) -> list[WorkerProcess]:
        """Handles of the worker processes that were needed so far."""
        return [handle for handle in self._host.workers if handle.has_life]

    def stats(self) -> PoolStats:
        """Totals so far, and how many calls are with workers, and wait, right now."""
        return stats_of(self._record, len(self._calls), len(self._waiting), len(self._host.workers))

    def pace(self) -> tuple[int, int]:
        """Retries so far, and workers that have something to do."""
        return self._counts["retries"], min(len(self._calls), self._ledger.at_work)

    # In the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return  # nobody wants it any more
        try:
            self._supervisor.open(time.monotonic())
            while not self._is_over():
                self._supervisor.step(self._patience())
                self._feed()  # first of all: a worker waits
                self._settle()
                self._look()
        except WorkerLost as error:
            self._break(PoolBroken(str(error)))
        except BaseException as error:
            # Without this, every future would wait for ever on a thread that is gone.
            self._break(PoolBroken(f"the pool itself failed: {type(error).__name__}: {error}"), error)
            raise
        finally:
            self._end()

    def _look(self) -> None:
        """True if there are as many workers as there may be."""
        now = time.monotonic()
        if now >= self.watch.next_at:
            self.watch.look(now)
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._autoscale.look(now, 0, 0.0)
            self._supervisor.muster()

    def _patience(self) -> float | None:
        """None: sleep until something happens."""
        self._asleep = True
        if self._withdrawn or self._killing or (self._waiting and self._may_write_ahead()):
            self._asleep = False
            return 0.0
        return self.watch.patience(time.monotonic())

    def _is_over(self) -> bool:
        self._asleep = False
        while self._withdrawn:
            self._forget(self._withdrawn.popleft())
        if self._killing:
            return True
        self._feed()
        if self._cancelling:
            for call in [*self._written, *self._waiting]:
                call.future.cancel()
        self._write_ahead()
        if not self._written and self._ledger.uneven:
            self._supervisor.tell(Rested())
        if not self._closing or self._calls or self._written:
            return False
        with self._lock:
            self._over = not self._waiting
        return self._over

    def _forget(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is not None:
            self._supervisor.tell(Withdrawn(number))
        else:
            call = next((written for written in self._written if written.number == number), None)
            if call is None:
                return  # it is done already
            self._written.remove(call)
        self._counts["cancelled"] += 1
        call.close()

    def _feed(self) -> None:
        """Send as many calls as the workers have room for."""
        ledger, written = self._ledger, self._written
        most = len(ledger.lives) * (self._deep if self._pace_s < BRISK_S else SHALLOW)
        while ledger.room and len(self._calls) < most and (written or self._write()):
            if _is_large(written[0]) and not ledger.idle:
                break
            call = written.popleft()
            self._calls[call.number] = call
            # The ledger gives up a chunk that has ended one life. The items that are left come again as other calls.
            self._supervisor.tell(Drawn(call.number, 1, 1 if call.items else call.lives))
        self._host.flush()

    def _count(self, ended: int) -> None:
        """Measure how fast results come, from all workers together."""
        now = time.monotonic()
        self._pace_s += 0.2 * ((now - self._last_at) * len(self._ledger.lives) / ended - self._pace_s)
        self._last_at = now

    def _write_ahead(self) -> None:
        """Pickle the next calls while the workers are busy, so that letters are ready when a worker is free."""
        while self._may_write_ahead() and self._write():
            pass

    def _may_write_ahead(self) -> bool:
        """How many letters to keep ready: as many as there are workers, but only one if it is large."""
        written = self._written
        return not written or (len(written) < len(self._ledger.lives) and not _is_large(written[-1]))

    def _write(self) -> bool:
        """Make one more letter; False if no call needs one."""
        while self._waiting:
            call = self._waiting.popleft()
            if not call.future.set_running_or_notify_cancel():
                self._counts["cancelled"] += 1
                call.close()
            elif call.letter is not None or self._put_down(call):
                self._written.append(call)
                return True
        return False

    def _put_down(self, call: Call) -> bool:
        allowed = -1 if call.timeout_s is None else int(call.timeout_s * 1e9)
        limits = (call.lives, allowed, call.memory, call.items)
        try:
            call.letter = self._writer.write(call.fn, call.args, call.kwargs, limits)
        except BaseException as error:  # user code: __reduce__, __getstate__
            self._settler.unsent(call, error)
            return False
        return True

    def _send_soon(self, call: Call) -> None:
        """Send the items that are left of a chunk."""
        call.future.on_cancel(self._withdraw, call.number, self._owner)
        self._waiting.appendleft(call)
        self._counts["submitted"] += 1

    def _rewrite(self, call: Call) -> None:
        """A worker did not find a name that it should know. Send the call again, by value."""
        self._writer.main.forget()
        if call.letter is not None:
            call.letter.close()
        if self._put_down(call):
            self._written.append(call)

    def _payload(self, send: Send) -> bytes:
        letter = self._calls[send.task].letter
        assert letter is not None
        return letter.payload(send.attempt)

    # What came of it -----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        supervisor = self._supervisor
        while supervisor.notes:
            self._narrator.incident(supervisor.notes.popleft())
        if supervisor.ready:
            self._count(len(supervisor.ready))
            if self._journals is not None:
                self._settler.journals = self._journals.take_journals()
        while supervisor.ready:
            number, result = supervisor.ready.popleft()
            call = self._calls.pop(number, None)
            if call is None:
                _discard(result)
            else:
                self._settler.open(call, result)
        stop = supervisor.stop
        if stop is not None and self.broken is None:
            if isinstance(stop.event, BootFailed):
                raised = cast(Result, stop.event.result).open()
                self._break(self._narrator.boot_failure(raised, stop.event.worker))
            else:
                self._break(self._narrator.stop(stop))

    # The end -------------------------------------------------------------------------------------------------------

    def _break(self, error: HoldfastError, cause: BaseException | None = None) -> None:
        """Going on would not help. All futures get the error, and later calls of `submit` raise it."""
        if cause is not None:
            error.__cause__ = cause
        self.broken = error
        self._closing = self._killing = True

    def _end(self) -> None:
        with self._lock:
            self._over = True
        self._record.workers.end()
        try:
            self._host.close(*((0.0,) if self._killing else ()))
            for silence in self._host.leftovers():
                self._narrator.incident(silence)
        finally:
            self._settle_the_rest()
            forks.forget(self)
            self.watch.end()
            atexit.unregister(self.finish)

    def _settle_the_rest(self) -> None:
        for call in [*self._calls.values(), *self._written]:
            self._settler.done(call, None, self._last_words(call))
        self._calls.clear()
        for call in self._waiting:
            if self._cancelling:
                call.future.cancel()
            if call.future.set_running_or_notify_cancel():
                self._settler.done(call, None, self._last_words(call))
            call.close()
        self._waiting.clear()

    def _last_words(self, call: Call) -> HoldfastError:
        """A new error for each future: a traceback grows each time its error is raised."""
        if self.broken is None:
            return self._narrator.killed(call)
        error = type(self.broken)(*self.broken.args)
        error.__cause__ = self.broken.__cause__
        return error


def _is_large(call: Call) -> bool:
    return call.letter is not None and call.letter.large


def _discard(result: object) -> None:
    """The user does not want this call any more."""
    if not isinstance(result, Lost):
        cast(Result, result).discard()
