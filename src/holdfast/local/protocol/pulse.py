"""Pulse: the flight recorder. A page per worker in memory shared by trainer, keeper and worker.

The worker writes plain stores, no system call and no message; when it dies, hangs or is killed, its last pulse says
what it was on. The trainer writes `FLOOR`, below which tasks are not wanted any more, and `WANTED`, for which it waits
right now (or has waited). The keeper writes what it measures (`MEMORY` to `FILES`), and both may ask the worker to
leave after its batch: `ASKED`. The first words are the job's own, see core/host.py.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from holdfast.core.host import (
    ALLOWED,
    BASE,
    JOB_WORDS,
    JOURNALLED,
    POSITION,
    SAMPLES,
    SINCE,
    SPARE,
    STAGE,
    Recorder,
    Words,
)
from holdfast.core.messages import Place, Stage
from holdfast.shm.memory_file import Memory
from holdfast.system.signal_origin import SenderNote

PAGE = 4096
LIFE, TASK, DUMPABLE, TASKS, SIGNALS, LAST_SIGNAL, FLOOR = range(JOB_WORDS, JOB_WORDS + 7)
# ASKED, LEAVING: a `Leave`. MEMORY: what its private memory has grown by since BASE; PEAK: at most.
ASKED, LEAVING, MEMORY, PEAK, FILES, BUSY_NS, BYTES, WANTED = range(FLOOR + 1, FLOOR + 9)
FIELDS = WANTED + 1
# The last word before the sender's: 2 when the main thread held the GIL at the last dump, 1 when not, 0 unknown.
GIL = 127
# From here on in the page: who sent the last signal, see system/signal_origin.py.
_SENDER_AT = 1024


class PlainRecorder:
    """In Python. The compiled one takes a tenth of the time for a sample, and a third for a stage."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def enter(self, stage: int, position: int = 0, /) -> None:
        words = self._words
        words[STAGE] = stage
        words[POSITION] = position
        words[SINCE] = time.monotonic_ns()

    def walk(self, stage: int, indices: Iterable[Any], /) -> Iterator[Any]:
        words = self._words
        words[STAGE] = stage
        return self._walk(words, indices)

    @staticmethod
    def _walk(words: Words, indices: Iterable[Any]) -> Iterator[Any]:
        for words[POSITION], index in enumerate(indices):
            words[SINCE] = time.monotonic_ns()
            yield index


def recorder(words: memoryview) -> Recorder:
    """The best there is."""
    try:
        from holdfast.local.protocol._pulse import Recorder as Compiled
    except ImportError:  # built without a compiler
        return PlainRecorder(words)
    return Compiled(words, STAGE, POSITION, SINCE)


class Pulse:
    """One worker's page. `words` may be written directly where it is hot."""

    def __init__(self, memory: Memory, worker: int) -> None:
        start = worker * PAGE
        self._memory = memory
        self.words = memory.view[start : start + PAGE].cast("q")
        writes = recorder(self.words)  # which process: the worker
        self.enter, self.walk = writes.enter, writes.walk
        self.sender = SenderNote(memory, start + _SENDER_AT, PAGE - _SENDER_AT)
        self.gil_address = memory.address + start + GIL * 8

    def begin_life(self, life: int) -> None:
        """Which process: the keeper, before the fork."""
        for field in (STAGE, TASK, POSITION, DUMPABLE, JOURNALLED, ASKED, LEAVING, BASE, MEMORY, FILES, ALLOWED, SPARE):
            self.words[field] = 0
        self.words[TASK] = -1
        self.words[SINCE] = time.monotonic_ns()
        self.words[LIFE] = life

    def place(self, now: float) -> Place:
        """Which process: the keeper. What the worker is on, and for how long."""
        words = self.words
        seconds = max(0.0, now - words[SINCE] / 1e9)
        return Place(words[TASK], words[POSITION], Stage(words[STAGE]), seconds, words[SPARE])

    def figures(self) -> dict[str, float]:
        """What this worker has done and used so far, over all its lives. Memory and descriptors are of the present
        one, private memory beyond what it had when it was ready.
        """
        words = self.words
        return {
            "batches": words[TASKS],
            "samples": words[SAMPLES],
            "bytes_sent": words[BYTES],
            "busy_s": round(words[BUSY_NS] / 1e9, 3),
            "memory_bytes": words[MEMORY],
            "peak_bytes": words[PEAK],
            "descriptors": words[FILES],
        }


def new_words() -> memoryview:
    """Words of a page that nobody else sees."""
    return memoryview(bytearray(FIELDS * 8)).cast("q")
