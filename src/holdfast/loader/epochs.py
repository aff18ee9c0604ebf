"""The epochs of a loader with workers: its host is opened, an epoch begins, is left early, or ends.

What happens to each batch in between is in iterator.py.
"""

import os
import time
import weakref
from collections import deque
from functools import partial
from multiprocessing import get_context
from typing import Any, ClassVar, cast

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _sharding_worker_init_fn

from holdfast.core.autoscale import Autoscale
from holdfast.core.host import HasPulses, Host, HostMaker, KnowsMemory, LendsSlots, Result, Room, WorkerProcess
from holdfast.core.ledger import Ledger
from holdfast.core.messages import Deliver, Lost, Place, Short, Stage
from holdfast.core.supervisor import Supervisor
from holdfast.diagnose.narrator import Record
from holdfast.diagnose.run_folder import TOTALS_S
from holdfast.errors import BatchTimeout
from holdfast.loader import seeds
from holdfast.loader.batch_requests import BatchRequests
from holdfast.loader.device import checked, way_to
from holdfast.loader.loader_job import LoaderJob, Recipe
from holdfast.loader.loader_narrator import LoaderNarrator, totals
from holdfast.loader.measure import large_parts
from holdfast.loader.stream import Moved, Snapshot
from holdfast.local.trainer.local_host import LocalHost
from holdfast.policy import Policy
from holdfast.remote_exception import Raised
from holdfast.shm import forks
from holdfast.system.cgroups import growth_bytes, usable_cpus

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
# A worker that is there, and waits for the trainer.
_IDLE = (Stage.IDLE, Stage.ANNOUNCE)


class LoaderEpochs(_BaseDataLoaderIter):
    """The part of the iterator that is not on the way of a batch. What it asks of the other part stands at the end."""

    _inside: bool  # see InterruptibleNext
    _torn: bool
    _torn_by: str
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
            facts=None if self._record.kept_in is None else self._record.kept_in.log_of_facts(),
        )

    @property
    def _room(self) -> Room:
        """How many workers fit into memory, as far as somebody knows."""
        return self._host.room if isinstance(self._host, KnowsMemory) else Room(self._num_workers, False)

    def _enough_slots(self) -> int | None:
        """One for each worker where they fill the processors and hand their batches straight over.

        See shm/slot_writer.py.
        """
        if not self._in_order:
            return None
        straight = self._gate is None and not self._adapt
        return 1 if straight and self._num_workers >= max(2, usable_cpus()) else 2

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """A new epoch; with persistent workers, in the processes of the last one, unless that was torn or stopped."""
        anew = first_iter or self._inside or self._host.closed
        self._inside = self._torn = True  # until it has begun
        self._torn_by = ""
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
                raise self._late()
            self._pass_over()
            self._step(left)
        self._pass_over()
        if supervisor.stop is not None:
            self._stopped()  # it is in the report; the new epoch has new processes
        else:
            self._orders.leave(self._ledger.streams_left, self._host.ends)

    # Waiting ------------------------------------------------------------------------------------------------------

    def _step(self, left_s: float | None) -> None:
        """Wait, and tell what happens: whoever kills this process, or interrupts it, finds that told."""
        kept_in, notes = self._record.kept_in, self._supervisor.notes
        if kept_in is not None:
            left_s = TOTALS_S if left_s is None else min(left_s, TOTALS_S)
        self._supervisor.step(left_s)
        if notes:
            self._narrator.all_of(notes)
        if kept_in is not None:
            kept_in.write_totals(self._stats)

    def _at_work(self) -> tuple[int, Place] | None:
        """A worker that has something to do, and what that is: the one that the next batch waits for, if that is known,
        or the one that has been at it for longest."""
        if not isinstance(self._host, HasPulses):
            return None
        now, due = time.monotonic(), self._first_task + self._supervisor.resolved
        found = [(worker, pulse.place(now)) for worker, pulse in enumerate(self._host.pulses)]
        busy = [(worker, on) for worker, on in found if on.stage not in _IDLE and self._host.pid_of(worker) is not None]
        return max(busy, key=lambda each: (each[1].task == due, each[1].seconds), default=None)

    def _late(self) -> BatchTimeout:
        """The loader's own `timeout` has run out."""
        return self._narrator.late(self._timeout, self._supervisor.resolved, self._at_work())

    def _pass_over(self) -> None:
        """Batches that nobody will get, but for what they say of their stream."""
        self._narrator.all_of(self._supervisor.notes)
        while self._ready:
            _, result = self._ready.popleft()
            came = came_from_worker(result)
            if came is not None and not came.failed:
                notes, _ = came.open()
                self._note_place(notes, came.worker)
            else:
                _discard(result)

    # The end -------------------------------------------------------------------------------------------------------

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

    # In iterator.py ------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        raise NotImplementedError

    def _note_place(self, notes: tuple[Any, Snapshot | Raised | None, int, Moved], worker: int) -> None:
        raise NotImplementedError

    def _stopped(self) -> BaseException:
        raise NotImplementedError

    def close_in_child(self) -> None:
        raise NotImplementedError


def came_from_worker(result: object) -> Result | None:
    """What came from a worker; None where the ledger itself has put something in its place."""
    return None if result is None or isinstance(result, Lost | Short) else cast(Result, result)


def _discard(result: object) -> None:
    """Nobody opens it."""
    came = came_from_worker(result)
    if came is not None:
        came.discard()


def _close_for_good(host: Host) -> None:
    """As `close`, where nobody would call again, and Python only prints what is raised."""
    try:
        host.close()
    except BaseException:
        host.close(0.0)
        raise
