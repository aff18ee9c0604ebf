"""Pulse: the flight recorder. A page per worker in memory shared by trainer, keeper and worker.

The worker writes plain stores, no system call and no message; when it dies, hangs or is killed, its last pulse says
what it was on. The trainer writes one field: `FLOOR`. `ALLOWED`: nanoseconds for the task at hand, where each has its
own; 0 for what holds for all, below 0 for as long as it takes.
"""

import time

from holdfast.core.messages import Place, Stage
from holdfast.local.sender import SenderNote
from holdfast.shm.memory import Memory

PAGE = 4096
LIFE, STAGE, TASK, POSITION, SINCE, DUMPABLE, TASKS, SAMPLES = range(8)
SIGNALS, LAST_SIGNAL, FLOOR, RETRIES, JOURNAL_BYTES, JOURNALLED, SLOT, ALLOWED = range(8, 16)
FIELDS = 16
# From here on in the page: who sent the last signal, see local/sender.py.
_SENDER_AT = 1024


class Pulse:
    """One worker's page. `words` may be written directly where it is hot."""

    def __init__(self, memory: Memory, worker: int) -> None:
        start = worker * PAGE
        self._memory = memory
        self.words = memory.view[start : start + PAGE].cast("q")
        self.sender = SenderNote(memory, start + _SENDER_AT, PAGE - _SENDER_AT)

    def begin_life(self, life: int) -> None:
        """Which process: the keeper, before the fork."""
        for field in (STAGE, TASK, POSITION, DUMPABLE, JOURNALLED, ALLOWED):
            self.words[field] = 0
        self.words[TASK] = -1
        self.words[SINCE] = time.monotonic_ns()
        self.words[LIFE] = life

    def enter(self, stage: Stage, position: int = 0) -> None:
        """Which process: the worker, at each change of what it does."""
        words = self.words
        words[STAGE] = stage
        words[POSITION] = position
        words[SINCE] = time.monotonic_ns()

    def place(self, now: float) -> Place:
        """Which process: the keeper. What the worker is on, and for how long."""
        words = self.words
        seconds = max(0.0, now - words[SINCE] / 1e9)
        return Place(words[TASK], words[POSITION], Stage(words[STAGE]), seconds)

    @property
    def working(self) -> bool:
        """True while it is on a task."""
        return Stage(self.words[STAGE]) >= Stage.FETCH
