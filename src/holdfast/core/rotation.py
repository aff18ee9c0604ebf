"""Rotation: workers whose number decides what they give take turns, as torch has it.

Where it is in force, no worker can do the work of another: batch n is worker n % workers' (`RoundRobin`), or each
worker is its own place in a stream (`Streams`).
"""

from collections.abc import Sequence

from holdfast.core.roster import Worker
from holdfast.core.task import Task


class RoundRobin:
    """Batch n goes to worker n % workers."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._at = 0

    def next(self, task: Task) -> Worker | None:
        """Who gets this task; None when nobody has anything left."""
        worker = self._workers[self._at]
        self._at = (self._at + 1) % len(self._workers)
        return worker


class Streams(RoundRobin):
    """A stream that has ended is left out; and so is a busy one, if it may be. It says which batch of the stream a
    task is.
    """

    def __init__(self, workers: Sequence[Worker], depth: int, in_order: bool) -> None:
        super().__init__(workers)
        self._depth = depth
        self._in_order = in_order
        self.ended = 0

    @property
    def open(self) -> bool:
        """False when every stream has come to its end."""
        return any(worker.open for worker in self._workers)

    def next(self, task: Task) -> Worker | None:
        count = len(self._workers)
        for busy_too in (self._in_order, True):
            for at in range(self._at, self._at + count):
                worker = self._workers[at % count]
                if worker.open and (busy_too or len(worker.tasks) < self._depth):
                    self._at = (at + 1) % count
                    task.number = worker.drawn
                    worker.drawn += 1
                    return worker
        return None
