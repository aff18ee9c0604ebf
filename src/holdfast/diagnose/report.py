"""The report: what happened to a loader or a pool so far, as text and as JSON. narrator.py collects it."""

import json
import re
import textwrap
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from holdfast.diagnose.finding import Finding
from holdfast.diagnose.incident import as_dict
from holdfast.diagnose.libraries import without_parts
from holdfast.diagnose.narrator import Record
from holdfast.diagnose.run_folder import for_json
from holdfast.diagnose.stats import LoaderStats, Stats, done_by, summary, to_dict
from holdfast.errors import legible
from holdfast.remote_exception import shown

SCHEMA = 1
_EXAMPLES = 5
_LABELLED = re.compile(r"\s*(seen|did|try|more) ")
_NAMES = re.compile(r"^(  )([a-z]+(?:-[a-z]+)+)\b", re.MULTILINE)
# A shorter run says nothing: the first batches always wait.
_LEAST_S = 2.0
_WAITS = 0.2
_NEVER_WAITS = 0.02


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
        lines = [f"Holdfast report{without_parts()}", f"  {summary(s)}"]
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
        lines = []
        for w in self._stats.per_worker:
            line = f"  worker {w.worker}: {done_by(self._stats, w)}, {w.bytes_sent / 2**20:.0f} MiB sent, busy "
            line += f"{w.busy_s:.1f} s, waited {w.waiting_s:.1f} s"
            if w.descriptors:  # every process has some: none means that nobody has looked at this one
                line += f"; grew by {w.peak_bytes / 2**20:.0f} MiB at most, {w.descriptors:.0f} descriptors"
            lines.append(line)
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
