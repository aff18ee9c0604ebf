"""Pulse: the flight recorder. Trainer, keeper and worker share a page of memory for each worker.

The worker writes with plain stores: no system call, no message. When it dies, hangs or is killed, its last pulse says
what it was on. The trainer writes `FLOOR`: it wants no task below that number any more. It also writes `WANTED`: the
task that it waits for, or waited for last. The keeper writes what it measures (`MEMORY` to `FILES`). Both may ask the
worker to leave after its batch: `ASKED`. The job writes the first words, see core/host.py.
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
# ASKED, LEAVING: a `Leave`. MEMORY: how much its private memory has grown since BASE; PEAK: the most so far.
ASKED, LEAVING, MEMORY, PEAK, FILES, BUSY_NS, BYTES, WANTED = range(FLOOR + 1, FLOOR + 9)
FIELDS = WANTED + 1
# The last word before the sender's. At the last dump the main thread held the GIL (2), did not (1), or unknown (0).
GIL = 127
# From here on the page says who sent the last signal, see system/signal_origin.py.
_SENDER_AT = 1024


class PlainRecorder:
    """A `Recorder` in Python. The compiled one takes a tenth of the time for a sample, and a third for a stage."""

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
    """The compiled recorder if there is one, or the one in Python."""
    try:
        from holdfast.local.protocol._pulse import Recorder as Compiled
    except ImportError:  # built without a compiler
        return PlainRecorder(words)
    return Compiled(words, STAGE, POSITION, SINCE)


class Pulse:
    """One worker's page. Code that runs for each sample may write `words` directly."""

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
        """What this worker has done and used so far, over all its lives. Memory and descriptors are those of the
        present life; memory is what it has beyond the private memory that it had when it was ready.
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
    """The words of a page that no other process sees."""
    return memoryview(bytearray(FIELDS * 8)).cast("q")
