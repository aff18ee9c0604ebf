"""Somebody else's log or traceback -> findings: what happened, on which lines, what came first, what to do.

Pure functions of the text. The families in logs/ know what lines look like; here lines are collected per finding, and
what only follows from another finding is put behind it and says so.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast.diagnose.finding import Confidence
from holdfast.diagnose.logs import AROUND, Clue, Family, when, words
from holdfast.diagnose.logs.clusters import CONTAINERS, RAY, SLURM, SPARK
from holdfast.diagnose.logs.system import KERNEL, SYSTEM
from holdfast.diagnose.logs.torch import DISTRIBUTED, TORCH

FAMILIES = (KERNEL, SLURM, CONTAINERS, TORCH, DISTRIBUTED, SPARK, RAY)
KINDS = tuple(family.kind for family in (*FAMILIES, SYSTEM))

# A flood of equal lines helps nobody: this many are quoted, the rest is counted.
QUOTED = 3
# Lines of a log can be whole batches of JSON; a quote is for the eye.
QUOTE_CHARACTERS = 220
# So much of a long line is shown before what was recognized in it.
LEAD_CHARACTERS = 40

# A cause may be written down later than what it led to: schedulers tell at the end of a step.
LATE_S = 60.0

_JVM = frozenset({"executor-lost", "spark-python-worker-lost", "jvm-interrupted", "jvm-raised"})
_NOTICED = _JVM | {"rank-failed-first", "pin-thread-lost"}
_ENDED = frozenset({"worker-killed", "worker-terminated", "worker-exited"})
_RAISED = frozenset({"sample-raised", "collate-raised", "worker-init-raised"})
_CRASHES = (
    "worker-segfault",
    "worker-aborted",
    "worker-bus-error",
    "worker-illegal-instruction",
    "worker-arithmetic-fault",
)
_REASONS = (
    "disk-full",
    "quota-exceeded",
    "stale-file",
    "permission-denied",
    "file-missing",
    "exception-not-picklable",
    "cuda-in-forked-worker",
    "gpu-memory-full",
    "samples-differ",
)

# cause -> findings that may be its consequences, if one log shows both.
CONSEQUENCES: dict[str, frozenset[str]] = {
    "worker-oom-killed": _ENDED | _NOTICED | {"job-over-memory", "terminated-by-scheduler"},
    "job-over-memory": _ENDED | _NOTICED | {"terminated-by-scheduler"},
    "node-evicted": _ENDED | _NOTICED | {"terminated-by-scheduler"},
    "terminated-by-scheduler": _ENDED | _NOTICED,
    "address-space-limited": _RAISED | _NOTICED | {"allocation-refused"},
    "cannot-start-process": _RAISED | _NOTICED | {"worker-exited", "worker-segfault", "worker-aborted", "interrupted"},
    "torch-descriptor-transport": _RAISED | _NOTICED | {"worker-exited", "descriptors-exhausted"},
    "descriptors-exhausted": _RAISED | _NOTICED | {"worker-exited"},
    "shm-too-small": _RAISED | _NOTICED | {"worker-exited", "worker-bus-error", "disk-full", "worker-aborted"},
    "shm-removed": _RAISED | _NOTICED | {"worker-exited", "worker-aborted"},
    "allocation-refused": _RAISED | _NOTICED | {"worker-aborted"},
    # An exception does not end a torch worker: it is sent to the trainer. So these do not explain a death.
    **dict.fromkeys(_REASONS, _RAISED | _NOTICED),
    **dict.fromkeys(_RAISED, _NOTICED),
    **dict.fromkeys(("value-not-picklable", "fork-after-threads", "interrupted"), _NOTICED | {"worker-exited"}),
    **dict.fromkeys(_CRASHES, _NOTICED | {"worker-exited"}),
    "worker-killed": _NOTICED | {"worker-exited", "worker-terminated"},
    "worker-terminated": _NOTICED | {"worker-exited"},
    "worker-exited": _NOTICED,
    "sample-hung": _NOTICED,
    "executor-lost": frozenset({"spark-python-worker-lost", "jvm-interrupted", "jvm-raised"}),
    "spark-python-worker-lost": frozenset({"jvm-interrupted", "jvm-raised"}),
    "jvm-interrupted": frozenset({"jvm-raised"}),
}


@dataclass(frozen=True, slots=True)
class Quote:
    """A line of the log, numbered from 1."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Explained:
    """One finding in somebody else's log. `follows_from` names the findings that it is only a consequence of."""

    name: str
    says: str
    quotes: tuple[Quote, ...]
    lines: int
    advice: str
    confidence: Confidence
    follows_from: tuple[str, ...] = ()


Times = dict[str, tuple[float, float]]
"""By clock: when a finding's lines were first and last written."""


@dataclass(frozen=True, slots=True)
class _Hit:
    """A clue that fits a line."""

    clue: Clue
    line: int
    column: int
    says: str
    advice: str


def explain(text: str) -> list[Explained]:
    """What is known in this text, causes first; empty when nothing is."""
    page = _Page(text)
    hits = [hit for family in FAMILIES for hit in _hits(page, family, frozenset())]
    hits += _hits(page, SYSTEM, frozenset(hit.line for hit in hits))
    by_name: dict[str, list[_Hit]] = {}
    for hit in hits:
        by_name.setdefault(hit.clue.name, []).append(hit)
    told = {name: own for name, own in by_name.items() if not all(hit.clue.supports for hit in own)}
    times = {name: _times(page, own) for name, own in told.items()}
    return _causes_first([_explained(page, own) for own in told.values()], times)


class _Page:
    """A text whose lines can be found from positions, and looked around in."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(match.end() for match in re.finditer(r"\n", text))]

    def lines_with(self, some: tuple[str, ...]) -> list[int]:
        """The numbers of the lines in which one of the words stands."""
        numbers = set()
        for word in some:
            at = self.text.find(word)
            while at >= 0:
                number = bisect_right(self.starts, at)
                numbers.add(number)
                at = self.text.find(word, self.span(number, number)[1])
        return sorted(numbers)

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Where lines first to last begin and end, both included, as far as there are such lines."""
        first, last = max(first, 1), min(last, len(self.starts))
        if first > last:
            return 0, 0
        end = self.starts[last] - 1 if last < len(self.starts) else len(self.text)
        return self.starts[first - 1], end

    def lines(self, first: int, last: int) -> str:
        begin, end = self.span(first, last)
        return self.text[begin:end]


def _hits(page: _Page, family: Family, known: frozenset[int]) -> Iterator[_Hit]:
    """Each line goes to the first clue of the family that fits it; `known` lines are not asked."""
    taken = set(known)
    for clue in family.clues:
        pattern = re.compile(clue.pattern, re.MULTILINE)
        for number in page.lines_with(words(clue.pattern)):
            match = pattern.search(page.text, *page.span(number, number))
            if match is None or number in taken or not _surrounded(page, clue, number):
                continue
            taken.add(number)
            groups = {key: (value or "(not said)").strip() for key, value in match.groupdict().items()}
            column = match.start() - page.span(number, number)[0]
            yield _Hit(clue, number, column, clue.says.format(**groups), clue.advice.format(**groups))


def _surrounded(page: _Page, clue: Clue, number: int) -> bool:
    if clue.above and not re.search(clue.above, page.lines(number - AROUND, number - 1)):
        return False
    return not clue.below or bool(re.search(clue.below, page.lines(number + 1, number + AROUND)))


def _explained(page: _Page, hits: list[_Hit]) -> Explained:
    """The words of the first clue in its table, which is the most specific one; the lines of all."""
    told = next(hit for hit in hits if not hit.clue.supports)
    columns = {hit.line: hit.column for hit in hits}
    numbers = sorted(columns)
    quotes = tuple(Quote(number, _short(page.lines(number, number), columns[number])) for number in numbers[:QUOTED])
    return Explained(told.clue.name, told.says, quotes, len(numbers), told.advice, told.clue.confidence)


def _short(line: str, column: int) -> str:
    """The text around the column: the last state of a progress bar, a part of a very long line."""
    begin = line.rfind("\r", 0, column) + 1
    shown = line[begin:].partition("\r")[0]
    column -= begin
    if len(shown) <= QUOTE_CHARACTERS:
        return shown.strip()
    begin = 0 if column < QUOTE_CHARACTERS // 2 else column - LEAD_CHARACTERS
    end = begin + QUOTE_CHARACTERS
    return ("... " if begin else "") + shown[begin:end].strip() + (" ..." if end < len(shown) else "")


def _times(page: _Page, hits: list[_Hit]) -> Times:
    """A line without a time has that of the nearest line above: a traceback has one at its head."""
    found: Times = {}
    for hit in hits:
        lines = page.lines(hit.line - AROUND, hit.line).splitlines()
        at = next((at for line in reversed(lines) if (at := when(line)) is not None), None)
        if at is not None:
            first, last = found.get(at.clock, (at.seconds, at.seconds))
            found[at.clock] = (min(first, at.seconds), max(last, at.seconds))
    return found


def _before(times: Times, others: Times) -> bool:
    """True when all of it was over, on some clock of both, before the other began."""
    return any(times[clock][1] + LATE_S < others[clock][0] for clock in times.keys() & others.keys())


def _causes_first(found: list[Explained], times: dict[str, Times]) -> list[Explained]:
    """Roots by the line they are first seen on, then what follows from them, the nearest first.

    Nothing follows from what came after it, where the log says when.
    """
    names = {one.name for one in found}
    causes = {
        name: [
            cause for cause in names if name in CONSEQUENCES.get(cause, ()) and not _before(times[name], times[cause])
        ]
        for name in names
    }

    def depth(name: str) -> int:
        return 1 + max((depth(cause) for cause in causes[name]), default=-1)

    def roots(name: str) -> set[str]:
        return {name} if not causes[name] else set().union(*(roots(cause) for cause in causes[name]))

    first_line = {one.name: one.quotes[0].line for one in found}
    told = [
        replace(one, follows_from=tuple(sorted(roots(one.name), key=first_line.__getitem__)))
        if causes[one.name]
        else one
        for one in found
    ]
    return sorted(told, key=lambda one: (depth(one.name), one.quotes[0].line))
