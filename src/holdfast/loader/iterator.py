"""THE MAIN PATH: index in, batch out.

`next()` draws an index from the sampler, tells the ledger, and waits until the batch whose turn it is has come. All
that can go wrong is decided in core/ledger.py; here it becomes what the user sees: an exception, a log line, an
incident in the report. There is no thread: deaths are noticed, and errors raised, inside `next()` only.
"""

import os
import time
import weakref
from collections import deque
from functools import partial
from multiprocessing import get_context
from typing import Any, ClassVar, cast

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _sharding_worker_init_fn

from holdfast.core.autoscale import Autoscale
from holdfast.core.host import HasPulses, Host, HostMaker, KnowsMemory, LendsSlots, Result, Room, WorkerProcess
from holdfast.core.ledger import Ledger
from holdfast.core.messages import BootFailed, Deliver, Drawn, Lost, Short
from holdfast.core.supervisor import Supervisor
from holdfast.diagnose.report import Record
from holdfast.errors import BatchTimeout, HoldfastError, LoaderTorn, WrongProcess
from holdfast.loader import seeds
from holdfast.loader.batch_requests import BatchRequests, fewer_items, missing, short
from holdfast.loader.device import Unpacked, checked, way_to
from holdfast.loader.fetch import uncollated
from holdfast.loader.interruptible_next import InterruptibleNext
from holdfast.loader.loader_job import LoaderJob, Recipe
from holdfast.loader.loader_narrator import LoaderNarrator, totals
from holdfast.loader.measure import large_parts
from holdfast.loader.stream import Moved, Snapshot
from holdfast.loader.tree import moved
from holdfast.local.trainer.local_host import LocalHost
from holdfast.policy import Policy
from holdfast.remote_exception import Raised
from holdfast.shm import forks
from holdfast.system.cgroups import growth_bytes, usable_cpus
from holdfast.system.signal_origin import raised_by_handler

# A worker holds at most this many tasks: its pipe must never be full. More may be drawn; they wait with us.
MOST_PER_WORKER = 1000
# With "auto": no more workers than this for each processor, and in all. Samples that wait for a disk or a network all
# the time may want even more; they cost memory, and somebody else's patience.
MOST_PER_CPU = 8
MOST_WORKERS = 64
# It begins with so many more than there are processors: hardly a load computes all the time, and where it does, they
# cost no batch.
MORE_THAN_CPUS = 2
# How often it is thought over how many workers there should be.
LOOK_S = 0.25


class WorkerIterator(InterruptibleNext, _BaseDataLoaderIter):
    """Iterates over a loader with worker processes."""

    _host_maker: ClassVar[HostMaker] = LocalHost

    def __init__(self, loader: Any, policy: Policy, record: Record) -> None:
        super().__init__(loader)
        self._policy = policy
        self._record = record
        self._iterable = self._dataset_kind == _DatasetKind.Iterable
        self._in_order = loader.in_order
        self._factor = loader.prefetch_factor
        self._depth = min(loader.prefetch_factor, MOST_PER_WORKER)
        self._by_turns = loader.worker_init_fn is not None
        self._adapt = policy.auto_workers and not (self._iterable or self._by_turns)
        if self._adapt:
            start = self._num_workers
            self._num_workers = max(start, min(MOST_WORKERS, MOST_PER_CPU * usable_cpus()))
            self._start = record.wish or min(self._num_workers, start + MORE_THAN_CPUS)
        else:
            self._start = self._num_workers
        self._growth = growth_bytes(policy.worker_bytes, self._start)
        context = loader.multiprocessing_context
        self._method: str = (context if context is not None else get_context()).get_start_method()
        self._epoch = -1
        self._next_task = 0
        device = checked(loader._holdfast_device)
        pinned_for = (self._pin_memory_device or "cuda") if self._pin_memory else None
        self._gate, self._transfer, self._plain_device = way_to(
            device, pinned_for, self._factor * self._num_workers, record
        )
        self._pin_memory = self._pin_memory and device is None  # what is on a device cannot be pinned
        self._stats = partial(totals, record, loader.num_workers, self._dataset)
        self._owner = os.getpid()
        forks.watch(self)
        self._open_host(loader)
        try:
            self._reset(loader, first_iter=True)
        except BaseException:
            self._shutdown_workers()
            raise

    def _open_host(self, loader: Any) -> None:
        """New processes, and what knows of them. Nothing of a host that is closed is used again."""
        policy, record = self._policy, self._record
        self._host = self._make_host(loader)
        # Whatever ends this iterator, a `break`, an exception or the interpreter's end, ends its processes.
        self._finalizer = weakref.finalize(self, _close_for_good, self._host)
        self._orders = BatchRequests(
            policy, self._host.marks, iterable=self._iterable, auto_collation=self._auto_collation
        )
        parts = partial(large_parts, self._dataset)
        names = self._orders.sample_of
        self._narrator = LoaderNarrator(record, policy, self._growth, self._method, names, self._host.pid_of, parts)
        if self._method == "fork" and isinstance(self._host, LocalHost):
            self._narrator.look_at_files(self._dataset)
        if self._gate is not None and isinstance(self._host, LendsSlots):
            self._host.lend_through(self._gate)
        self._host.open()
        record.workers.begin(list(self._host.pulses) if isinstance(self._host, HasPulses) else ())

    def _make_host(self, loader: Any) -> Host:
        init = loader.worker_init_fn
        if isinstance(self._dataset, IterDataPipe | MapDataPipe):
            init = partial(_sharding_worker_init_fn, init, self._world_size, self._rank)
        recipe = Recipe(
            dataset=self._dataset,
            collate_fn=self._collate_fn,
            auto_collation=self._auto_collation,
            drop_last=self._drop_last,
            iterable=self._iterable,
            worker_init_fn=init,
            num_workers=self._num_workers,
            persistent=self._persistent_workers,
            base_seed=int(self._base_seed),
            shared_seed=self._shared_seed,
            policy=self._policy,
            growth_bytes=self._growth,
        )
        return self._host_maker(
            self._num_workers,
            self._factor * self._num_workers,
            LoaderJob(recipe),
            fork=self._method == "fork",
            sample_timeout=self._policy.sample_timeout,
            growth_bytes=self._growth,
            need=self._record.need,
            fixed=self._iterable or self._by_turns,
            enough=self._enough_slots(),
        )

    @property
    def _room(self) -> Room:
        """How many workers fit into memory, as far as somebody knows."""
        return self._host.room if isinstance(self._host, KnowsMemory) else Room(self._num_workers, False)

    def _enough_slots(self) -> int | None:
        """One for each worker where they fill the processors and hand their batches straight over.

        See shm/slot_claims.py.
        """
        if not self._in_order:
            return None
        straight = self._gate is None and not self._adapt
        return 1 if straight and self._num_workers >= max(2, usable_cpus()) else 2

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """A new epoch; with persistent workers, in the processes of the last one, unless that was torn or stopped."""
        anew = first_iter or self._inside or self._host.closed
        self._inside = self._torn = True  # until it has begun
        if not first_iter:
            if not anew:
                self._leave_epoch()
            super()._reset(loader)
            anew = anew or self._host.closed  # it was stopped, or shut down from outside
            if anew:
                self._shutdown_workers()
                self._open_host(loader)
        self._epoch += 1
        # The first epoch is seeded by what torch drew; later ones of persistent workers each by their number.
        base = int(self._base_seed)
        self._seed = base if first_iter else seeds.mix(base, -1_000_000 - self._epoch)
        self._first_task = self._next_task
        self._orders.begin(self._seed, self._epoch, self._first_task, self._shared_seed)
        self._drained = False
        self._began = time.monotonic()
        self._last_words: BaseException | None = None
        self._told = 0  # batches for which next() raised, or of which nothing was left
        if self._transfer is not None:
            self._transfer.clear()
        self._narrator.first_task = self._first_task
        if not anew:
            for result in (*(delivery.result for delivery in self._ready), *self._ledger.parked):
                _discard(result)  # of an epoch that was left
        running = [] if anew else self._ledger.lives
        if anew:
            self._autoscale = Autoscale(self._num_workers, self._start, self._adapt)
            self._autoscale.room(*self._room)
        self._autoscale.rest()
        self._look_at = self._began + LOOK_S
        self._ledger: Ledger = Ledger(
            self._num_workers,
            self._depth,
            self._policy,
            in_order=self._in_order,
            streams=self._iterable,
            # A worker_init_fn may seed the generators by worker: then which worker loads a batch must not be chance.
            round_robin=self._by_turns,
            first_task=self._next_task,
            running=running,
            allowed=self._autoscale.allowed.workers,
        )
        self._supervisor = Supervisor(self._ledger, self._host, self._orders.payload, self._autoscale)
        self._ready: deque[Deliver] = self._supervisor.ready
        if not anew:
            self._host.abandon_below(self._next_task)
        self._supervisor.open(self._began)
        self._draw()
        self._inside = self._torn = False

    def _leave_epoch(self) -> None:
        """The one before. What was asked of streams is given first, as with torch: a dataset may go on from there."""
        supervisor, limit = self._supervisor, self._timeout or None
        if not self._iterable or self._host.closed:
            return
        began = time.monotonic()
        while supervisor.resolved < self._next_task - self._first_task and supervisor.stop is None:
            left = None if limit is None else began + limit - time.monotonic()
            if left is not None and left <= 0:
                raise BatchTimeout(f"DataLoader timed out after {limit} seconds")
            self._pass_over()
            supervisor.step(left)
        self._pass_over()
        if supervisor.stop is not None:
            self._stopped()  # it is in the report; the new epoch has new processes
        else:
            self._orders.leave(self._ledger.streams_left, self._host.ends)

    def _pass_over(self) -> None:
        """Batches that nobody will get, but for what they say of their stream."""
        while self._supervisor.notes:
            self._narrator.incident(self._supervisor.notes.popleft())
        while self._ready:
            _, result = self._ready.popleft()
            came = _came(result)
            if came is not None and not came.failed:
                notes, _ = came.open()
                self._note_place(notes, came.worker)
            else:
                _discard(result)

    # The path of a batch -------------------------------------------------------------------------------------------

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
            while supervisor.notes:
                self._narrator.incident(supervisor.notes.popleft())
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
        supervisor, ready, limit = self._supervisor, self._ready, self._timeout or None
        began = time.monotonic()
        while not ready and supervisor.stop is None:
            if supervisor.resolved == self._next_task - self._first_task:
                self._draw()  # dropped tasks made room
                if supervisor.resolved == self._next_task - self._first_task:
                    break
            if self._host.closed:
                return LoaderTorn(
                    "the workers of this loader were shut down in the middle of an epoch: what was to come is lost\n"
                    "    try    make a new iterator: iter(loader)"
                )
            left = None if limit is None else began + limit - time.monotonic()
            if left is not None and left <= 0:
                return BatchTimeout(f"DataLoader timed out after {limit} seconds")
            if self._in_order:
                self._host.want(self._first_task + supervisor.resolved)
            supervisor.step(left)
            if not ready:
                self._draw()
                if time.monotonic() >= self._look_at:
                    self._look(time.monotonic() - began)
        waited = time.monotonic() - began
        self._record.waited_s += waited
        if began + waited >= self._look_at:
            self._look(0.0)
        return None

    def _look(self, waiting_s: float) -> None:
        """Are there as many workers as there should be?"""
        now, record = time.monotonic(), self._record
        self._look_at = now + LOOK_S
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
            came = _came(result)
            if came is not None:
                samples, batch = self._orders.take(task), task - self._first_task
                content = came.open()
                if came.failed:
                    self._narrator.troubles(content.troubles, batch, came.worker)
                elif content[0] is not None:
                    self._take_notes(content[0], samples, batch, came.worker)
        self._ready.clear()

    # The end -------------------------------------------------------------------------------------------------------

    def _not_whole(self) -> HoldfastError | None:
        """Something that was asked for did not come, and nobody was told."""
        asked = self._next_task - self._first_task
        lost = missing(asked, self._num_yielded, self._told, self._supervisor.dropped)
        return lost or fewer_items(self._host.items, self._orders.items)

    def _end(self) -> None:
        self._record.wish = self._autoscale.wish if self._adapt else 0
        if isinstance(self._host, KnowsMemory):
            self._record.need = self._host.need
        ran_s = time.monotonic() - self._began
        if self._transfer is not None:
            self._transfer.clear()
        if not self._persistent_workers:
            self._shutdown_workers()
        if self._record.kept_in is not None:
            self._record.kept_in.write_totals(self._stats, running=False)
        if self._gate is not None:
            self._gate.step()  # what those workers had is unregistered now, not when some other loader runs
        self._record.ran_s += ran_s

    @property
    def _workers(self) -> list[WorkerProcess]:
        """Process-like handles, as third parties expect them."""
        return list(self._host.workers)

    @property
    def _workers_status(self) -> list[bool]:
        return [worker.is_alive() for worker in self._host.workers]

    def _shutdown_workers(self) -> None:
        """End all processes of this iterator."""
        if self._finalizer.alive:
            self._record.workers.end()
        self._close_host()
        for silence in self._host.leftovers():
            self._narrator.incident(silence)

    def _close_host(self) -> None:
        """May be called again where it was cut short."""
        self._host.close()
        self._finalizer.detach()

    def close_in_child(self) -> None:
        """In a forked child of the trainer. Another class asks nothing of the path of a batch."""
        self.__class__ = InheritedIterator


def _came(result: object) -> Result | None:
    """What came from a worker; None where the ledger itself has put something in its place."""
    return None if result is None or isinstance(result, Lost | Short) else cast(Result, result)


def _discard(result: object) -> None:
    """Nobody opens it."""
    came = _came(result)
    if came is not None:
        came.discard()


def _close_for_good(host: Host) -> None:
    """As `close`, where nobody would call again, and Python only prints what is raised."""
    try:
        host.close()
    except BaseException:
        host.close(0.0)
        raise


class InheritedIterator(WorkerIterator):
    """What an iterator is in a forked child: its host is closed there, and it gives nothing."""

    def __next__(self) -> Any:
        raise self._refusal()

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        raise self._refusal()

    def _refusal(self) -> WrongProcess:
        return forks.wrong_process("iterator", self._owner, "make a new one in this process: iter(loader)")
