"""Chunks: several items of a map() as one task, of which each has an outcome of its own.

The worker puts each result into the slot as soon as it is there, behind a table of where it lies. A slot belongs to
the trainer, so results outlive their worker: when it dies, the trainer takes what is there, the item that was begun and
has no result is the guilty one, and those that had not begun are sent once more.

    slot: items begun | (where, buffers, spec bytes, retries) per item | results | the table once more

`retries`: below 0, it is a Failure.
"""

import pickle
import struct
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from holdfast.core.host import JOURNAL_BYTES, JOURNALLED, SLOT, Reply, ReplyKind
from holdfast.pool.call_codec import is_brief
from holdfast.shm.memory import new_file
from holdfast.shm.pack import SMALL, Packer, unpack
from holdfast.shm.slot_writer import FileSpace, Full, SlotSpace

# The position of a chunk of which no item has begun: its letter is being opened.
UNOPENED = -1
_BEGUN = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQQq")


class Results:
    """What a worker has of its chunk. Which process: the worker."""

    def __init__(self, packer: Packer, space: SlotSpace, words: Any, items: int) -> None:
        self._packer = packer
        self._slot = space
        self._space: SlotSpace | FileSpace = space
        self._words = words
        self._file = -1
        self._end = _BEGUN.size  # of the table
        words[JOURNALLED] = 0
        words[SLOT] = space.slot
        space.room(_BEGUN.size + _ENTRY.size * items)
        words[JOURNAL_BYTES] = space.end

    def begin(self, item: int) -> None:
        """From here on it is not safe to be run by another."""
        _BEGUN.pack_into(self._slot.view, 0, item + 1)

    def add(self, result: object, retries: int) -> None:
        """The next one's. Raises whatever pickling it raises."""
        if is_brief(result):
            raw = pickle.dumps(result, 5)
            where, buffers, size = self._put(raw), 0, len(raw)
        else:
            where, buffers, size = self._pack(result)
        _ENTRY.pack_into(self._slot.view, self._end, where, buffers, size, retries)
        self._end += _ENTRY.size
        if self._file < 0:
            words = self._words
            words[JOURNAL_BYTES] = self._slot.end
            words[JOURNALLED] += 1  # last of all: now it is there

    def _put(self, raw: bytes) -> int:
        try:
            return self._space.put(memoryview(raw))
        except Full:
            return self._move().put(memoryview(raw))

    def _pack(self, result: object) -> tuple[int, int, int]:
        try:
            return self._packer.pack(result, self._space)
        except Full:
            return self._packer.pack(result, self._move())

    def _move(self) -> FileSpace:
        """To a file: the slot is full. What is there lies at the same place in it."""
        self._file = new_file("result", 0)
        space = self._space = FileSpace(self._file)
        space.put(self._slot.view[: self._words[JOURNAL_BYTES]])
        return space

    def reply(self) -> Reply:
        """All are there."""
        table = bytes(self._slot.view[_BEGUN.size : self._end])
        where = self._put(table)
        kind = ReplyKind.BATCH if self._file < 0 else ReplyKind.BATCH_IN_FILE
        return Reply(kind, where, 0, len(table), 0, self._file)


class ItemOutcome(NamedTuple):
    """Of one item: `content` is its result or a Failure; or reading it raised `error`."""

    content: Any
    retries: int
    error: BaseException | None = None


def unfold(
    view: memoryview,
    where: int,
    buffers: int,
    table_bytes: int,
    lend: Callable[[], memoryview | None],
    small: int = SMALL,
) -> list[ItemOutcome]:
    """As shm.pack.unpack, for a chunk. Which process: the trainer."""
    lent: list[memoryview | None] = []

    def once() -> memoryview | None:
        if not lent:
            lent.append(lend())
        return lent[0]

    outcomes = []
    for at, count, spec_bytes, retries in _ENTRY.iter_unpack(view[where : where + table_bytes]):
        try:
            if count:
                content = unpack(view, at, count, spec_bytes, once, small)
            else:
                content = pickle.loads(view[at : at + spec_bytes])
            outcomes.append(ItemOutcome(content, retries))
        except BaseException as error:  # user code: __setstate__
            outcomes.append(ItemOutcome(None, 0, error))
    return outcomes


def left_by(saved: bytes, count: int) -> tuple[list[ItemOutcome], int]:
    """What a dead worker left of its chunk: outcomes, and how many items it had begun."""
    if not count:
        return [], 1
    outcomes = unfold(memoryview(saved), _BEGUN.size, 0, count * _ENTRY.size, lambda: None)
    return outcomes, _BEGUN.unpack_from(saved)[0]


# What a chunk's future gives: a list of results, in which these stand where there is none (yet).


class ItemFailed(NamedTuple):
    """This item has an exception."""

    error: BaseException


class Part(NamedTuple):
    """These items were sent once more. `several`: its future gives a list as this one."""

    future: Future[Any]
    several: bool
