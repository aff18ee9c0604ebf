"""A clue: what a line looks like, and what it means. The families are tables of these; foreign_logs.py asks them."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from holdfast.diagnose.finding import Confidence

# Python tracebacks through torch are long: a clue may look this many lines up or down for its surroundings.
AROUND = 45


@dataclass(frozen=True, slots=True, kw_only=True)
class Clue:
    """One kind of line.

    `pattern` is searched anywhere in a line. `above` and `below` must be found in the lines around it, when given. The
    named groups of all three may be used in `name`, `says` and `advice`; the group `pid` is also compared. Clues of a
    family stand from the most to the least specific: the first that fits takes the line. `supports` marks a line that
    means something only beside another of the same finding.
    """

    name: str
    pattern: str
    says: str
    advice: str
    confidence: Confidence = "certain"
    above: str = ""
    below: str = ""
    supports: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """The clues of one kind of log. `kind` is what to call it when nothing was found."""

    kind: str
    clues: tuple[Clue, ...]


# What lines of other people's logs look like, and what they mean: one family of software per file.


# When was a line of a log written? On which clock: only times of the same clock can be compared.
#
# Dates without a zone are one clock, dates with one another, the kernel's seconds since boot a third, and so on.


class When(NamedTuple):
    clock: str
    seconds: float


_CLOCK = r"(?P<time>\d\d:\d\d:\d\d)(?:[.,]\d+)?"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_MONTH = r"(?P<month>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_EPOCH = datetime(1970, 1, 1)
_LEAP_YEAR = 2000  # for clocks without a year: every day of a year is one of this


def _zoned(found: re.Match[str]) -> float:
    text = f"{found['date']}T{found['time']}{found['zone'].replace('Z', '+00:00')}"
    return datetime.fromisoformat(text).timestamp()


def _plain(found: re.Match[str]) -> float:
    return (datetime.fromisoformat(f"{found['date']}T{found['time']}") - _EPOCH).total_seconds()


def _short_year(found: re.Match[str]) -> float:
    return (datetime.strptime(f"{found['date']} {found['time']}", "%y/%m/%d %H:%M:%S") - _EPOCH).total_seconds()


def _named_month(found: re.Match[str]) -> float:
    parts = found.groupdict()
    text = f"{parts.get('year') or _LEAP_YEAR} {found['month']} {found['day']} {found['time']}"
    return (datetime.strptime(text, "%Y %b %d %H:%M:%S") - _EPOCH).total_seconds()


def _glog(found: re.Match[str]) -> float:
    text = f"{_LEAP_YEAR}{found['date']} {found['time']}"
    return (datetime.strptime(text, "%Y%m%d %H:%M:%S") - _EPOCH).total_seconds()


# (clock, pattern, what it says in seconds)
_FORMS: tuple[tuple[str, re.Pattern[str], Callable[[re.Match[str]], float]], ...] = (
    (
        "zoned",
        re.compile(rf"(?P<date>\d{{4}}-\d\d-\d\d)[T ]{_CLOCK} ?(?P<zone>Z|[+-]\d\d:\d\d)(?![\d:])"),
        _zoned,
    ),
    ("date", re.compile(rf"(?P<date>\d{{4}}-\d\d-\d\d)[T ]{_CLOCK}"), _plain),
    ("date", re.compile(rf"^\D{{0,3}}(?P<date>\d\d/\d\d/\d\d) {_CLOCK}"), _short_year),
    ("date", re.compile(rf"\[{_DAY} {_MONTH} +(?P<day>\d+) {_CLOCK} (?P<year>\d{{4}})\]"), _named_month),
    ("year", re.compile(rf"^{_MONTH} +(?P<day>\d+) {_CLOCK}"), _named_month),
    ("glog", re.compile(rf"^\W{{0,3}}[IWEF](?P<date>\d{{4}}) {_CLOCK}"), _glog),
    ("boot", re.compile(r"^(?:\S+:? )?\[ *(?P<up>\d+\.\d{6})\]"), lambda found: float(found["up"])),
)


def when(line: str) -> When | None:
    """The time that a line begins with, or holds."""
    for clock, pattern, seconds in _FORMS:
        found = pattern.search(line)
        if found is not None:
            try:
                return When(clock, seconds(found))
            except ValueError:
                continue  # 2024-13-45 is no date
    return None


# Which plain words a pattern cannot match without. Finding a word in a large log is much faster than a pattern.


# Shorter words stand in too many lines to spare any work.
SHORTEST = 3


def words(pattern: str) -> tuple[str, ...]:
    """One word for each alternative of the pattern: a line without any of them does not match.

    Only the outermost level is read: what stands in groups and classes is left out, which is always safe.
    """
    found = tuple(max(_runs(alternative), key=len, default="") for alternative in _alternatives(_tokens(pattern)))
    if any(len(word) < SHORTEST for word in found):
        raise ValueError(f"an alternative has no plain word of {SHORTEST} letters: {pattern}")
    return found


def _tokens(pattern: str) -> list[str]:
    """Characters, escapes, classes and whole groups, as they follow each other."""
    tokens = []
    at = 0
    while at < len(pattern):
        end = _end(pattern, at)
        tokens.append(pattern[at:end])
        at = end
    return tokens


def _end(pattern: str, at: int) -> int:
    """Where the token that begins here ends."""
    match pattern[at]:
        case "\\":
            return at + 2
        case "[":
            end = at + 2  # a class has one member at least, which may be "]"
            while pattern[end] != "]":
                end += 2 if pattern[end] == "\\" else 1
            return end + 1
        case "{":
            return pattern.index("}", at) + 1
        case "(":
            end = at + 1
            while pattern[end] != ")":
                end = _end(pattern, end)
            return end + 1
        case _:
            return at + 1


def _alternatives(tokens: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for token in tokens:
        if token == "|":
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _runs(tokens: list[str]) -> list[str]:
    """The runs of plain letters among the tokens."""
    runs = [""]
    for token in tokens:
        if token[0] in "?*{":  # what stands before it may be missing
            runs[-1] = runs[-1][:-1]
            runs.append("")
        elif token[0] == "\\" and token[1] in "bB":
            continue
        elif token[0] == "\\" and not token[1].isalnum():
            runs[-1] += token[1]
        elif len(token) > 1 or token in ".^$+":
            runs.append("")
        else:
            runs[-1] += token
    return runs
