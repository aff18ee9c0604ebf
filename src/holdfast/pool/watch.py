"""Who looks on while a pool works: `holdfast top`, by the totals in the run folder; and the progress of maps.

Which thread: the dispatcher's, but for `add`. It sleeps no longer than until somebody wants to look, and without
anybody as long as nothing happens.
"""

import math
from collections.abc import Callable
from typing import Any

from holdfast.diagnose.runfolder import TOTALS_S, RunFolder
from holdfast.pool.progress import Tracker


class Watch:
    """See the module."""

    def __init__(self, folder: RunFolder | None, stats: Callable[[], dict[str, Any]]) -> None:
        self._folder = folder
        self._stats = stats
        self._trackers: list[Tracker] = []
        self._totals_at = math.inf if folder is None else 0.0

    @property
    def next_at(self) -> float:
        """When somebody wants to look, by the monotonic clock."""
        return min([self._totals_at, *(tracker.next_at for tracker in self._trackers)])

    def patience(self, now: float) -> float | None:
        """How long nobody wants to look; None: as long as you like."""
        until = self.next_at
        return None if until == math.inf else max(0.0, until - now)

    def add(self, tracker: Tracker) -> None:
        """From any thread."""
        self._trackers.append(tracker)

    def look(self, now: float) -> None:
        """It is time."""
        if now >= self._totals_at and self._folder is not None:
            self._folder.write_totals(self._stats)
            self._totals_at = now + TOTALS_S
        for tracker in list(self._trackers):
            if not tracker.over and now >= tracker.next_at:
                tracker.look(now)
            if tracker.over:
                self._trackers.remove(tracker)

    def end(self) -> None:
        """The pool is at its end."""
        if self._folder is not None:
            self._folder.write_totals(self._stats, running=False)
        for tracker in self._trackers:
            tracker.finish()
        self._trackers.clear()
