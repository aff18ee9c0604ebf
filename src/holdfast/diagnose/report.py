"""The report: what happened to a loader or a pool so far, as text and as JSON. `Record` collects it."""

import json
import re
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from holdfast.core.host import Figures
from holdfast.diagnose.finding import Finding
from holdfast.diagnose.incident import TEXT, BadSample, Incident, as_dict, at_most
from holdfast.diagnose.run_folder import RunFolder, for_json
from holdfast.diagnose.stats import LoaderStats, Stats, WorkerStats, done_by, summary, to_dict
from holdfast.errors import legible
from holdfast.remote_exception import shown

SCHEMA = 1
# Incidents and bad samples that are kept whole; beyond, they are only counted.
KEPT = 1000
_EXAMPLES = 5
_LABELLED = re.compile(r"\s*(seen|did|try|more) ")
_NAMES = re.compile(r"^(  )([a-z]+(?:-[a-z]+)+)\b", re.MULTILINE)
# A shorter run says nothing: the first batches always wait.
_LEAST_S = 2.0
_WAITS = 0.2
_NEVER_WAITS = 0.02


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
    ran_s: float = 0.0
    need: int = 0
    """Bytes that a worker needed at its peak, and workers that were best: the next epoch begins with them."""
    wish: int = 0
    workers: Workers = field(default_factory=Workers)
    device_waited_s: float = 0.0
    device_ran_s: float = 0.0
    kept_in: RunFolder | None = None
    """Where incidents are written at once, so that they outlive the trainer."""

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
        return speed_of(self._stats) if isinstance(self._stats, LoaderStats) else []

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
        """One finding: how often, and the last one in full: it says what was done in the end."""
        same = [i for i in self.incidents if i.finding == name]
        count = self._counts[f"incident:{name}"]
        indices = list(dict.fromkeys(shown(i.index) for i in same if i.index is not None))
        lines = [f"  {name} x{count}{_times(same[0].at, self._last_at.get(name, 0.0), count)}"]
        if indices:
            more = ", ..." if len(indices) > _EXAMPLES else ""
            lines.append(f"    at index {', '.join(indices[:_EXAMPLES])}{more}")
        lines += [f"    {line}" for line in str(same[-1]).splitlines()]
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


def speed_of(stats: LoaderStats) -> list[Finding]:
    """Who waits for whom, by a loader's totals? If the device measured its own waiting, that counts: next() may wait
    while the device is busy.
    """
    found = []
    workers, cpus, ran, waited = stats.workers, stats.cpus, stats.ran_s, stats.waited_s
    if cpus and workers > cpus:
        found.append(
            Finding(
                "too-many-workers",
                f"{workers} workers share {cpus} processors",
                (f"this process may run on {cpus} processors",),
                f"num_workers={cpus}, unless the samples mostly wait for a disk or a network",
                "possible",
            )
        )
    who = "next()"
    if stats.device_ran_s is not None and stats.device_waited_s is not None:
        who, ran, waited = "the device", stats.device_ran_s, stats.device_waited_s
    if ran < _LEAST_S or not workers:
        return found
    share = waited / ran
    seen = (f"{who} waited {waited:.1f} of {ran:.1f} s ({share:.0%})",)
    if share > _WAITS:
        more = f"num_workers={cpus}" if cpus > workers else "cheaper samples (smaller, decoded before, cached)"
        found.append(Finding("loader-slow", "the trainer waits for batches", seen, more, "likely"))
    elif share < _NEVER_WAITS:
        found.append(
            Finding(
                "trainer-slow",
                "batches wait for the trainer: the loader is fast enough",
                seen,
                "nothing; fewer workers might do, and take less memory",
                "likely",
            )
        )
    return found
