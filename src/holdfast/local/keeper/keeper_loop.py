"""The keeper: the process that forks, reaps, watches, limits and dumps.

One small single-threaded process between the trainer and its workers, their direct parent. So a replacement starts
in milliseconds and never forks the trainer's threads, CUDA context or held locks again; exits are reaped and hangs
are seen while the trainer is busy, without its GIL. It runs no user code.

It must not outlive the trainer. PDEATHSIG would fire on the death of the parent *thread*, so it watches a pidfd of
the trainer and the end of the control socket instead (and /proc where there is no pidfd). Its workers die with
it: for them it is the only thread of their parent.

Here: its loop, words with the trainer, and deaths. Births are in fork_worker.py, what it does to the living in
worker_watch.py.
"""

import gc
import os
import select
import signal
import socket
import time

from holdfast.core.host import Job
from holdfast.core.messages import Cause, Exited, Leave, Place, Stage
from holdfast.local.keeper.fact_log import FactLog
from holdfast.local.keeper.fork_worker import KeeperOrders, WorkerForker, close_all
from holdfast.local.keeper.worker_life import Scene, WorkerLife
from holdfast.local.keeper.worker_watch import Outbox, WorkerWatch
from holdfast.local.protocol.pulse import LEAVING, PAGE, Pulse
from holdfast.local.protocol.wire import (
    DESCRIPTORS,
    MOST_BYTES,
    EndLife,
    KeeperSignalled,
    KeeperUp,
    LifeStarted,
    StartLife,
    StopAll,
    decode,
)
from holdfast.shm.memory_file import Memory
from holdfast.shm.slot_writer import SlotSpace
from holdfast.system import linux
from holdfast.system.evidence import Evidence, at_death, worlds
from holdfast.system.signal_origin import CRASH_SIGNALS, SenderNote
from holdfast.system.snapshot import Bounds, PySpy, bounds_of

# At the end of all, workers that could not start get this long to leave by themselves: what an initializer has logged
# before it raised is sent by a thread of its process, and takes milliseconds.
PARTING_S = 1.0
# KeeperOrders that are carried out at a stretch: in between somebody must look after those who live.
ORDERS_AT_ONCE = 16


class Keeper:
    """See the module. `run` returns when there is nobody left to keep."""

    def __init__(self, orders: KeeperOrders, job: Job[SlotSpace], signals: list[int]) -> None:
        """`signals`: those that this process was sent, see note_signals_only."""
        self._orders = orders
        self._signals = signals
        self._pulse_memory = Memory(orders.pulses, (orders.workers + 1) * PAGE)
        pulses = [Pulse(self._pulse_memory, i) for i in range(orders.workers)]
        self._sender = SenderNote(self._pulse_memory, orders.workers * PAGE, PAGE)  # the last page is the keeper's own
        self._sender.install(linux.NOTED_SIGNALS)
        self._trainer = linux.open_pidfd(orders.trainer_pid)
        self._poll = select.poll()
        self._stop_at: float | None = None
        self._told_to_stop = self._deaf = False  # by the trainer; it has closed its socket
        self._oom = orders.oom
        self._worlds = worlds()
        self._pyspy = PySpy()
        self._lives: dict[int, WorkerLife] = {}  # by pid
        self._began = time.monotonic()
        settings = {"sample_timeout": orders.sample_timeout, "growth_bytes": orders.growth_bytes}
        self._facts = FactLog(orders.facts, pulses, pool=orders.one_by_one, **settings)
        self._outbox = Outbox(orders.control, self._facts)
        scene = Scene(orders.trainer_threads, self._worlds, self._oom.readable)
        self._forker = WorkerForker(orders, job, pulses, self._lives, self._trainer, self._pyspy, scene)
        self._watch = WorkerWatch(orders, self._lives, self._outbox, self._pyspy)

    def run(self) -> None:
        """Until the trainer says stop, closes the socket, or is gone."""
        self._orders.control.setblocking(False)
        linux.raise_descriptor_limit()  # each worker takes three
        self._poll.register(self._orders.control, select.POLLIN)
        if self._trainer is not None:
            self._poll.register(self._trainer, select.POLLIN)
        gc.disable()
        gc.freeze()  # what is there now stays shared with the workers, untouched by the collector
        linux.give_back_free_memory()
        self._outbox.say(KeeperUp(os.getpid()))
        while not self._over():
            timeout = self._watch.tick_s if self._lives or self._forker.unforked else 1.0
            for fd, _ in self._poll.poll(timeout * 1000):
                if fd == self._trainer:
                    self._trainer_is_gone()
                if fd == self._orders.control.fileno():
                    self._listen()
            self._reap()
            self._tick()
            while self._signals:
                number = self._signals.pop(0)
                evidence = Evidence(pid=os.getpid(), sender=self._sender.last(number), worlds=self._worlds)
                self._outbox.say(KeeperSignalled(number, evidence))
        self._part()
        self._kill_all()
        if not self._told_to_stop:
            trainer = self._orders.trainer_pid
            self._facts.trainer_ended(trainer, self._trainer, self._oom, self._began, time.monotonic())

    def _trainer_is_gone(self) -> None:
        """Its workers go with it. What it said before is heard: it may have said stop."""
        self._stop_at = self._stop_at or time.monotonic()
        self._facts.note_last(self._lives.values(), time.monotonic())
        self._kill_all()
        while self._listen():
            pass

    def _over(self) -> bool:
        if self._trainer is None and linux.process_state(self._orders.trainer_pid) in ("", "Z"):
            return True  # perhaps it was gone before there could be a pidfd
        if self._stop_at is None:
            return False
        return not self._lives or time.monotonic() >= self._stop_at

    def _tick(self) -> None:
        now = time.monotonic()
        if not self._watch.look(now):
            return
        self._oom.look(now)
        self._facts.note(self._lives.values(), now)
        for _ in range(len(self._forker.unforked)):
            self._start(*self._forker.unforked.popleft())
        self._outbox.say()

    def _listen(self) -> bool:
        """True if there may be more at once."""
        for _ in range(ORDERS_AT_ONCE):
            try:
                data, fds, _, _ = socket.recv_fds(self._orders.control, MOST_BYTES, DESCRIPTORS)
            except BlockingIOError:
                self._outbox.say()
                return False
            except OSError:
                data, fds = b"", []
            if not data:
                self._stop_at = self._stop_at or time.monotonic()
                if not self._deaf:
                    self._poll.unregister(self._orders.control)
                self._deaf = True
                return False
            match decode(data):
                case StartLife() as order if self._stop_at is None:
                    self._start(order, fds)
                case StartLife():
                    close_all(fds)  # too late
                case EndLife(worker, number, grace_s):
                    self._release(worker, number, grace_s)
                case StopAll(grace_s):
                    self._stop_at = time.monotonic() + grace_s
                    self._told_to_stop = True
                    self._facts.stopping()
                case other:
                    raise AssertionError(f"not for a keeper: {other}")
        self._outbox.say()
        return True

    def _start(self, order: StartLife, fds: list[int], since: float | None = None) -> None:
        match self._forker.bear(order, fds, since):
            case WorkerLife() as life:
                self._lives[life.pid] = life
                if life.pidfd is not None:
                    self._poll.register(life.pidfd, select.POLLIN)
                self._outbox.say(LifeStarted(order.worker, order.life, life.pid))
            case Exited() as never_born:
                self._outbox.say(never_born)

    def _release(self, worker: int, number: int, grace_s: float) -> None:
        """The trainer does not want this life any more. One that was never born ends, too."""
        for life in self._lives.values():
            if (life.worker, life.life) == (worker, number):
                life.killed_for = life.killed_for if life.killed_for is not None else Cause.ASKED
                if grace_s:
                    life.end_at = time.monotonic() + grace_s
                else:
                    life.kill()
                return
        ended = self._forker.forget(worker, number)
        if ended is not None:
            self._outbox.say(ended)

    # Death ---------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        while self._lives:
            # Looked at before it is reaped: the kernel still knows what it allowed to it.
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            bounds = bounds_of(ended.si_pid) if ended.si_pid in self._lives else None
            pid, status, usage = os.wait4(ended.si_pid, 0)
            self._pyspy.reaped(pid)
            life = self._lives.pop(pid, None)
            if life is not None:
                self._report(life, status, usage.ru_maxrss * 1024, bounds)

    def _report(self, life: WorkerLife, status: int, peak: int, bounds: Bounds | None) -> None:
        now = time.monotonic()
        self._watch.look_for_signals(life, now)
        if life.pidfd is not None:
            self._poll.unregister(life.pidfd)
            os.close(life.pidfd)
        code = os.waitstatus_to_exitcode(status)
        cause = Cause.SIGNAL if code < 0 else Cause.EXIT
        on = life.killed_on or life.pulse.place(now)
        leaving = life.pulse.words[LEAVING]
        if life.killed_for is not None:
            cause = life.killed_for
        elif cause is Cause.EXIT and leaving and code == 0:
            cause, code = Cause.RECYCLED, leaving
            on = on if on.stage >= Stage.FETCH else Place(-1, 0, Stage.IDLE, 0.0)
        killed = cause is Cause.SIGNAL and -code == signal.SIGKILL
        fault = life.pulse.sender.fault(-code)
        seen = life.evidence(
            now,
            stack="" if cause is Cause.RECYCLED else life.stack or life.crash_text(),
            facts=life.facts or (tuple(life.crash_text().splitlines()) if cause is Cause.RECYCLED else ()),
            peak_bytes=peak,
            fault=fault,
            sender=life.pulse.sender.last(-code) if -code in CRASH_SIGNALS else None,
            bounds=bounds,
        )
        evidence = at_death(seen, self._oom, now, killed=killed)
        os.close(life.crash)
        os.close(life.batches)
        self._outbox.say(Exited(life.worker, life.life, now, cause, abs(code), on, evidence, evidence.for_memory))

    def _part(self) -> None:
        """Whoever could not start, and has said so, may leave by itself; the others do not go on meanwhile."""
        leaving = [life for life in self._lives.values() if life.pulse.words[LEAVING] == Leave.UNFIT]
        for life in self._lives.values():
            if life not in leaving:
                life.kill()
        until = time.monotonic() + PARTING_S
        for life in leaving:
            if linux.wait_for_exit(life.pid, until - time.monotonic()):
                del self._lives[life.pid]

    def _kill_all(self) -> None:
        for life in self._lives.values():
            life.kill()
        self._pyspy.stop()
        for pid in self._lives:
            linux.wait_for_exit(pid, 2.0)
        self._lives.clear()


def note_signals_only() -> list[int]:
    """The keeper outlives a scheduler's SIGTERM: the trainer decides what a stop means. Gives where they are noted."""
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        noted.append(number)

    for number in linux.NOTED_SIGNALS:
        signal.signal(number, note)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    return noted
