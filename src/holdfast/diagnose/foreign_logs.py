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
from holdfast.diagnose.logs.own import OWN
from holdfast.diagnose.logs.system import KERNEL, SYSTEM
from holdfast.diagnose.logs.torch import DISTRIBUTED, TORCH

FAMILIES = (KERNEL, SLURM, CONTAINERS, TORCH, DISTRIBUTED, SPARK, RAY)
KINDS = tuple(family.kind for family in (OWN, *FAMILIES, SYSTEM))

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
# By which signal a process ended, of which such a finding speaks.
_SIGNALS = {
    "worker-oom-killed": 9,
    "job-over-memory": 9,
    "worker-killed": 9,
    "worker-terminated": 15,
    "terminated-by-scheduler": 15,
    "worker-segfault": 11,
    "worker-aborted": 6,
    "worker-bus-error": 7,
    "worker-illegal-instruction": 4,
    "worker-arithmetic-fault": 8,
}
_ERRNO = re.compile(r"\[Errno (\d+)\]|\berrno ?[:=] ?(\d+)")
# Where the traceback of another exception begins.
_NEXT = re.compile(r"^Traceback |\bCaught \w", re.MULTILINE)
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
    "main-not-guarded": _NOTICED | {"worker-exited"},
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
    """A clue that fits a line. `pids`: the processes that the line is about, where it says so."""

    clue: Clue
    name: str
    line: int
    column: int
    says: str
    advice: str
    pids: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Told:
    """One finding, and the numbers in its lines: by them it is seen whether it can have led to another. `own`: Holdfast
    has found it out.
    """

    finding: Explained
    own: bool
    pids: frozenset[int]
    errnos: frozenset[int]
    times: Times


def explain(text: str) -> list[Explained]:
    """What is known in this text, causes first; empty when nothing is."""
    page = _Page(text)
    hits = list(_hits(page, OWN, frozenset()))
    own = frozenset(hit.line for hit in hits)
    hits += [hit for family in FAMILIES for hit in _hits(page, family, own)]
    hits += _hits(page, SYSTEM, frozenset(hit.line for hit in hits))
    groups = [group for group in _grouped(hits) if not all(hit.clue.supports for hit in group)]
    return _causes_first([_told(page, group) for group in groups])


def _grouped(hits: list[_Hit]) -> list[list[_Hit]]:
    """A group for each finding. Two, where some of its lines are about processes that the rest of the text is about,
    and some about others: the kernel may have killed this worker and, another time, a browser.
    """
    by_name: dict[str, list[_Hit]] = {}
    for hit in _with_pids(hits):
        by_name.setdefault(hit.name, []).append(hit)
    pids = {name: frozenset().union(*(hit.pids for hit in own)) for name, own in by_name.items()}
    groups = []
    for name, own in by_name.items():
        others = frozenset().union(*(pids[other] for other in by_name if other != name))
        apart = [bool(others and hit.pids and not hit.pids & others) for hit in own]
        for side in (False, True):
            groups.append([hit for hit, strange in zip(own, apart, strict=True) if strange is side])
    return [group for group in groups if group]


def _with_pids(hits: list[_Hit]) -> list[_Hit]:
    """The kernel tells of one kill in several lines; the last of them has the pid."""
    pids_at: dict[int, frozenset[int]] = {}
    pids = frozenset[int]()
    for hit in sorted(hits, key=lambda hit: -hit.line):
        if hit.clue in KERNEL.clues:
            pids = pids_at[hit.line] = hit.pids or pids
    return [replace(hit, pids=pids_at[hit.line]) if hit.clue in KERNEL.clues else hit for hit in hits]


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
            if match is None or number in taken or (groups := _around(page, clue, number)) is None:
                continue
            taken.add(number)
            found = {key: (value or "(not said)").strip() for key, value in (match.groupdict() | groups).items()}
            pids = frozenset(int(pid) for pid in re.findall(r"\d+", found.get("pid", "")))
            column = match.start() - page.span(number, number)[0]
            texts = (clue.says.format(**found), clue.advice.format(**found))
            yield _Hit(clue, clue.name.format(**found), number, column, *texts, pids)


def _around(page: _Page, clue: Clue, number: int) -> dict[str, str] | None:
    """What the clue's groups found in the lines around; None where these are not as they must be."""
    found: dict[str, str] = {}
    for wanted, lines in (
        (clue.above, (number - AROUND, number - 1)),
        (clue.below, (number + 1, number + AROUND)),
    ):
        if wanted:
            match = re.search(wanted, page.lines(*lines))
            if match is None:
                return None
            found |= match.groupdict()
    return found


def _told(page: _Page, hits: list[_Hit]) -> _Told:
    """The words of the first clue in its table, which is the most specific one; the lines of all."""
    told = next(hit for hit in hits if not hit.clue.supports)
    columns = {hit.line: hit.column for hit in hits}
    numbers = sorted(columns)
    quotes = tuple(Quote(number, _short(page.lines(number, number), columns[number])) for number in numbers[:QUOTED])
    finding = Explained(told.name, told.says, quotes, len(numbers), told.advice, told.clue.confidence)
    pids = frozenset().union(*(hit.pids for hit in hits))
    own = any(hit.clue in OWN.clues for hit in hits)
    return _Told(finding, own, pids, _errnos(page, hits), _times(page, hits))


def _errnos(page: _Page, hits: list[_Hit]) -> frozenset[int]:
    """In the lines themselves; of an exception that came from a worker, also in its traceback."""
    found: set[int] = set()
    for hit in hits:
        text = page.lines(hit.line, hit.line)
        if hit.name in _RAISED:
            below = page.lines(hit.line + 1, hit.line + AROUND)
            ends = [match.start() for match in _NEXT.finditer(below)][1:]
            text += below[: ends[0] if ends else len(below)]
        found |= {int(one or other) for one, other in _ERRNO.findall(text)}
    return frozenset(found)


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


def last_exception(text: str) -> str:
    """The last one that the text names, with what it says; empty if there is none."""
    found = re.findall(r"\b((?:\w+\.)*[A-Z]\w*(?:Error|Exception)\b(?:: .*)?)", text)
    return _short(found[-1], 0) if found else ""


def _may_follow(effect: _Told, cause: _Told) -> bool:
    """False where the numbers in the text speak against it: time, process, signal, errno. What Holdfast has found out
    of two incidents stands: neither is a guess.
    """
    one, other = effect.finding.name, cause.finding.name
    if one not in CONSEQUENCES.get(other, ()) or _before(effect.times, cause.times):
        return False
    if effect.own and cause.own:
        return False
    if effect.errnos and cause.errnos and not effect.errnos & cause.errnos:
        return False
    if not effect.pids or not cause.pids:
        return True
    signals = {_SIGNALS[name] for name in (one, other) if name in _SIGNALS}
    return bool(effect.pids & cause.pids) and len(signals) < 2


def _causes_first(told: list[_Told]) -> list[Explained]:
    """Roots by the line they are first seen on, then what follows from them, the nearest first."""
    causes = {id(one): [other for other in told if _may_follow(one, other)] for one in told}

    def depth(one: _Told) -> int:
        return 1 + max((depth(cause) for cause in causes[id(one)]), default=-1)

    def roots(one: _Told) -> dict[str, int]:
        """Names, and the line that each is first seen on."""
        if not causes[id(one)]:
            return {one.finding.name: one.finding.quotes[0].line}
        return {name: line for cause in causes[id(one)] for name, line in roots(cause).items()}

    def put(one: _Told) -> Explained:
        if not causes[id(one)]:
            return one.finding
        begun = roots(one)
        return replace(one.finding, follows_from=tuple(sorted(begun, key=begun.__getitem__)))

    return [put(one) for one in sorted(told, key=lambda one: (depth(one), one.finding.quotes[0].line))]
