"""Progress of a map(): on a terminal one line, rewritten; elsewhere a line now and then; or calls of a function.

The dispatcher's thread counts and prints, because it wakes up anyway when a task ends. The thread that takes the last
result prints the last line, so that this stands before what the user prints next.
"""

import logging
import math
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from holdfast.diagnose.run_folder import TOTALS_S, RunFolder
from holdfast.diagnose.stats import PoolStats
from holdfast.system.signal_origin import raised_by_handler

log = logging.getLogger("holdfast")
# Seconds between two looks: at a terminal, in a log file, and for a function.
TERMINAL_S = 0.2
LOG_S = 10.0
CALL_S = 1.0
# The rate is that of the last half minute.
RATE_S = 30.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a map() is. `str()` is the line that people see."""

    label: str
    done: int
    """Items that have an outcome; `failed` of them have an exception."""
    total: int | None
    """None if it is not known: a generator does not tell its length."""
    failed: int
    retried: int
    """Attempts beyond the first, of all tasks of the pool since the map began."""
    running: int
    """Workers that have something to do."""
    seconds: float
    per_second: float
    over: bool

    @property
    def left_s(self) -> float | None:
        """Seconds that the rest will take at this rate; None if that is not known."""
        if self.total is None or not self.per_second:
            return None
        return (self.total - self.done) / self.per_second

    def __str__(self) -> str:
        of = f" of {self.total:,}" if self.total is not None else ""
        parts = [f"{self.label}: {self.done:,}{of} done", f"{self.per_second:,.1f}/s"]
        parts += [f"{self.failed:,} failed"] if self.failed else []
        parts += [f"{self.retried:,} retried"] if self.retried else []
        if self.over:
            return ", ".join([*parts, f"in {clock(self.seconds)}"])
        left = self.left_s
        parts += [f"{self.running} running", f"{clock(left)} left" if left is not None else clock(self.seconds)]
        return ", ".join(parts)


def clock(seconds: float) -> str:
    """0:07, 12:34, 1:02:03"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rewrite(file: TextIO, text: str, end: str = "") -> None:
    """Rewrite the last line of a terminal, cut to its width."""
    width = shutil.get_terminal_size().columns
    file.write(f"\r{text[: width - 1]}\033[K{end}")
    file.flush()


def is_terminal(file: Any) -> bool:
    """False if the stream does not say. A program may have replaced it by an object that has less than a file."""
    try:
        return bool(file.isatty())
    except Exception as error:  # it has no such method, is closed, or is user code
        if raised_by_handler(error):
            raise
        return False


Show = Callable[[Progress], object]


def on_stderr() -> tuple[Show, float]:
    """What shows the progress on this stream, and how often."""
    file = getattr(sys, "stderr", None)
    if file is None:
        return lambda progress: None, LOG_S
    if is_terminal(file):
        return lambda progress: rewrite(file, str(progress), "\n" if progress.over else ""), TERMINAL_S
    return lambda progress: print(progress, file=file, flush=hasattr(file, "flush")), LOG_S


class Tracker:
    """The progress of one map. `told` gives retries and running workers of the pool."""

    def __init__(self, wish: bool | str | Show, name: str, total: int | None, told: Callable[[], Any]) -> None:
        self._show, self._every_s = (wish, CALL_S) if callable(wish) else on_stderr()
        self._label = wish if isinstance(wish, str) else name
        self._told = told
        self.total = total
        self._done = 0
        self._failed = 0
        self._began = time.monotonic()
        self._before: int = told()[0]
        self._marks: deque[tuple[float, int]] = deque([(self._began, 0)])
        self._lock = threading.Lock()  # for the dispatcher's thread and the one that takes the last result
        self.over = False
        self.next_at = self._began + self._every_s

    def ended(self, items: int, failed: int) -> None:
        """Which thread: the dispatcher's, before the futures know."""
        self._done += items
        self._failed += failed

    def look(self, now: float) -> None:
        """Show the progress. This is the last time if all results are there and nobody takes them."""
        self.next_at = now + self._every_s
        if self._done == self.total:
            self.finish()
        else:
            self._say(now, False)

    def finish(self) -> None:
        """No more results come, or nobody waits for them."""
        self._say(time.monotonic(), True)

    def _say(self, now: float, over: bool) -> None:
        with self._lock:
            if self.over:
                return
            self.over = over
            progress = self._progress(now)
            try:
                self._show(progress)
            except Exception:  # user code raised, or the terminal is gone: the work goes on
                log.exception("progress of %s cannot be shown", self._label)
                self.over = True

    def _progress(self, now: float) -> Progress:
        marks = self._marks
        marks.append((now, self._done))
        while len(marks) > 2 and marks[1][0] < now - RATE_S:
            marks.popleft()
        at, had = (self._began, 0) if self.over else marks[0]
        rate = (self._done - had) / (now - at) if now > at else 0.0
        retries, running = self._told()
        retried = retries - self._before
        counted = (self._done, self.total, self._failed, retried, running)
        return Progress(self._label, *counted, now - self._began, rate, self.over)


# Two things look at a pool while it works: `holdfast top`, through the totals in the run folder, and the progress of
# maps.
#
# Which thread: the dispatcher's, except for `add`. It sleeps until the next look is due. If nobody looks, it sleeps
# until something happens.


class PoolWatch:
    """See the module."""

    def __init__(self, folder: RunFolder | None, stats: Callable[[], PoolStats]) -> None:
        self._folder = folder
        self._stats = stats
        self._trackers: list[Tracker] = []
        self._totals_at = math.inf if folder is None else 0.0

    @property
    def next_at(self) -> float:
        """When the next look is due, by the monotonic clock."""
        return min([self._totals_at, *(tracker.next_at for tracker in self._trackers)])

    def patience(self, now: float) -> float | None:
        """Seconds until the next look; None if there is none."""
        until = self.next_at
        return None if until == math.inf else max(0.0, until - now)

    def add(self, tracker: Tracker) -> None:
        """From any thread."""
        self._trackers.append(tracker)

    def look(self, now: float) -> None:
        """A look is due."""
        if now >= self._totals_at and self._folder is not None:
            self._folder.write_totals(self._stats)
            self._totals_at = now + TOTALS_S
        for tracker in list(self._trackers):
            if not tracker.over and now >= tracker.next_at:
                tracker.look(now)
            if tracker.over:
                self._trackers.remove(tracker)

    def end(self) -> None:
        """The pool has ended."""
        if self._folder is not None:
            self._folder.write_totals(self._stats, running=False)
        for tracker in self._trackers:
            tracker.finish()
        self._trackers.clear()
