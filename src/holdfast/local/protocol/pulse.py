"""Pulse: the flight recorder. Trainer, keeper and worker share a page of memory for each worker.

The worker writes with plain stores: no system call, no message. When it dies, hangs or is killed, its last pulse says
what it was on. The trainer writes `FLOOR`: it wants no task below that number any more. It also writes `WANTED`: the
task that it waits for, or waited for last. The keeper writes what it measures (`MEMORY` to `FILES`). Both may ask the
worker to leave after its batch: `ASKED`. The job writes the first words, see core/host.py.

The worker also notes the index of the sample at hand: a number as such, any other index as text. So whoever finds a
dead trainer and a dead worker can say which sample it was.
"""

import operator
import struct
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
# The index at hand. INDEX_KIND says how to read it: a number in INDEX, text at INDEX_TEXT, or nothing.
INDEX, INDEX_KIND = WANTED + 1, WANTED + 2
NO_INDEX, NUMBER, TEXT = range(3)
# Where the text is, in words, and its length in bytes at most; it ends with a zero byte if it is shorter.
INDEX_TEXT, TEXT_BYTES = 64, 64
# A longer tuple is written as its type.
_MOST_PARTS = 8
FIELDS = INDEX_TEXT + TEXT_BYTES // 8
# The last word before the sender's. At the last dump the main thread held the GIL (2), did not (1), or unknown (0).
GIL = 127
# From here on the page says who sent the last signal, see system/signal_origin.py.
_SENDER_AT = 1024


# What a new life finds empty.
_OF_A_LIFE = (
    *(STAGE, TASK, POSITION, DUMPABLE, JOURNALLED, ASKED, LEAVING, BASE, MEMORY, FILES, ALLOWED, SPARE),
    INDEX_KIND,
)


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
            _note_index(words, index)
            yield index


def _note_index(words: Words, index: Any) -> None:
    """As the compiled one does. Of an object only the type is written: its `repr` may be long, and is user code."""
    words[INDEX_KIND] = NO_INDEX
    try:
        words[INDEX] = operator.index(index)
        words[INDEX_KIND] = NUMBER
        return
    except Exception:  # no number, or user code
        text = repr(index) if _is_plain(index) else f"<{type(index).__name__}>"
    data = text.encode(errors="replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    for at, word in enumerate(struct.unpack(f"{TEXT_BYTES // 8}q", data), INDEX_TEXT):
        words[at] = word
    words[INDEX_KIND] = TEXT


def _is_plain(index: Any) -> bool:
    if type(index) in (tuple, list):
        return len(index) <= _MOST_PARTS and all(map(_is_atom, index))
    return _is_atom(index)


def _is_atom(value: Any) -> bool:
    kind = type(value)
    return kind in (int, float, bool, type(None)) or (kind in (str, bytes) and len(value) <= TEXT_BYTES)


def recorder(words: memoryview) -> Recorder:
    """The compiled recorder if there is one, or the one in Python."""
    try:
        from holdfast.local.protocol._pulse import Recorder as Compiled
    except ImportError:  # built without a compiler
        return PlainRecorder(words)
    return Compiled(words, STAGE, POSITION, SINCE, INDEX, INDEX_KIND, INDEX_TEXT)


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
        for field in _OF_A_LIFE:
            self.words[field] = 0
        self.words[TASK] = -1
        self.words[SINCE] = time.monotonic_ns()
        self.words[LIFE] = life

    def place(self, now: float) -> Place:
        """Which process: the keeper. What the worker is on, and for how long."""
        words = self.words
        seconds = max(0.0, now - words[SINCE] / 1e9)
        return Place(words[TASK], words[POSITION], Stage(words[STAGE]), seconds, words[SPARE])

    @property
    def index(self) -> int | str | None:
        """The sample at hand: a number, or an index as Python writes it. None if there is none, or none was noted."""
        words = self.words
        if words[STAGE] != Stage.FETCH or words[INDEX_KIND] == NO_INDEX:
            return None
        if words[INDEX_KIND] == NUMBER:
            return int(words[INDEX])
        text = bytes(words[INDEX_TEXT : INDEX_TEXT + TEXT_BYTES // 8])
        return text.partition(b"\0")[0].decode(errors="replace")

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
