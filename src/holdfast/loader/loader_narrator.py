"""What Holdfast tells the user of a loader: its words, its bad samples, its exceptions, its totals."""

import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from holdfast.core.host import Silence
from holdfast.core.messages import Did, Exited, Lost, Note, Place, Stage, Stop, What
from holdfast.diagnose.finding import TRAINER, Again, Case, Finding
from holdfast.diagnose.incident import BadSample, Incident, incident_of, told, where
from holdfast.diagnose.narrator import Narrator, Record, brief, one_line, whole
from holdfast.diagnose.stats import LoaderStats
from holdfast.errors import BatchTimeout, FileShared, RemoteTraceback, TooManyBad, WorkerLost
from holdfast.loader.cached import CachedDataset
from holdfast.loader.cuda_slots import Refusal
from holdfast.loader.fetch import GIVEN, BatchFailure, Trouble
from holdfast.loader.files import FileCache, shared_positions
from holdfast.loader.measure import attributes
from holdfast.policy import Policy
from holdfast.remote_exception import Raised, shown, to_raise, users_line, without_ours
from holdfast.system.cgroups import usable_cpus
from holdfast.system.evidence import Evidence, view_of
from holdfast.system.signal_origin import warn

_DID = {"retried": "tried again", "skipped": "left the sample out", "replaced": "replaced the sample"}
# What the ledger did about a death.
_DID_ABOUT_DEATH = {
    Did.NOTHING: "nothing: its stream had ended",
    Did.STARTED: "started a new worker; no batch was lost",
    Did.SENT_AGAIN: "started a new worker, which loads the batch again",
    Did.RENEWED: "started a new keeper and new workers; charged to no sample",
    Did.REFRESHED: "started a fresh worker in its place",
    Did.WENT_ON: "went on with {at_work} workers",
    Did.REPLACED: "replaced the sample",
    Did.REPLACED_AGAIN: "tried another in its place",
    Did.LEFT_OUT: "left the sample out",
    Did.LEFT_OUT_LAST: "left the sample out; its batch is empty",
    Did.GAVE_UP_TASK: "gave the batch up: next() raises for it",
    Did.GAVE_UP_STREAM: "gave this worker's stream up",
    Did.STOPPED: "gave up: no progress",
    Did.STOPPED_REFUSED: "gave up",
}
# Open files that are named.
_FILES = 4
# What a worker is doing, other than loading one sample; with the batch.
_DOING = {
    Stage.BOOT: "starting",
    Stage.INIT: "in worker_init_fn",
    Stage.FETCH_MANY: "in __getitems__ ({})",
    Stage.COLLATE: "collating ({})",
    Stage.SEND: "sending ({})",
    Stage.REPLAY: "bringing its stream back to its place ({})",
}
# A sample that ended too many lives is bad from then on.
_NOW_BAD = (Did.REPLACED, Did.LEFT_OUT, Did.LEFT_OUT_LAST)


class LoaderNarrator(Narrator):
    """The narrator of one iterator. `sample_of(task, position, spare=0)`: the index there, and how to load it again."""

    def __init__(
        self,
        record: Record,
        policy: Policy,
        growth_bytes: int | None,
        start_method: str,
        sample_of: Callable[..., tuple[object, Again | None]],
        pid_of: Callable[[int], int | None],
        parts: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """`parts`: what is large in the dataset, in words."""
        super().__init__(record, policy, growth_bytes, start_method)
        self._sample_of = sample_of
        self._pid_of = pid_of
        self._parts = parts
        self._told_refusal = False
        self._given_up: dict[tuple[int, int], int] = {}  # (task, position) -> which of the record's bad samples
        self.first_task = 0  # of this epoch: batches are numbered from it

    def name(self, task: int, position: int) -> dict[str, Any]:
        if task < self.first_task:
            return {}
        index, again = self._sample_of(task, position)
        return {"task": task - self.first_task, "index": index, "again": again}

    # Deaths --------------------------------------------------------------------------------------------------------

    def did(self, note: Note) -> str:
        return _DID_ABOUT_DEATH[note.did].format(at_work=note.at_work)

    def incident(self, note: Note | Silence) -> None:
        if isinstance(note, Silence) and note.what is What.COPIED and isinstance(note.evidence, Evidence):
            note = note._replace(evidence=replace(note.evidence, facts=self._parts()))
        super().incident(note)
        if isinstance(note, Note) and note.did in _NOW_BAD and not note.spare:
            case, on = self.death(note), note.event.on
            if on is not None:
                self._given_up[on.task, on.position] = len(self.record.bad_samples)
            self.record.add_bad(BadSample(case.index, case.task or 0, incident_of(case).headline, note.strike))

    def death(self, note: Note) -> Case:
        case, on = super().death(note), note.event.on
        if not note.spare or on is None or case.task is None:
            return case
        index, again = self._sample_of(on.task, on.position, note.spare)
        return replace(case, index=index, again=again)

    def lost(self, lost: Lost) -> WorkerLost:
        """A sample or a batch ended too many lives. Gives the error to raise for it."""
        case = self.death(Note(lost.event, Did.GAVE_UP_TASK, lost.attempts, 0, suspicion=lost.suspicion))
        case = replace(case, did="nothing more: next() raises for this batch")
        incident = incident_of(case)
        if lost.position >= 0 and (lost.task, lost.position) not in self._given_up:  # (that was told of then)
            batch = lost.task - self.first_task
            self.record.add_bad(BadSample(case.index, batch, incident.headline, lost.attempts))
        return self._lost(whole(incident), incident)

    @staticmethod
    def _lost(text: str, incident: Incident) -> WorkerLost:
        error = WorkerLost(text, incident.index, incident.worker, incident.stage, incident.stack or None)
        error.__cause__ = _shown_first(incident.stack)
        return error

    # Waiting -------------------------------------------------------------------------------------------------------

    def late(self, limit_s: float, batch: int, at_work: tuple[int, Place] | None) -> BatchTimeout:
        """`timeout` has run out. `at_work`: the worker that next() waits for, and what it is on. Gives the error."""
        text = f"DataLoader timed out after {limit_s} seconds: batch {batch} has not come"
        if at_work is None:
            return BatchTimeout(f"{text}\n    seen   no worker is on a sample now\n    try    a longer timeout=")
        did = "raised this; the next call of next() waits on for the same batch"
        incident = self._unfinished(f"next() waited for it until timeout={limit_s:g} s ran out", did, *at_work)
        self.record.add(incident)
        error = BatchTimeout(f"{text}\n{whole(incident)}", incident.index, incident.worker)
        error.__cause__ = _shown_first(incident.stack)
        return error

    def interrupted(self, by: str, waited_s: float, worker: int, on: Place) -> str:
        """next() was waiting for this worker when an exception from outside ended that. Gives a note for it."""
        says = f"next() was interrupted after {waited_s:.1f} s ({by}), and waited for it"
        incident = self._unfinished(says, "left the worker alone", worker, on)
        self.record.add(incident)
        warn(incident.line)
        line = users_line(incident.stack)
        headline = f"{incident.headline}\n{line}" if line else incident.headline
        return str(replace(incident, headline=headline, stack=""))

    def _unfinished(self, says: str, did: str, worker: int, on: Place) -> Incident:
        """What the worker does is not judged: it may be a hang, or a slow sample."""
        pid = self._pid_of(worker) or 0
        view = view_of(pid)
        evidence = Evidence(pid=pid, view=view)
        case = self.at(on, evidence, worker=worker, what=What.SILENT, code=int(on.seconds), did=did)
        seen = [f"its pulse has not changed for {on.seconds:.1f} s"]
        if view.call:
            seen.append("it computes" if view.call == "running" else f"it is in the system call {view.call}")
            seen[-1] += f" on {view.on}" if view.on else ""
        stack = self._stack_since(time.time() - on.seconds, pid)
        advice = "Policy(sample_timeout=seconds): such a worker is killed, its stack shown, and its sample tried again"
        finding = Finding("sample-unfinished", says, tuple(seen), advice)
        headline = f"worker {worker} (pid {pid}) has been {_doing(case)} for {on.seconds:.1f} s"
        return told(case, finding, headline, stack)

    def _stack_since(self, began: float, pid: int) -> str:
        """The last one that the keeper took of this process since then; "" if it took none."""
        taken = (one.stack for one in reversed(self.record.incidents) if one.pid == pid and one.at >= began)
        return next((stack for stack in taken if stack), "")

    # What was seen at the device, and of streams -------------------------------------------------------------------

    def not_registered(self, refusal: Refusal) -> None:
        """The device cannot read slots in place. The user hears it once."""
        if self._told_refusal:
            return
        self._told_refusal = True
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        limits = f"RLIMIT_MEMLOCK {_limit(soft)}, at most {_limit(hard)}"
        facts = (f"cuMemHostRegister of {refusal.bytes / 1e6:.1f} MB gave {refusal.why}", limits)
        raised = Raised("CudaError", refusal.why, "", None, None, facts=facts)
        did = "copied batches into memory that torch pins; nothing is lost but speed"
        self.tell(replace(self.blank, what=What.UNPINNED, worker=TRAINER, raised=raised, did=did))

    def no_snapshots(self, raised: Raised, worker: int) -> None:
        """The state of a stream cannot be saved. The user hears it once."""
        if not self.record.counts["incident:stream-without-state"]:
            did = "took no snapshots: if a worker dies, the next one replays its stream"
            self.tell(replace(self.blank, what=What.STATELESS, worker=worker, raised=raised, did=did, at=time.time()))

    def look_at_files(self, dataset: Any) -> None:
        """Before workers are forked: what they would read at one position. The user hears it once."""
        policy = self.policy.shared_files
        if policy == "ignore" or (policy == "warn" and self.record.counts["incident:handle-shared-by-fork"]):
            return
        found = shared_positions(dataset)
        if not found:
            return
        facts = [f"{where} is open: {path}" for where, path in found[:_FILES]]
        facts += [f"and {len(found) - _FILES} more"] if len(found) > _FILES else []
        evidence = Evidence(pid=os.getpid(), facts=tuple(facts))
        did = "went on" if policy == "warn" else 'raised it from iter(loader), by Policy(shared_files="error")'
        case = replace(self.blank, what=What.SHARED, worker=TRAINER, evidence=evidence, did=did, at=time.time())
        incident = self.tell(replace(case, pid=evidence.pid))
        if policy == "error":
            raise FileShared(str(incident))

    # Exceptions ----------------------------------------------------------------------------------------------------

    def _raised(self, raised: Raised, worker: int, batch: int, index: object, position: int, **facts: Any) -> Case:
        pid = self._pid_of(worker) or 0
        _, again = self._sample_of(batch + self.first_task, position)
        facts |= {"worker": worker, "pid": pid, "task": batch, "index": index, "raised": raised, "again": again}
        facts |= {"at": time.time()}
        return replace(self.blank, **facts)

    def troubles(self, troubles: Iterable[Trouble], batch: int, worker: int) -> None:
        """What went wrong on the way to a batch."""
        for trouble in troubles:
            self.trouble(trouble, batch, worker)

    def trouble(self, trouble: Trouble, batch: int, worker: int) -> None:
        """A sample raised, and the policy dealt with it; or there is one in the place of another that has killed."""
        if trouble.fate == GIVEN:
            self._given(trouble, batch)
            return
        self.record.counts["retries"] += trouble.attempts - 1
        if trouble.fate != "retried":
            error = f"{trouble.raised.type_name}: {trouble.raised.text}"
            if trouble.stage is Stage.COLLATE:  # how it differs, in words that others may share
                error = trouble.raised.facts[0].removeprefix(f"index {shown(trouble.index)}").lstrip(": ")
            self.record.add_bad(BadSample(trouble.index, batch, error, trouble.attempts, trouble.replaced_by))
        self.tell(
            self._raised(
                trouble.raised,
                worker,
                batch,
                trouble.index,
                trouble.position,
                what=What.RETRIED if trouble.fate == "retried" else What.RAISED,
                stage=trouble.stage,
                attempt=trouble.attempts,
                did=_DID[trouble.fate],
            )
        )

    def _given(self, trouble: Trouble, batch: int) -> None:
        """What its workers' deaths did not tell: what stands in its place."""
        bad = self.record.bad_samples
        number = self._given_up.pop((batch + self.first_task, trouble.position), len(bad))
        if number < len(bad):
            bad[number] = replace(bad[number], replaced_by=trouble.replaced_by)

    def failure(self, failure: BatchFailure, batch: int, worker: int) -> BaseException:
        """User code raised, and the policy passes that on. Gives the exception to raise."""
        case = self.failed(failure, batch, worker)
        at = f"in worker {worker} (pid {case.pid}) {where(case)}"
        return to_raise(failure.raised, at, failure.index, worker, self._brief(incident_of(case), failure.raised))

    @staticmethod
    def _brief(incident: Incident, raised: Raised) -> str:
        """Errors of ours say by themselves what to try."""
        return brief(replace(incident, did=""), why="\n    try " not in raised.text)

    def failed(self, failure: BatchFailure, batch: int, worker: int) -> Case:
        """The same, into the report only."""
        self.troubles(failure.troubles, batch, worker)
        case = self._raised(
            failure.raised,
            worker,
            batch,
            failure.index,
            failure.position,
            what=What.RAISED,
            stage=failure.stage,
            attempt=failure.attempts,
            did="raised it from next(); the next call goes on with the next batch",
        )
        self.record.add(incident_of(case))
        self.record.counts["retries"] += failure.attempts - 1
        if failure.position >= 0:
            text = f"{failure.raised.type_name}: {failure.raised.text}"
            self.record.add_bad(BadSample(failure.index, batch, text, failure.attempts))
        return case

    # The end of it -------------------------------------------------------------------------------------------------

    def boot_failure(self, raised: Raised, worker: int) -> BaseException:
        """A worker could not start. Gives the exception to raise."""
        incident = self.could_not_start(raised, worker)
        return to_raise(raised, f"in worker {worker} while it started", None, worker, self._brief(incident, raised))

    def stop(self, stop: Stop) -> BaseException:
        """Going on would not help. Gives the exception to raise."""
        event = stop.event
        if isinstance(event, Exited):
            note = Note(event, Did.STOPPED, 0, 0, 0 if event.on is None else event.on.spare)
            case = replace(self.death(note), did="gave up")
            incident = incident_of(case)
            return self._lost(f"{self.gave_up(event)}\n{whole(incident)}", incident)
        return self.too_many(stop.bad, stop.seen)

    def too_many(self, bad: int, seen: int) -> TooManyBad:
        """Too many samples are bad. Gives the exception to raise, with the most frequent errors."""
        shared = Counter(b.error for b in self.record.bad_samples).most_common(3)
        lines = [f"{bad} of {seen} samples are bad, more than max_bad={self.policy.max_bad:g} allows"]
        lines += [f"    seen   {count} x {error}" for error, count in shared]
        others = len({b.error for b in self.record.bad_samples}) - len(shared)
        lines += [f"    seen   and {others} other errors"] if others > 0 else []
        last = next((one for one in reversed(self.record.incidents) if one.index is not None and one.stack), None)
        if last is not None:
            who = "the trainer" if self.blank.start_method == "none" else f"worker {last.worker}"
            lines += [f"    last   index {shown(last.index)} (batch {last.batch}) in {who}: {one_line(last.says)}"]
            lines += [f"       {line}" for line in users_line(last.stack).splitlines()]
        lines += ["    try    look at what they share; Policy(max_bad=...) sets the share that is borne"]
        return TooManyBad("\n".join(lines), bad, seen)


def _shown_first(stack: str) -> RemoteTraceback | None:
    """Python prints the cause of an error before the error itself, so that the answer stands last."""
    return RemoteTraceback(without_ours(stack)) if stack else None


def _doing(case: Case) -> str:
    """In words; the trainer does not know which attempt it is."""
    about = f"batch {case.task}"
    if case.stage is Stage.FETCH:
        return f"on {'an item' if case.index is None else f'index {shown(case.index)}'} ({about})"
    return _DOING[case.stage or Stage.BOOT].format(about)


def _limit(size: int) -> str:
    return "unlimited" if size == resource.RLIM_INFINITY else f"{size >> 10} KiB"


# Totals: what a loader has done so far, over all its epochs. `loader.stats()` and `holdfast top` show them.


def totals(record: Record, workers: int, dataset: Any) -> LoaderStats:
    """It does not need the loader itself, which may be gone: `for batch in DataLoader(...)`."""
    counts, device_ran_s = record.counts, record.device_ran_s
    found = LoaderStats(
        batches=counts["batches"],
        samples=counts["samples"],
        retries=counts["retries"],
        restarts=counts["restarts"],
        bad_samples=counts["bad_samples"],
        waited_s=round(record.waited_so_far_s, 3),
        ran_s=round(record.ran_s, 3),
        workers=workers,
        cpus=usable_cpus(),
        per_worker=record.workers.stats(),
        caches=_caches(dataset),
    )
    if not device_ran_s:
        return found
    return replace(
        found,
        device_waited_s=round(record.device_waited_s, 3),
        device_ran_s=round(device_ran_s, 3),
        device_waited_share=round(record.device_waited_s / device_ran_s, 4),
    )


def _caches(dataset: Any) -> dict[str, dict[str, float]]:
    """The figures of our caches: of a dataset that is one, and of those that it holds. A user's own method of that name
    is not called, and types are asked past `__class__`, which may be user code."""
    found = {type(dataset).__name__: dataset}
    found |= {f"{type(part).__name__} {name}": part for name, part in attributes(dataset).items()}
    return {name: part.figures() for name, part in found.items() if issubclass(type(part), CachedDataset | FileCache)}
