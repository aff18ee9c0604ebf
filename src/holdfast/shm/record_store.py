"""RecordStore: records by index, in memory that many processes share, bounded in bytes. No process ever waits.

    head | segments: generation, used, since | directory: a word per index | data: segment 0, segment 1, ...

A segment is filled from its start. A writer claims it for the time of one record (see shared_file.py), so there is one
writer at a time. It writes the whole record, and then its directory word, in one store: *commit*. The word says
segment, generation and place; 0 means nothing. A reader takes the word, compares the generation with the segment's,
copies the record out, and compares the generation again. Only then does it look at what it has copied.

To use a segment again, its writer first raises the generation, and then writes over the old records. A reader that was
copying them sees another generation afterwards, and counts them as not found. A generation has 64 bits in the segment
and in each record, but only 26 in the directory word. So after 67 million rounds a stale word may point to a record
again. Then the record's own generation and index show that it is stale.

A writer that is killed leaves nothing locked and nothing half done. A record that it has not committed is not in the
directory. The kernel releases its claim. The next writer goes on after the last whole record. If it is killed after it
has raised the generation and before it has emptied the segment, the segment looks full and holds nothing. But it then
counts as the oldest, so it is the next one to be used again.

If two processes store the same index at once, both succeed. The later word counts, and the other copy wastes its room.

How many segments? Each should hold many records, because the room at its end stays empty. And there should be many, so
that writers rarely want the same one, and eviction takes a small share at a time. The first writer decides, when it
knows the size of a record.
"""

import enum
import struct
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np

from holdfast.shm.shared_file import BODY, FIRST_CLAIM, LOADS_IN_ORDER, Address, SharedFile, barrier

Evict = Literal["never", "oldest"]

# The directory's word has six bits for the segment. 16 MiB hold many samples of most kinds.
MOST_SEGMENTS = 64
FEWEST_SEGMENTS = 4
# Milliseconds that a second process waits while the first one cuts the segments. Without the wait, its first record
# would be lost to the store.
_MOMENTS = 20
USUAL_SEGMENT = 16 << 20
# Records a segment ought to hold: then half a record that does not fit at its end is 3 %.
ROOMY = 16
# After so many records in a row without room, the caller need not make any more: that costs more than to ask.
ENOUGH_REFUSED = 64
# Records begin at multiples of this. It is a cache line, and 32 bits count 256 GiB of them in a segment.
UNIT = 64
_OFFSET_BITS, _GENERATION_BITS = 32, 26
_OFFSETS = (1 << _OFFSET_BITS) - 1
_GENERATIONS = (1 << _GENERATION_BITS) - 1
# Head: how many segments (0: not decided yet), and the bytes of each.
_COUNT, _BYTES = 0, 1
_HEAD_WORDS = 8
# Segment words: generation (0: never used), bytes used, when this generation began.
_SEGMENTS_AT = 8 * _HEAD_WORDS
_DIRECTORY_AT = _SEGMENTS_AT + 3 * 8 * MOST_SEGMENTS
_CUT = FIRST_CLAIM
_FIRST_SEGMENT = FIRST_CLAIM + 1
# A record: index, generation, number of parts, all bytes; then the size of each part, then the parts.
_RECORD = struct.Struct("<qQQQ")


class Put(enum.Enum):
    """What became of a record that somebody wanted to store."""

    STORED = 0
    THERE = 1  # another process was faster
    TOO_LARGE = 2  # for any segment
    NO_ROOM = 3  # and nothing may be evicted
    BUSY = 4  # all that have room are being written to


def room_for(length: int, size: int) -> int:
    """Bytes for records in a store of `size` bytes and `length` indices; less than 1 when there is none."""
    return (size - BODY - _data_at(length)) // UNIT * UNIT


def _data_at(length: int) -> int:
    return -(-(_DIRECTORY_AT + 8 * length) // 4096) * 4096


class RecordStore:
    """A store for indices below `length`. `size`: all the memory it ever takes, for seats, directory and records."""

    def __init__(self, length: int, size: int, evict: Evict, *, shared: SharedFile | None = None) -> None:
        self.room = room_for(length, size)
        self.shared = SharedFile("cache", size - BODY) if shared is None else shared
        self.length = length
        self._evict = evict
        body = self.shared.body
        at = _SEGMENTS_AT
        self._head = body[:at].cast("Q")
        self._generations, self._used, self._since = (
            body[at + i * 8 * MOST_SEGMENTS : at + (i + 1) * 8 * MOST_SEGMENTS].cast("Q") for i in range(3)
        )
        self._directory = body[_DIRECTORY_AT : _DIRECTORY_AT + 8 * length].cast("Q")
        self._data = body[_data_at(length) :]
        self._current = -1
        self._most_left = self.room  # in any segment, when this process last looked
        self._refused = 0  # in a row

    @classmethod
    def find(cls, address: Address, length: int, size: int, evict: Evict) -> "RecordStore | None":
        """The store that another process has made; None if it is not there."""
        shared = SharedFile.find(address)
        return None if shared is None else cls(length, size, evict, shared=shared)

    # Reading --------------------------------------------------------------------------------------------------------

    def get(self, index: int) -> list[bytearray] | None:
        """The parts of a record, copied; None when there is none. Which process: any."""
        word = self._directory[index]
        if not word:
            return None
        segment = word >> (_OFFSET_BITS + _GENERATION_BITS)
        generation = self._generations[segment]
        if generation & _GENERATIONS != (word >> _OFFSET_BITS) & _GENERATIONS:
            return None
        if not LOADS_IN_ORDER:
            barrier()
        parts = self._copy(segment, (word & _OFFSETS) * UNIT, index, generation)
        if not LOADS_IN_ORDER:
            barrier()
        return parts if self._generations[segment] == generation else None

    def _copy(self, segment: int, offset: int, index: int, generation: int) -> list[bytearray] | None:
        """The parts that lie there now. A writer may write over them meanwhile: this checks sizes, and not contents."""
        data = self._data
        whole = self._head[_BYTES]
        at = segment * whole + offset
        end = (segment + 1) * whole
        found, born, count, size = _RECORD.unpack_from(data, at)
        if found != index or born != generation or size > end - at or _RECORD.size + 8 * count > size:
            return None
        at += _RECORD.size
        sizes = struct.unpack_from(f"<{count}Q", data, at)
        at += 8 * count
        if sum(sizes) > end - at:
            return None
        parts = []
        for size in sizes:
            parts.append(bytearray(data[at : at + size]))
            at += size
        return parts

    # Writing --------------------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """True if this process knows no room for another record."""
        return self._refused >= ENOUGH_REFUSED

    def put(self, index: int, parts: Sequence[memoryview]) -> Put:
        """Store a record. Which process: any. One thread at a time; others get BUSY."""
        sizes = [part.nbytes for part in parts]
        used = _RECORD.size + 8 * len(sizes) + sum(sizes)
        size = -(-used // UNIT) * UNIT
        if size > self.room:
            return Put.TOO_LARGE
        alone = self.shared.alone
        if not alone.acquire(blocking=False):
            return Put.BUSY
        try:
            if not self._cut(size):
                return Put.BUSY
            if size > self._head[_BYTES]:
                return Put.TOO_LARGE
            if self._holds(index):
                return Put.THERE
            segment, outcome = self._claim_room(size)
            if outcome is Put.STORED:
                try:
                    self._write(segment, index, parts, sizes, used)
                    self._used[segment] += size
                    barrier()
                    self._commit(index, segment, self._used[segment] - size)
                finally:
                    self.shared.release(_FIRST_SEGMENT + segment)
            return outcome
        finally:
            alone.release()

    def _holds(self, index: int) -> bool:
        word = self._directory[index]
        generation = self._generations[word >> (_OFFSET_BITS + _GENERATION_BITS)]
        return bool(word) and generation & _GENERATIONS == (word >> _OFFSET_BITS) & _GENERATIONS

    def _cut(self, size: int) -> bool:
        """Decide on the segments, if nobody has. False if another process does it and takes long."""
        head = self._head
        if head[_COUNT]:
            return True
        if not self.shared.claim(_CUT):
            for _ in range(_MOMENTS):
                time.sleep(0.001)
                if head[_COUNT]:
                    return True
            return False
        try:
            if not head[_COUNT]:
                count = min(self.room // USUAL_SEGMENT, self.room // (ROOMY * size))
                count = min(max(count, FEWEST_SEGMENTS), MOST_SEGMENTS, self.room // size)
                head[_BYTES] = self.room // count // UNIT * UNIT
                barrier()
                head[_COUNT] = count
        finally:
            self.shared.release(_CUT)
        return True

    def _claim_room(self, size: int) -> tuple[int, Put]:
        """Claims a segment with room for it: the one of last time, another one, or the oldest, which it empties."""
        if self._evict == "never" and size > self._most_left:
            self._refused += 1
            return -1, Put.NO_ROOM
        whole, count = self._head[_BYTES], self._head[_COUNT]
        if self._current < 0:
            self._current = max(self.shared.seat, 0) % count  # so that writers rarely want the same one
        busy = False
        left = 0
        for i in range(count):
            segment = (self._current + i) % count
            if self._used[segment] + size <= whole:
                if self._claim(segment):
                    if self._used[segment] + size <= whole:
                        if not self._generations[segment]:
                            self._begin(segment)
                        self._refused = 0
                        return segment, Put.STORED
                    self.shared.release(_FIRST_SEGMENT + segment)  # another process has filled it just now
                else:
                    busy = True
            left = max(left, whole - self._used[segment])
        if self._evict == "oldest":
            return self._claim_oldest(count)
        self._most_left = left
        if busy:
            return -1, Put.BUSY
        self._refused += 1
        return -1, Put.NO_ROOM

    def _claim_oldest(self, count: int) -> tuple[int, Put]:
        for _, segment in sorted((self._since[segment], segment) for segment in range(count)):
            if self._claim(segment):
                self._begin(segment)
                return segment, Put.STORED
        return -1, Put.BUSY

    def _claim(self, segment: int) -> bool:
        if not self.shared.claim(_FIRST_SEGMENT + segment):
            return False
        self._current = segment
        return True

    def _begin(self, segment: int) -> None:
        """Begin a new generation. From here on, nobody finds the records that lie there."""
        self._generations[segment] += 1
        barrier()
        self._used[segment] = 0
        self._since[segment] = time.monotonic_ns()

    def _write(self, segment: int, index: int, parts: Sequence[memoryview], sizes: list[int], used: int) -> None:
        data = self._data
        at = segment * self._head[_BYTES] + self._used[segment]
        head = _RECORD.pack(index, self._generations[segment], len(parts), used)
        for part in (memoryview(head + struct.pack(f"<{len(sizes)}Q", *sizes)), *parts):
            end = at + part.nbytes
            data[at:end] = part
            at = end

    def _commit(self, index: int, segment: int, offset: int) -> None:
        generation = self._generations[segment] & _GENERATIONS
        self._directory[index] = (
            (segment << (_OFFSET_BITS + _GENERATION_BITS)) | (generation << _OFFSET_BITS) | (offset // UNIT)
        )

    # What is in it --------------------------------------------------------------------------------------------------

    def held(self) -> int:
        """How many indices can be found. Looks at the whole directory: 15 ms for a million."""
        words = np.asarray(self._directory)
        words = words[words != 0]
        generations = np.array(self._generations.tolist(), np.uint64) & np.uint64(_GENERATIONS)
        segments = (words >> np.uint64(_OFFSET_BITS + _GENERATION_BITS)).astype(np.int64)
        wanted = (words >> np.uint64(_OFFSET_BITS)) & np.uint64(_GENERATIONS)
        return int((generations[segments] == wanted).sum())

    def used(self) -> int:
        """Bytes of records in all segments."""
        return sum(self._used.tolist())
