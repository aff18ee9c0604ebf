"""THE MAIN PATH: index in, batch out.

`next()` draws an index from the sampler, tells the ledger, and waits until the batch whose turn it is has come. All
that can go wrong is decided in core/ledger.py; here it becomes what the user sees: an exception, a log line, an
incident in the report. There is no thread: deaths are noticed, and errors raised, inside `next()` only.
"""

import logging
import pickle
import random
import time
import weakref
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind, _sharding_worker_init_fn

from holdfast.core.host import Silence
from holdfast.core.ledger import Ledger
from holdfast.core.messages import BootFailed, Drawn, Exited, Lost, Note, Send, Stage
from holdfast.core.supervisor import Supervisor
from holdfast.diagnose.finding import Case
from holdfast.diagnose.report import BadSample, Incident, Record, incident_of, where
from holdfast.errors import BatchTimeout, LoaderTorn, TooManyBad, WorkerLost
from holdfast.loader import seeds
from holdfast.loader.fetch import Failure, Trouble
from holdfast.loader.job import LoaderJob, Recipe, notes_of
from holdfast.local.host import LocalHost, Parcel, WorkerHandle
from holdfast.local.pulse import RETRIES, SAMPLES
from holdfast.local.raised import Raised, to_raise
from holdfast.policy import Policy

log = logging.getLogger("holdfast")

# A worker holds at most this many tasks: its pipe must never be full. More may be drawn; they wait with us.
MOST_PER_WORKER = 1000
# Indices a worker may try in the place of a bad one.
SPARES = 8


class WorkerIterator(_BaseDataLoaderIter):
    """Iterates over a loader with worker processes."""

    def __init__(self, loader: Any, policy: Policy, record: Record) -> None:
        super().__init__(loader)
        self._policy = policy
        self._record = record
        self._iterable = self._dataset_kind == _DatasetKind.Iterable
        self._in_order = loader.in_order
        self._prefetch = loader.prefetch_factor * self._num_workers
        self._depth = min(loader.prefetch_factor, MOST_PER_WORKER)
        self._batch_size = loader.batch_size
        context = loader.multiprocessing_context
        self._context = context if context is not None else get_context()
        self._method: str = self._context.get_start_method()
        self._profiled = torch.autograd._profiler_enabled
        self._epoch = -1
        self._next_task = 0
        self._host = self._make_host(loader)
        # Whatever ends this iterator, a `break`, an exception or the interpreter's end, ends its processes.
        self._finalizer = weakref.finalize(self, self._host.close)
        self._host.open()
        self._reset(loader, first_iter=True)

    def _make_host(self, loader: Any) -> LocalHost:
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
            base_seed=self._base_seed,
            shared_seed=self._shared_seed,
            policy=self._policy,
        )
        context: BaseContext | None = None if self._method == "fork" else self._context
        return LocalHost(
            self._num_workers,
            self._prefetch,
            LoaderJob(recipe),
            context=context,
            sample_timeout=self._policy.sample_timeout,
            growth_bytes=self._policy.worker_bytes,
        )

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """A new epoch; with persistent workers, in the processes of the last one."""
        if not first_iter:
            super()._reset(loader)
            self._fold_counts()
        self._epoch += 1
        # The first epoch is seeded by what torch drew; later ones of persistent workers each by their number.
        self._seed = self._base_seed if first_iter else seeds.mix(self._base_seed, -1_000_000 - self._epoch)
        self._first_task = self._next_task
        self._asked: dict[int, Any] = {}  # task -> index or indices
        self._given: list[Any] = []  # all indices so far, for "replace"
        self._streams: dict[int, tuple[int, Any]] = {}  # worker -> (fingerprint, snapshot)
        self._drained = False
        self._over = False
        self._waited_s = 0.0
        self._delivered = 0
        running = () if first_iter else self._ledger.lives
        self._ledger = Ledger(
            self._num_workers,
            self._depth,
            self._policy,
            in_order=self._in_order,
            streams=self._iterable,
            first_task=self._next_task,
            running=running,
        )
        self._supervisor = Supervisor(self._ledger, self._host, self._payload)
        self._ready = self._supervisor.ready
        if not first_iter:
            self._host.abandon_below(self._next_task)
        self._supervisor.open()
        self._draw()

    # The path of a batch -------------------------------------------------------------------------------------------

    def __next__(self) -> Any:
        if self._profiled():
            with torch.autograd.profiler.record_function(self._profile_name):
                return self._next_batch()
        return self._next_batch()

    def _next_batch(self) -> Any:
        supervisor, ready = self._supervisor, self._ready
        if supervisor.torn:
            raise LoaderTorn(
                "an interrupt (Ctrl-C, a signal handler that raised) hit this loader in the middle of its "
                "bookkeeping\n    try    make a new iterator: iter(loader)"
            )
        while True:
            if not ready:
                self._wait()
            if supervisor.notes:
                self._tell_incidents()
            if supervisor.stop is not None:
                self._raise_stop()
            if not ready:
                self._end()
                raise StopIteration
            task, result = ready.popleft()
            asked = self._asked.pop(task)
            if not self._drained:
                self._draw()
            batch = self._open(task, asked, result)
            if batch is not None:
                return batch[0]

    def _wait(self) -> None:
        """Until a batch is ready, or nothing is left to wait for."""
        supervisor, ready, limit = self._supervisor, self._ready, self._timeout or None
        began = time.monotonic()
        while not ready and supervisor.stop is None:
            if supervisor.resolved == self._next_task - self._first_task:
                self._draw()  # dropped tasks made room
                if supervisor.resolved == self._next_task - self._first_task:
                    break
            left = None if limit is None else began + limit - time.monotonic()
            if left is not None and left <= 0:
                raise BatchTimeout(f"DataLoader timed out after {limit} seconds")
            supervisor.step(left)
            if not ready:
                self._draw()
        self._waited_s += time.monotonic() - began

    def _draw(self) -> None:
        """Take from the sampler what there is room for: never further ahead than torch does."""
        supervisor = self._supervisor
        while self._next_task - self._first_task - supervisor.resolved + len(self._ready) < self._prefetch:
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
            self._asked[task] = asked
            self._next_task = task + 1
            samples = len(asked) if self._auto_collation else 1
            if self._policy.bad_sample == "replace" and not self._iterable:
                self._given += asked if self._auto_collation else (asked,)
            supervisor.tell(Drawn(task, samples))

    def _payload(self, send: Send) -> bytes:
        """What a worker is told of a task."""
        asked = self._asked[send.task]
        number = send.task - self._first_task
        if self._iterable:
            done, snapshot = self._streams.get(send.worker, (0, None))
            size = len(asked) if self._auto_collation else 1
            shared = self._shared_seed
            return pickle.dumps((self._seed, self._epoch, send.number, size, done, snapshot, shared), 5)
        spares = self._spares(number) if self._policy.bad_sample == "replace" else ()
        positions = None
        if send.bad:
            asked, positions = self._without(asked, send.bad, spares)
        return pickle.dumps((self._seed, number, send.attempt, asked, positions, send.alone, spares), 5)

    def _spares(self, number: int) -> list[Any]:
        """Indices already given in this epoch, chosen by the seed: the same in every run."""
        chooser = random.Random(seeds.mix(self._seed, -5 - number))
        return chooser.choices(self._given, k=SPARES)

    def _without(self, asked: Any, bad: tuple[int, ...], spares: Any) -> tuple[Any, Any]:
        """The indices less those that kill, or with others in their place; and the positions they stand at."""
        if not self._auto_collation:
            return (spares[(len(bad) - 1) % len(spares)] if spares else asked), None
        asked = list(asked)
        if self._policy.bad_sample == "replace":
            for position in set(bad):
                spare = spares[(bad.count(position) - 1) % len(spares)]
                asked[position] = spare
            return asked, None
        positions = [i for i in range(len(asked)) if i not in bad]
        return [asked[i] for i in positions], positions

    def _open(self, task: int, asked: Any, result: object) -> tuple[Any] | None:
        """The batch in a 1-tuple; None where nothing was left of it. Raises what the user must see."""
        batch_number = task - self._first_task
        if isinstance(result, Lost):
            self._raise_lost(result, asked, batch_number)
        assert isinstance(result, Parcel)
        content = self._host.take_out(result)
        if result.failed:
            self._raise_failure(content, asked, batch_number, result.worker)
        notes, batch = content
        if notes is not None:
            self._take_notes(notes, batch_number, result.worker)
            if batch is None and not self._iterable:
                return None
        self._delivered += 1
        if self._pin_memory:
            batch = pin_memory(batch, self._pin_memory_device)
        self._num_yielded += 1
        if self._iterable and self._IterableDataset_len_called is not None:
            self._warn_of_length()
        return (batch,)

    def _warn_of_length(self) -> None:
        if self._num_yielded <= self._IterableDataset_len_called:
            return
        import warnings

        warnings.warn(
            f"Length of IterableDataset {self._dataset} was reported to be {self._IterableDataset_len_called}"
            f"(when accessing len(dataloader)), but {self._num_yielded} samples have been fetched. "
            "For multiprocessing data-loading, this could be caused by not properly configuring the "
            "IterableDataset replica at each worker. Please see "
            "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples.",
            stacklevel=4,
        )

    # What the user is told -----------------------------------------------------------------------------------------

    def _index_at(self, asked: Any, position: int) -> object:
        if self._iterable or position < 0:
            return None
        if not self._auto_collation:
            return asked
        return asked[position] if position < len(asked) else None

    def _case(self, note: Note | Silence) -> Case:
        """All that is known of one incident."""
        if isinstance(note, Silence):
            on, evidence = note.evidence
            what, cause, code, did = note.what, None, note.code, ""
            strike = needed = 0
        else:
            event = note.event
            on, evidence = event.on, event.evidence
            what, cause, code, did = "exited", event.cause, event.code, note.did
            strike, needed = note.strike, note.needed
        task = on.task if on is not None and on.stage >= Stage.FETCH else None
        asked = self._asked.get(task) if task is not None else None
        if asked is None:
            task = None
        return Case(
            what=what,
            worker=note.event.worker if isinstance(note, Note) else note.worker,
            life=note.event.life if isinstance(note, Note) else note.life,
            pid=evidence.pid,
            task=None if task is None else task - self._first_task,
            index=None if task is None else self._index_at(asked, on.position),
            stage=on.stage if on is not None else None,
            seconds=on.seconds if on is not None else 0.0,
            attempt=max(1, strike),
            strike=strike,
            needed=needed,
            cause=cause,
            code=code,
            evidence=evidence,
            did=did,
            sample_timeout=self._policy.sample_timeout,
            worker_memory=self._policy.worker_bytes,
            start_method=self._method,
        )

    def _tell_incidents(self) -> None:
        notes = self._supervisor.notes
        while notes:
            note = notes.popleft()
            if isinstance(note, Note):
                self._record.counts["restarts"] += 1
            self._tell(self._case(note))

    def _tell(self, case: Case) -> Incident:
        incident = incident_of(case)
        self._record.add(incident)
        log.warning("%s", incident.line)
        return incident

    def _take_notes(self, notes: Any, batch: int, worker: int) -> None:
        if self._iterable:
            troubles, so_far, snapshot = notes
            kept = self._streams.get(worker, (0, None))[1] if snapshot is None else snapshot
            self._streams[worker] = (so_far, kept)
        for trouble in notes_of(self._iterable, notes):
            self._take_trouble(trouble, batch, worker)

    def _take_trouble(self, trouble: Trouble, batch: int, worker: int) -> None:
        did = {"retried": "tried again", "skipped": "left the sample out", "replaced": "replaced the sample"}
        if trouble.fate != "retried":
            error = f"{trouble.raised.type_name}: {trouble.raised.text}"
            self._record.add_bad(BadSample(trouble.index, batch, error, trouble.attempts, trouble.replaced_by))
        self._tell(
            Case(
                what="retried" if trouble.fate == "retried" else "raised",
                worker=worker,
                pid=self._host.pid_of(worker) or 0,
                task=batch,
                index=trouble.index,
                stage=Stage.FETCH,
                attempt=trouble.attempts,
                raised=trouble.raised,
                did=did[trouble.fate],
            )
        )

    def _raise_failure(self, failure: Failure, asked: Any, batch: int, worker: int) -> None:
        """User code raised, and the policy is to say so."""
        if self._iterable:
            self._streams[worker] = (failure.print, self._streams.get(worker, (0, None))[1])
        case = Case(
            what="raised",
            worker=worker,
            pid=self._host.pid_of(worker) or 0,
            task=batch,
            index=failure.index,
            stage=failure.stage,
            attempt=failure.attempts,
            raised=failure.raised,
            did="raised it from next(); the next call goes on with the next batch",
        )
        incident = incident_of(case)
        self._record.add(incident)
        if failure.position >= 0:
            text = f"{failure.raised.type_name}: {failure.raised.text}"
            self._record.add_bad(BadSample(failure.index, batch, text, failure.attempts))
        told = f"in worker {worker} (pid {case.pid}) {where(case)}"
        raise to_raise(failure.raised, told, failure.index, worker)

    def _raise_lost(self, lost: Lost, asked: Any, batch: int) -> None:
        """A sample or batch ended too many lives."""
        event = lost.event
        self._asked[lost.task] = asked
        try:
            case = self._case(Note(event, "nothing more: next() raises for this batch", lost.attempts, 0))
        finally:
            del self._asked[lost.task]
        incident = incident_of(case)
        if lost.position >= 0:
            self._record.add_bad(BadSample(case.index, batch, incident.headline, lost.attempts))
        raise WorkerLost(str(incident), case.index, case.worker, incident.stage, incident.stack or None)

    def _raise_stop(self) -> None:
        """Going on would not help."""
        stop = self._supervisor.stop
        assert stop is not None
        self._finalizer()
        event = stop.event
        if isinstance(event, BootFailed):
            content = self._host.take_out(event.result)
            assert isinstance(content, Raised)
            case = Case(what="boot", worker=event.worker, stage=Stage.INIT, raised=content)
            self._tell(case)
            raise to_raise(content, f"in worker {event.worker} while it started", None, event.worker)
        if isinstance(event, Exited):
            case = self._case(Note(event, "gave up", 0, 0))
            incident = incident_of(case)
            why = f"workers died more than {self._policy.restarts} times in a row without any progress; the last:"
            if event.on is None or event.on.stage < Stage.IDLE:
                why = "workers die before they are ready; the last:"
            raise WorkerLost(f"{why}\n{incident}", case.index, case.worker, incident.stage, incident.stack or None)
        raise TooManyBad(self._breaker_text(stop.bad, stop.seen), stop.bad, stop.seen)

    def _breaker_text(self, bad: int, seen: int) -> str:
        from collections import Counter

        shared = Counter(b.error for b in self._record.bad_samples).most_common(3)
        lines = [f"{bad} of {seen} samples are bad, more than max_bad={self._policy.max_bad:g} allows"]
        lines += [f"    seen   {count} x {error}" for error, count in shared]
        lines += ["    try    look at what they share; Policy(max_bad=...) sets the share that is borne"]
        return "\n".join(lines)

    # The end -------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        if not self._persistent_workers:
            self._shutdown_workers()

    def _fold_counts(self) -> None:
        self._record.counts["batches"] += self._delivered
        self._delivered = 0

    @property
    def _workers(self) -> list[WorkerHandle]:
        """Process-like handles, as third parties expect them."""
        return self._host.workers

    @property
    def _workers_status(self) -> list[bool]:
        return [worker.is_alive() for worker in self._host.workers]

    def _shutdown_workers(self) -> None:
        """End all processes of this iterator."""
        self._finalizer()

    def live_counts(self) -> dict[str, float]:
        """What the pulses and this epoch add to the loader's totals."""
        words = [pulse.words for pulse in self._host.pulses]
        return {
            "batches": self._delivered,
            "samples": sum(w[SAMPLES] for w in words),
            "retries": sum(w[RETRIES] for w in words),
            "waited_s": self._waited_s,
        }
