"""Narrator: makes incidents of what happened to workers, for the report and for the log. Each face has its own kind.

Nothing here decides or waits. One `Case` is behind the log line, the report and the text of an exception. `Record`
keeps what happened.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.core.host import Figures, Silence
from holdfast.core.messages import Cause, Exited, Note, Place, Stage, What
from holdfast.diagnose.finding import Case
from holdfast.diagnose.incident import TEXT, BadSample, Incident, as_dict, at_most, incident_of
from holdfast.diagnose.run_folder import RunFolder
from holdfast.diagnose.stats import WorkerStats
from holdfast.policy import Policy
from holdfast.remote_exception import Raised, shown, users_line
from holdfast.system.evidence import Evidence
from holdfast.system.signal_origin import warn

# Incidents and bad samples that are kept whole; beyond, they are only counted.
KEPT = 1000


class Workers:
    """What each worker has done and used, over all epochs. `ran_s`: for how long there were workers."""

    def __init__(self) -> None:
        self._past: dict[int, Counter[str]] = {}
        self._pulses: Sequence[Figures] = ()
        self._since = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the loader, or one that is pickled, has what was done so far, and no workers."""
        past = {worker: Counter(figures) for worker, figures in enumerate(self._now())}
        return {"_past": self._past | past, "_pulses": (), "_since": 0.0}

    def begin(self, pulses: Sequence[Figures]) -> None:
        """An iterator's workers, from now on."""
        self.end()
        self._pulses, self._since = pulses, time.monotonic()

    def end(self) -> None:
        """They are gone; what they did counts."""
        for worker, figures in enumerate(self._now()):
            self._past[worker] = Counter(figures)
        self._pulses = ()

    def _now(self) -> list[dict[str, float]]:
        ran_s = time.monotonic() - self._since if self._pulses else 0.0
        return [self._with_past(worker, pulse.figures(), ran_s) for worker, pulse in enumerate(self._pulses)]

    def _with_past(self, worker: int, figures: dict[str, float], ran_s: float) -> dict[str, float]:
        past: Counter[str] = self._past.get(worker, Counter())
        figures = dict(figures, waiting_s=max(0.0, ran_s - figures["busy_s"]))
        for name in ("batches", "samples", "bytes_sent", "busy_s", "waiting_s"):
            figures[name] = round(figures[name] + past[name], 3)
        figures["peak_bytes"] = max(figures["peak_bytes"], past["peak_bytes"])
        return figures

    def stats(self) -> tuple[WorkerStats, ...]:
        """One row for each worker that ever worked."""
        rows = self._now() or [dict(self._past[worker]) for worker in sorted(self._past)]
        return tuple(WorkerStats(worker=worker, **row) for worker, row in enumerate(rows) if row["batches"])


@dataclass
class Record:
    """All that a loader has to report, over all its epochs."""

    incidents: list[Incident] = field(default_factory=list)
    bad_samples: list[BadSample] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    last_at: dict[str, float] = field(default_factory=dict)
    """When each finding was last named, also of incidents that are only counted."""
    repeats: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """How often the same (finding, index, did) was added; of no more than `KEPT`."""
    waited_s: float = 0.0
    waiting_since: float | None = None
    """When next() began to wait, by time.monotonic(); None while it does not."""
    ran_s: float = 0.0
    need: int = 0
    """Bytes that a worker needed at its peak, and workers that were best: the next epoch begins with them."""
    wish: int = 0
    workers: Workers = field(default_factory=Workers)
    device_waited_s: float = 0.0
    device_ran_s: float = 0.0
    kept_in: RunFolder | None = None
    """Where incidents are written at once, so that they outlive the trainer."""

    @property
    def waited_so_far_s(self) -> float:
        """With the waiting that is under way."""
        since = self.waiting_since
        return self.waited_s + (0.0 if since is None else time.monotonic() - since)

    def add(self, incident: Incident) -> int:
        """Gives how often the same has happened to the same sample, and had the same end."""
        if self.kept_in is not None:
            self.kept_in.write(as_dict(incident))
        self.counts[f"incident:{incident.finding}"] += 1
        self.last_at[incident.finding] = incident.at
        if len(self.incidents) < KEPT:
            self.incidents.append(incident)
        if incident.index is None or len(self.repeats) >= KEPT:
            return 1
        same = (incident.finding, shown(incident.index), incident.did)
        self.repeats[same] += 1
        return self.repeats[same]

    def add_bad(self, bad: BadSample) -> None:
        self.counts["bad_samples"] += 1
        if len(self.bad_samples) < KEPT:
            self.bad_samples.append(replace(bad, error=at_most(bad.error, TEXT)))


# Letters of a line, in what an exception says at its end.
_LINE = 300


def brief(incident: Incident, why: bool = True) -> str:
    """For the end of an exception: the finding, what was seen and what to try, each in one line; the stack stands
    elsewhere. Without `why`, where the exception itself says that."""
    lines = [f"  {incident.finding}: {one_line(incident.says)}"] if why else []
    seen = "; ".join(one_line(fact) for fact in incident.seen if not fact.endswith(", below")) if why else ""
    lines += [f"    seen   {seen}"] if seen else []
    lines += [f"    did    {incident.did}"] if why and incident.did else []
    lines += [f"    try    {incident.advice}"] if why else []
    return "\n".join([*lines, f"    more   holdfast explain {incident.finding}"])


def one_line(text: str) -> str:
    return at_most(text.partition("\n")[0], _LINE)


def whole(incident: Incident) -> str:
    """What an exception says that is about this incident alone."""
    return "\n".join(text for text in (incident.headline, users_line(incident.stack), brief(incident)) if text)


class Narrator:
    """The narrator of one face. `blank`: what all its cases share. `call`: "" for a pool, see Case."""

    def __init__(
        self, record: Record, policy: Policy, growth_bytes: int | None, start_method: str, call: str | None = None
    ) -> None:
        self.record = record
        self.policy = policy
        self.blank = Case(
            what=What.EXITED,
            worker=0,
            sample_timeout=policy.sample_timeout,
            worker_memory=growth_bytes,
            start_method=start_method,
            call=call,
        )

    def name(self, task: int, position: int) -> dict[str, Any]:
        """The fields of a Case that name this place as the user knows it."""
        raise NotImplementedError

    def did(self, note: Note) -> str:
        """What the ledger did, in the words of this face."""
        raise NotImplementedError

    def tell(self, case: Case) -> Incident:
        """Put this case into the report and the log. The log has the 1st, 2nd, 4th, 8th, ... of the same."""
        incident = incident_of(case)
        times = self.record.add(incident)
        if times & (times - 1) == 0:
            warn(incident.line if times == 1 else f"{incident.line} ({times} times so far)")
        return incident

    def all_of(self, notes: deque[Note | Silence]) -> None:
        """What has happened to workers since the last time."""
        while notes:
            self.incident(notes.popleft())

    def incident(self, note: Note | Silence) -> None:
        """Something happened to a worker, and the ledger has dealt with it."""
        if isinstance(note, Note):
            self.record.counts["restarts"] += 1
            case = self.death(note)
            if note.event.cause is Cause.RECYCLED and self._told_before(case):
                return
            self.tell(case)
        else:
            facts = {"worker": note.worker, "life": note.life, "what": note.what, "code": note.code}
            self.tell(self.at(note.on, note.evidence, **facts))

    def could_not_start(self, raised: Raised, worker: int) -> Incident:
        """A worker raised before it was ready."""
        case = replace(self.blank, what=What.BOOT, worker=worker, stage=Stage.INIT, raised=raised, at=time.time())
        return self.tell(case)

    def gave_up(self, event: Exited) -> str:
        """Why there is no other life. The text of the last death follows."""
        if event.cause is Cause.KEEPER:
            return (
                "the keeper, the process between this one and the workers, ends again and again; it may have printed "
                'why. With spawn or forkserver: is all of the script under `if __name__ == "__main__":`? The last:'
            )
        if event.on is not None and event.on.stage < Stage.IDLE:
            return "workers die before they are ready; the last:"
        return f"a worker died more than {self.policy.restarts} times in a row without any progress; the last:"

    def _told_before(self, case: Case) -> bool:
        """A leak comes again and again. It is told once, and counted."""
        finding = incident_of(case).finding
        name = f"incident:{finding}"
        self.record.counts["recycled"] += 1
        self.record.last_at[finding] = case.at
        self.record.counts[name] += bool(self.record.counts[name])
        return self.record.counts[name] > 0

    def death(self, note: Note) -> Case:
        """A life that ended, as a case."""
        event = note.event
        return self.at(
            event.on,
            event.evidence,
            worker=event.worker,
            life=event.life,
            cause=event.cause,
            code=event.code,
            strike=note.strike,
            needed=note.needed,
            suspicion=note.suspicion,
            attempt=max(1, note.strike),
            did=self.did(note),
            done=note.did,
        )

    def at(self, on: Place | None, evidence: object, **facts: Any) -> Case:
        """A case at that place."""
        assert isinstance(evidence, Evidence)
        facts |= {"pid": evidence.pid, "evidence": evidence, "at": time.time()}
        if on is not None:
            facts |= {"stage": on.stage, "seconds": on.seconds}
            if on.stage >= Stage.FETCH:
                facts |= self.name(on.task, on.position)
        return replace(self.blank, **facts)
