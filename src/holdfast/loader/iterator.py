"""THE MAIN PATH: index in, batch out.

`next()` draws an index from the sampler, tells the ledger, and waits until the batch whose turn it is has come. All
that can go wrong is decided in core/ledger.py; here it becomes what the user sees: an exception, a log line, an
incident in the report. There is no thread: deaths are noticed, and errors raised, inside `next()` only.

A signal handler may raise wherever Python looks for signals: at the start of a function, after a call, at the end of a
loop's round. What it raises leaves next() out of any line, also when a batch is in our hands, or an index. So next()
knows three cases:

    it comes to its end      with a batch, or with an error that is meant: those travel as values up to `__next__`
    it waits (`_again`)      nothing is half done: the next call begins anew, and gives the very batch that was due
    all else                 the iterator is torn, and every later call says so

Between the last statements of `__next__` nothing is called. Python does not look for signals there, nor when a Python
function returns: whoever gets no exception has the batch.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from holdfast.core.host import Result
from holdfast.core.messages import BootFailed, Drawn, Lost, Short
from holdfast.errors import HoldfastError, WrongProcess
from holdfast.loader.batch_requests import fewer_items, missing, short, shut_down, torn
from holdfast.loader.device import Unpacked
from holdfast.loader.epochs import LOOK_S, LoaderEpochs, came_from_worker
from holdfast.loader.fetch import uncollated
from holdfast.loader.stream import Moved, Snapshot
from holdfast.loader.tree import moved
from holdfast.remote_exception import Raised, what_raised
from holdfast.shm import forks
from holdfast.system.signal_origin import raised_by_handler

# next() that was interrupted after so long, while a worker was on one sample for so long, has waited for that one.
LONG_S = 1.0


class InterruptibleNext:
    """`__next__` of both iterators, in front of torch's.

    `_next_batch` gives the batch, or what is to be raised; None at the end.
    """

    _dataset: Any
    _num_yielded: int
    _profile_name: str
    _IterableDataset_len_called: Any
    _inside = False  # from the beginning of a call to its end; for ever in a torn one
    _torn = False
    _torn_by = ""
    _again = False
    _profiled: Callable[[], bool] = staticmethod(torch.autograd._profiler_enabled)  # type: ignore[attr-defined]

    def _next_batch(self) -> Unpacked | None:
        raise NotImplementedError

    def __next__(self) -> Any:
        if self._inside:
            raise self._refusal()
        self._inside = True
        try:
            if self._profiled():
                with torch.autograd.profiler.record_function(self._profile_name):
                    unpacked = self._next_batch()
            else:
                unpacked = self._next_batch()
        except BaseException as error:
            self._torn = True
            if self._repeatable():
                self._torn = self._inside = False
            self._tell_of(error)
            raise
        self._inside = False
        if unpacked is None:
            raise StopIteration
        if unpacked.error is not None:
            try:
                raise unpacked.error
            finally:
                del unpacked  # or the error would hold on to itself, and to this iterator
        return unpacked.batch

    def _repeatable(self) -> bool:
        """True where nothing was half done."""
        again, self._again = self._again, False
        return again

    def _tell_of(self, error: BaseException) -> None:
        """It is leaving next(), and was not meant to."""
        if self._torn:
            self._torn_by = what_raised(error)

    def _refusal(self) -> RuntimeError:
        if not self._torn:
            return RuntimeError("next() of this iterator runs already: in another thread, or below a signal handler")
        return torn(self._num_yielded, self._torn_by)

    def _warn_of_length(self) -> None:
        if self._num_yielded <= (self._IterableDataset_len_called or 0):
            return
        warnings.warn(
            f"Length of IterableDataset {self._dataset} was reported to be {self._IterableDataset_len_called}"
            f"(when accessing len(dataloader)), but {self._num_yielded} samples have been fetched. "
            "For multiprocessing data-loading, this could be caused by not properly configuring the "
            "IterableDataset replica at each worker. Please see "
            "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples.",
            stacklevel=4,
        )


class WorkerIterator(InterruptibleNext, LoaderEpochs):
    """Iterates over a loader with worker processes."""

    def _next_batch(self) -> Unpacked | None:
        if self._gate is None:
            return self._deliver() if self._transfer is not None else self._delivered(self._due())
        with self._gate.relaxed():
            self._again = True  # it waits for the device
            self._gate.step()
            self._gate.pace()
            self._again = False
            return self._deliver()

    def _repeatable(self) -> bool:
        waited, self._host.resting = self._host.resting, False
        return super()._repeatable() or waited

    def _deliver(self) -> Unpacked | None:
        if self._transfer is None:
            unpacked = self._due()
        else:
            unpacked = self._transfer.next(self._due, self._at_once)
            if not self._drained:
                self._draw()
        return self._delivered(unpacked)

    def _delivered(self, unpacked: Unpacked | None) -> Unpacked | None:
        if unpacked is None or unpacked.error is not None:
            return unpacked
        counts = self._record.counts
        counts["samples"] += unpacked.samples
        counts["batches"] += 1
        self._num_yielded += 1
        if self._record.kept_in is not None:
            self._record.kept_in.write_totals(self._stats)
        if self._iterable and self._IterableDataset_len_called is not None:
            self._warn_of_length()
        return unpacked

    def _due(self) -> Unpacked | None:
        """The next one, when it has come, or what is to be raised; None at the end."""
        supervisor, ready = self._supervisor, self._ready
        while True:
            if not ready:
                lost = self._wait()
                if lost is not None:
                    return Unpacked(error=lost)
            if supervisor.notes:
                self._narrator.all_of(supervisor.notes)
            if supervisor.stop is not None:
                return Unpacked(error=self._stopped())
            if not ready:
                self._again = True  # it waits for workers to leave
                self._end()
                self._again = False
                lost = self._not_whole()
                return None if lost is None else Unpacked(error=lost)
            unpacked = self._take()
            if unpacked is not None:
                return unpacked

    def _at_once(self) -> Unpacked | None:
        """The next one, if it is there already."""
        if not self._ready:
            self._supervisor.step(0)
        unpacked = None
        while unpacked is None and self._ready and self._supervisor.stop is None:
            unpacked = self._take()
        return unpacked

    def _take(self) -> Unpacked | None:
        """One that is ready; None where nothing was left of it."""
        task, result = self._ready.popleft()
        samples = self._orders.take(task)
        if not self._drained and self._transfer is None:
            self._draw()
        unpacked = self._open(task, samples, result)
        if unpacked is None or unpacked.error is not None:
            self._told += 1
        return unpacked

    def _wait(self) -> HoldfastError | None:
        """Until a batch is ready, or nothing is left to wait for; the error when that is in vain."""
        record = self._record
        began = record.waiting_since = time.monotonic()
        lost = self._wait_since(began)
        waited = time.monotonic() - began
        record.waiting_since = None
        record.waited_s += waited
        if began + waited >= self._look_at:
            self._look(0.0)
        return lost

    def _wait_since(self, began: float) -> HoldfastError | None:
        supervisor, ready, limit = self._supervisor, self._ready, self._timeout or None
        while not ready and supervisor.stop is None:
            if supervisor.resolved == self._next_task - self._first_task:
                self._draw()  # dropped tasks made room
                if supervisor.resolved == self._next_task - self._first_task:
                    break
            if self._host.closed:
                return shut_down(self._num_yielded)
            left = None if limit is None else began + limit - time.monotonic()
            if left is not None and left <= 0:
                return self._late()
            if self._in_order:
                self._host.want(self._first_task + supervisor.resolved)
            self._step(left)
            if not ready:
                self._draw()
                if time.monotonic() >= self._look_at:
                    self._look(time.monotonic() - began)
        return None

    def _tell_of(self, error: BaseException) -> None:
        """A Ctrl-C while next() waits, say: which sample does it wait for?"""
        super()._tell_of(error)
        record = self._record
        began, record.waiting_since = record.waiting_since, None
        if began is None:
            return
        waited = time.monotonic() - began
        record.waited_s += waited
        at_work = self._at_work() if waited >= LONG_S else None
        if at_work is not None and at_work[1].seconds >= LONG_S:
            # Below the traceback: whoever pressed Ctrl-C in a hang sees there what it waited for.
            error.add_note(self._narrator.interrupted(type(error).__name__, waited, *at_work))

    def _look(self, waiting_s: float) -> None:
        """Are there as many workers as there should be?"""
        now, record = time.monotonic(), self._record
        self._look_at = now + LOOK_S
        if not self._autoscale.steady:
            self._autoscale.look(now, record.counts["batches"], record.waited_s + waiting_s)
            self._supervisor.muster()
        if not self._drained:
            self._draw()

    def _draw(self) -> None:
        """Take from the sampler what there is room for: never further ahead than torch does."""
        supervisor = self._supervisor
        room = self._factor * self._ledger.at_work
        if self._iterable:  # as torch: one more for each stream that has ended, none for what was asked of it in vain
            room = max(1, room + self._ledger.ended_streams - supervisor.dropped)
        if self._transfer is not None:
            room -= len(self._transfer)
        while self._next_task - self._first_task - supervisor.resolved + len(self._ready) < room:
            if self._drained:
                return
            if self._iterable and not self._ledger.open_streams:
                self._drained = True
                return
            try:
                asked = next(self._sampler_iter)
            except StopIteration:
                self._drained = True
                return
            task = self._next_task
            drawn = Drawn(task, self._orders.add(task, asked))  # (an index that cannot be pickled is no task)
            self._next_task = task + 1
            supervisor.tell(drawn)

    def _open(self, task: int, samples: int, result: object) -> Unpacked | None:
        """The batch, or what the user must see in its place; None where nothing was left of it."""
        if isinstance(result, Lost):
            return Unpacked(error=self._narrator.lost(result))
        if isinstance(result, Short):
            return Unpacked(error=short(result))
        result = cast(Result, result)
        try:
            # A device reads small leaves from the slot as well as large ones. (Empty ones have no place in it.)
            content = result.open() if self._transfer is None else result.open(small=1)
        except Exception as error:  # the user's __setstate__, say
            return self._own(error)
        if result.failed:
            self._orders.items.pop(result.worker, None)
            return Unpacked(error=self._narrator.failure(content, task - self._first_task, result.worker))
        notes, batch = content
        if notes is not None:
            samples = self._take_notes(notes, samples, task - self._first_task, result.worker)
            if batch is None and not samples:  # (what a collate_fn gives may be None, too)
                return None
        if self._gate is not None and self._gate.refused is not None:
            self._narrator.not_registered(self._gate.refused)
        try:
            if self._pin_memory:
                batch = self._pinned(batch)
            elif self._plain_device is not None:
                batch = moved(batch, self._plain_device)
        except Exception as error:
            return self._own(error)
        return Unpacked(batch, samples, result)

    def _own(self, error: Exception) -> Unpacked:
        """An error of this batch's own: the next call goes on with the next one."""
        if raised_by_handler(error):
            raise error
        return Unpacked(error=error)

    def _pinned(self, batch: Any) -> Any:
        """What lies in a registered slot is pinned already; small leaves are not, nor what the user's types hold."""
        if self._gate is not None and self._gate.capturing():
            return batch  # torch would have to ask the driver
        return pin_memory(batch, self._pin_memory_device)  # type: ignore[no-untyped-call]

    # What the user is told -----------------------------------------------------------------------------------------

    def _take_notes(self, notes: Any, samples: int, batch: int, worker: int) -> int:
        """What went wrong on the way to a batch, and a stream's place after it; gives how many samples are in it."""
        if self._iterable:
            troubles, _, samples, _ = notes
            self._note_place(notes, worker)
            if worker in self._orders.items:
                self._orders.items[worker] += samples
            samples -= uncollated(troubles)
        else:
            troubles = notes
            samples -= sum(trouble.fate == "skipped" for trouble in troubles)
        self._narrator.troubles(troubles, batch, worker)
        return int(samples)

    def _note_place(self, notes: tuple[Any, Snapshot | Raised | None, int, Moved], worker: int) -> None:
        """A place to which the next life of this worker can be brought; or why there is none."""
        _, snapshot, _, moved = notes
        self._orders.began(worker, moved)
        if isinstance(snapshot, Raised):
            self._narrator.no_snapshots(snapshot, worker)
        elif snapshot is not None:
            self._orders.snapshots[worker] = snapshot

    def _stopped(self) -> BaseException:
        """Going on would not help: the exception to raise. All processes are ended."""
        stop = self._supervisor.stop
        assert stop is not None
        if self._last_words is None:
            self._hear_all([*self._ready, *stop.results])
            self._last_words = (
                self._narrator.boot_failure(cast(Result, stop.event.result).open(), stop.event.worker)
                if isinstance(stop.event, BootFailed)
                else self._narrator.stop(stop)
            )
        self._again = True
        self._close_host()
        self._again = False
        return self._last_words

    def _hear_all(self, results: list[tuple[int, object]]) -> None:
        """What the batches that nobody will get could tell of bad samples."""
        for task, result in results:
            came = came_from_worker(result)
            if came is not None:
                samples, batch = self._orders.take(task), task - self._first_task
                content = came.open()
                if came.failed:
                    self._narrator.troubles(content.troubles, batch, came.worker)
                elif content[0] is not None:
                    self._take_notes(content[0], samples, batch, came.worker)
        self._ready.clear()

    def _not_whole(self) -> HoldfastError | None:
        """Something that was asked for did not come, and nobody was told."""
        asked = self._next_task - self._first_task
        lost = missing(asked, self._num_yielded, self._told, self._supervisor.dropped)
        return lost or fewer_items(self._host.items, self._orders.items)

    def close_in_child(self) -> None:
        """In a forked child of the trainer. Another class asks nothing of the path of a batch."""
        self.__class__ = InheritedIterator


class InheritedIterator(WorkerIterator):
    """What an iterator is in a forked child: its host is closed there, and it gives nothing."""

    def __next__(self) -> Any:
        raise self._refusal()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        raise self._refusal()

    def _refusal(self) -> WrongProcess:
        return forks.wrong_process("iterator", self._owner, "make a new one in this process: iter(loader)")
