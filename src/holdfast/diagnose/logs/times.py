"""When was a line of a log written? On which clock: only times of the same clock can be compared.

Dates without a zone are one clock, dates with one another, the kernel's seconds since boot a third, and so on.
"""

import re
from collections.abc import Callable
from datetime import datetime
from typing import NamedTuple


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
