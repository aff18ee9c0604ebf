"""Incidents -> text, JSON. One record, `Incident`, is behind the log line, the exception text and the report."""

import json
import re
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from holdfast.core.host import Figures
from holdfast.core.messages import Cause, Stage, What
from holdfast.diagnose.finding import KEEPER, TRAINER, Again, Case, Finding, find
from holdfast.diagnose.possessions import what_it_had
from holdfast.diagnose.rules import ALL, speed
from holdfast.diagnose.rules.hang import tells
from holdfast.diagnose.run_folder import RunFolder, for_json
from holdfast.diagnose.stats import LoaderStats, Stats, WorkerStats, done_by, summary, to_dict
from holdfast.errors import legible
from holdfast.remote_exception import shown
from holdfast.system.evidence import Evidence
from holdfast.system.linux import signal_name

SCHEMA = 1
# Incidents and bad samples that are kept whole; beyond, they are only counted.
KEPT = 1000
# Letters of a text, and of a stack, in each: an exception may say megabytes, and all that is kept, logged and written.
_TEXT, _STACK = 4000, 40_000
_EXAMPLES = 5
_OUR_FRAMES = ("/holdfast/loader/job.py", "/holdfast/pool/job.py", "/holdfast/local/worker/loop.py")
_LABELLED = re.compile(r"\s*(seen|did|try|more) ")
_NAMES = re.compile(r"^(  )([a-z]+(?:-[a-z]+)+)\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Incident:
    """One thing that went wrong: what, to whom, why, what was done, what to do."""

    headline: str
    finding: str
    says: str
    seen: tuple[str, ...]
    did: str
    advice: str
    confidence: str
    worker: int
    life: int
    pid: int
    batch: int | None
    index: object
    stage: str
    attempt: int
    signal: str | None
    exit_code: int | None
    stack: str
    again: Again | None = None
    at: float = 0.0
    """Seconds since 1970; 0 when not known."""
    call: str | None = None
    """Of a pool: the function that was called; `batch` is then the number of the task."""
    evidence: Evidence | None = None
    """All that was seen, but for the stack; None of an exception."""

    def __str__(self) -> str:
        lines = [self.headline, f"  {self.finding}: {self.says}"]
        lines += [f"    seen   {'; '.join(self.seen)}"] if self.seen else []
        lines += [f"    did    {self.did}"] if self.did else []
        lines += [f"    try    {self.advice}", f"    more   holdfast explain {self.finding}"]
        if self.stack:
            lines += ["    stack", *(f"      {line}" for line in self.stack.splitlines())]
        return legible("\n".join(lines))

    @property
    def line(self) -> str:
        """For the log: everything but the stack, in one line."""
        line = f"{self.headline} [{self.finding}] {self.says}; {self.did or 'nothing done'}"
        return legible(line).replace("\n", "\\n")


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that was left out, replaced, or raised."""

    index: object
    batch: int
    error: str
    attempts: int
    replaced_by: object = None


def as_dict(record: Incident | BadSample) -> dict[str, Any]:
    """`asdict`, but for the user's indices: those may be anything, and are not copied."""
    if isinstance(record, BadSample):
        return {each.name: getattr(record, each.name) for each in fields(record)}
    again = record.again
    indices = {
        "index": record.index,
        "again": again and {each.name: getattr(again, each.name) for each in fields(again)},
    }
    return asdict(replace(record, index=None, again=None)) | indices


def incident_of(case: Case) -> Incident:
    """Diagnose one case."""
    finding, evidence = find(case, ALL), case.evidence
    stack = _stack(evidence) if evidence is not None and evidence.stack else _traceback(case)
    return told(case, finding, _headline(case, finding), stack)


def told(case: Case, finding: Finding, headline: str, stack: str) -> Incident:
    """One that is diagnosed already."""
    return Incident(
        headline=_at_most(headline, _TEXT),
        finding=finding.name,
        says=_at_most(finding.says, _TEXT),
        seen=tuple(_at_most(fact, _TEXT) for fact in (*finding.seen, *what_it_had(finding.name, case))),
        did=case.did,
        advice=finding.advice,
        confidence=finding.confidence,
        worker=case.worker,
        life=case.life,
        pid=case.pid,
        batch=case.task,
        index=case.index,
        stage=(case.stage or Stage.IDLE).name.lower(),
        attempt=case.attempt,
        signal=signal_name(case.code) if case.cause is Cause.SIGNAL or case.what is What.SIGNALLED else None,
        exit_code=case.code if case.cause is Cause.EXIT else None,
        stack=_end_of(stack, _STACK),
        again=case.again,
        at=case.at,
        call=case.call,
        evidence=_without_stack(case.evidence),
    )


def _at_most(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[:letters]}... ({len(text) - letters} more letters)"


def _end_of(text: str, letters: int) -> str:
    """A stack says most in its last lines."""
    return text if len(text) <= letters else f"({len(text) - letters} letters before) ...{text[-letters:]}"


def _without_stack(evidence: Evidence | None) -> Evidence | None:
    """As an incident keeps it: the user's part of the stack is a field of its own."""
    return None if evidence is None else replace(evidence, stack="")


def _stack(evidence: Evidence) -> str:
    """The Python lines, and the native ones behind them where somebody could see those."""
    view = evidence.view
    native = view.native if view is not None and tells(view) else ()
    lines = ["", "Native frames inside its innermost Python line (py-spy), innermost first:"] if native else []
    return "\n".join([_users_frames(evidence.stack), *lines, *(f"  {frame}" for frame in native)])


def _users_frames(stack: str) -> str:
    """A dump without the frames below the dataset's: they are ours, and the same each time."""
    lines: list[str] = []
    for line in stack.splitlines():
        lines.append(line)
        if any(ours in line for ours in _OUR_FRAMES):
            break
    return "\n".join(lines)


def _traceback(case: Case) -> str:
    return case.raised.traceback.rstrip() if case.raised is not None else ""


def _headline(case: Case, finding: Finding) -> str:
    who = {KEEPER: "the keeper", TRAINER: "the trainer"}.get(case.worker, f"worker {case.worker}")
    match case.what:
        case What.ROOM:
            return f"memory is short: {case.code} worker{'s' if case.code != 1 else ''} at work for now"
        case What.COPIED:
            return f"{who} has copied {case.code} MiB of what it shared with the trainer"
        case What.UNPINNED:
            return "the trainer cannot let the device read shared memory in place"
        case What.STATELESS:
            return f"{who} cannot save the state of its stream"
        case What.EXITED:
            end = _end(case)
        case What.SILENT:
            end = f"has been silent for {case.code} s"
        case What.SIGNALLED:
            end = f"was sent {signal_name(case.code)}"
        case What.BOOT:
            end = "could not start"
        case What.RETRIED:
            end = "had to try again"
        case What.RAISED:
            end = f"got {case.raised.type_name if case.raised else 'an error'}"
    return f"{who} {end} {where(case)}".rstrip()


def _end(case: Case) -> str:
    match case.cause:
        case Cause.EXIT:
            return f"exited with code {case.code}"
        case Cause.DEADLINE:
            return f"was killed for hanging {case.seconds:.1f} s"
        case Cause.MEMORY:
            return "was killed for its memory limit"
        case Cause.KEEPER:
            return "went with its keeper"
        case Cause.UNBORN:
            return "could not be started"
        case Cause.RECYCLED:
            return "made room for a fresh one"
        case Cause.PRESSURE:
            return "was ended because memory ran short"
        case Cause.ASKED:
            return "was ended because it was not needed any more"
        case _:
            return f"was killed by {signal_name(case.code)}"


def where(case: Case) -> str:
    """ "while loading index 4711 (batch 88, attempt 2)": the same words everywhere."""
    if case.worker == TRAINER:
        return f"(pid {case.pid})"
    if case.task is None:
        if case.stage in (Stage.BOOT, Stage.INIT):
            return "while starting"
        return "between tasks" if case.of_pool else "between batches"
    if case.of_pool:
        running = "while sending the result of" if case.stage in (Stage.SEND, Stage.ANNOUNCE) else "while running"
        return f"{running} task {case.task} ({case.call}, attempt {case.attempt} of {case.attempts})"
    doing = {
        Stage.FETCH_MANY: "while in __getitems__ of",
        Stage.COLLATE: "while collating",
        Stage.SEND: "while sending",
        Stage.ANNOUNCE: "while sending",
        Stage.REPLAY: "while bringing its stream back to its place for",
    }.get(case.stage or Stage.FETCH)
    strikes = f", strike {case.strike} of {case.needed}" if case.needed else ""
    about = f"batch {case.task}, attempt {case.attempt}{strikes}"
    if doing is not None:
        return f"{doing} batch {case.task} (attempt {case.attempt}{strikes})"
    what = f"index {shown(case.index)}" if case.index is not None else "an item"
    return f"while loading {what} ({about})"


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
    waited_s: float = 0.0
    ran_s: float = 0.0
    need: int = 0
    """Bytes that a worker needed at its peak, and workers that were best: the next epoch begins with them."""
    wish: int = 0
    workers: Workers = field(default_factory=Workers)
    device_waited_s: float = 0.0
    device_ran_s: float = 0.0
    kept_in: RunFolder | None = None
    """Where incidents are written at once, so that they outlive the trainer."""

    def add(self, incident: Incident) -> None:
        if self.kept_in is not None:
            self.kept_in.write(as_dict(incident))
        self.counts[f"incident:{incident.finding}"] += 1
        self.last_at[incident.finding] = incident.at
        if len(self.incidents) < KEPT:
            self.incidents.append(incident)

    def add_bad(self, bad: BadSample) -> None:
        self.counts["bad_samples"] += 1
        if len(self.bad_samples) < KEPT:
            self.bad_samples.append(replace(bad, error=_at_most(bad.error, _TEXT)))


def _times(first: float, last: float, count: int) -> str:
    """ ", first 09:12:01, last 14:55:10"; with the day where it is not the same one."""
    if not first or not last:
        return ""
    days = [time.strftime("%Y-%m-%d", time.localtime(at)) for at in (first, last)]
    form = "%H:%M:%S" if days[0] == days[1] else "%Y-%m-%d %H:%M:%S"
    begun, ended = (time.strftime(form, time.localtime(at)) for at in (first, last))
    return f", first {begun}, last {ended}" if count > 1 else f", at {begun}"


class Report:
    """What happened so far. `str()` for people, `to_json()` for programs."""

    def __init__(self, record: Record, stats: Stats) -> None:
        self.incidents = tuple(record.incidents)
        self.bad_samples = tuple(record.bad_samples)
        self._stats = stats
        self.stats = to_dict(stats)
        self._counts = Counter(record.counts)
        self._last_at = dict(record.last_at)

    def __str__(self) -> str:
        s = self._stats
        lines = ["Holdfast report", f"  {summary(s)}"]
        if isinstance(s, LoaderStats) and s.device_waited_share is not None:
            lines.append(f"  the device waited for data {s.device_waited_share:.1%} of {s.device_ran_s:.1f} s")
        lines += [line for name in self._findings() for line in self._folded(name)]
        if self.bad_samples:
            lines.append("  bad samples")
            for bad in self.bad_samples[:_EXAMPLES]:
                swap = f", replaced by {shown(bad.replaced_by)}" if bad.replaced_by is not None else ""
                lines.append(
                    f"    index {shown(bad.index)} in batch {bad.batch}: {bad.error} ({bad.attempts} attempts{swap})"
                )
            more = self._counts["bad_samples"] - _EXAMPLES
            lines += [f"    and {more} more"] if more > 0 else []
        if not self.incidents:
            lines.append("  nothing went wrong")
        lines += self._resources()
        lines += [f"  {f.name}: {f.says}; {'; '.join(f.seen)}\n    try    {f.advice}" for f in self._speed()]
        return legible("\n".join(lines))

    def _resources(self) -> list[str]:
        """A line for each worker, and for each cache."""
        lines = [
            f"  worker {w.worker}: {done_by(self._stats, w)}, {w.bytes_sent / 2**20:.0f} MiB sent, busy "
            f"{w.busy_s:.1f} s, waited {w.waiting_s:.1f} s; grew by {w.peak_bytes / 2**20:.0f} MiB at most, "
            f"{w.descriptors:.0f} descriptors"
            for w in self._stats.per_worker
        ]
        caches = self._stats.caches if isinstance(self._stats, LoaderStats) else {}
        for name, figures in caches.items():
            lines.append(f"  {name}: " + ", ".join(f"{key} {value}" for key, value in figures.items()))
        return lines

    def _speed(self) -> list[Finding]:
        return speed.of_stats(self._stats) if isinstance(self._stats, LoaderStats) else []

    def text(self, width: int, colour: bool = False) -> str:
        """`str()` for a terminal: lines broken at its width, the findings' names in bold."""
        lines = []
        for line in str(self).splitlines():
            deep = len(line) - len(line.lstrip()) + (7 if _LABELLED.match(line) else 2)
            lines += textwrap.wrap(line, width, subsequent_indent=" " * deep) if len(line) > width else [line]
        text = "\n".join(lines)
        return _NAMES.sub("\\1\033[1m\\2\033[0m", text) if colour else text

    def _findings(self) -> list[str]:
        return list(dict.fromkeys(i.finding for i in self.incidents))

    def _folded(self, name: str) -> list[str]:
        """One finding: how often, and one example in full."""
        same = [i for i in self.incidents if i.finding == name]
        count = self._counts[f"incident:{name}"]
        indices = list(dict.fromkeys(shown(i.index) for i in same if i.index is not None))
        lines = [f"  {name} x{count}{_times(same[0].at, self._last_at.get(name, 0.0), count)}"]
        if indices:
            more = ", ..." if len(indices) > _EXAMPLES else ""
            lines.append(f"    at index {', '.join(indices[:_EXAMPLES])}{more}")
        lines += [f"    {line}" for line in str(same[0]).splitlines()]
        return lines

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "stats": self.stats,
            "counts": dict(self._counts),
            "last_at": self._last_at,
            "incidents": [as_dict(i) for i in self.incidents],
            "bad_samples": [as_dict(b) for b in self.bad_samples],
            "speed": [asdict(f) for f in self._speed()],
        }

    def to_json(self) -> str:
        told = self.to_dict()
        for records in (told["incidents"], told["bad_samples"]):
            records[:] = map(for_json, records)
        return json.dumps(told, default=shown, indent=2)
