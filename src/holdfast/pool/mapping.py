"""map(): calls drawn from iterables, results in their order.

How many calls are drawn ahead is bounded. With `buffersize` (as in Python 3.14), that is the bound, beyond the results
that the user has taken. Without it, the standard library draws all items at once. So does Holdfast if the length is
known, because the items are in memory anyway. From a generator it draws at most AHEAD calls, and more as results are
taken. When the pool is shut down, or its `with` block ends, it draws the rest: all calls are made, as with the standard
library, even if nobody takes the results.
"""

import pickle
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import CancelledError, Future, wait
from itertools import islice
from typing import Any, NamedTuple

from holdfast.core.host import JOURNAL_BYTES, JOURNALLED, SLOT, Reply, ReplyKind
from holdfast.pool.call_codec import is_brief
from holdfast.pool.progress import Tracker
from holdfast.shm.memory_file import new_file
from holdfast.shm.pack import SMALL, Packer, unpack
from holdfast.shm.slot_writer import FileSpace, Full, SlotSpace

# Chunks: several items of a map() as one task. Each item has an outcome of its own.
#
# The slot begins with a table that says where each result lies. The worker puts each result into the slot as it comes.
# A slot belongs to the trainer, so results outlive their worker. When the worker dies, the trainer takes the results
# that are there. The item that had begun and has no result is the guilty one. The others are sent again.
#
#     slot: items begun | (where, buffers, spec bytes, retries) per item | results | the table once more
#
# `retries`: if it is below 0, the result is a Failure.


# The position while the letter of a chunk is opened: no item has begun.
UNOPENED = -1
_BEGUN = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQQq")


class Results:
    """The chunk that a worker is on. Which process: the worker."""

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
        """The next item begins: from now on it is not safe to run it again."""
        _BEGUN.pack_into(self._slot.view, 0, item + 1)

    def add(self, result: object, retries: int) -> None:
        """Put the result of the next item. Raises whatever pickling it raises."""
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
        """The slot is full: go on in a file. The results so far lie at the same places in it."""
        self._file = new_file("result", 0)
        space = self._space = FileSpace(self._file)
        space.put(self._slot.view[: self._words[JOURNAL_BYTES]])
        return space

    def reply(self) -> Reply:
        """All results are there."""
        table = bytes(self._slot.view[_BEGUN.size : self._end])
        where = self._put(table)
        kind = ReplyKind.BATCH if self._file < 0 else ReplyKind.BATCH_IN_FILE
        return Reply(kind, where, 0, len(table), 0, self._file)


class ItemOutcome(NamedTuple):
    """The outcome of one item. `content`: its result or a Failure. `error`: what reading it raised."""

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
    """Does for a chunk what shm.pack.unpack does for a batch. Which process: the trainer."""
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


def left_by(saved: bytes, count: int, position: int = 0) -> tuple[list[ItemOutcome], int]:
    """What a dead worker left of its chunk: outcomes, and how many items it had begun.

    `position`: the item that it was on. If nothing is left, the items before it had begun too.
    """
    if not count:
        return [], max(1, position + 1)
    outcomes = unfold(memoryview(saved), _BEGUN.size, 0, count * _ENTRY.size, lambda: None)
    return outcomes, _BEGUN.unpack_from(saved)[0]


# A chunk's future gives a list of results. One of these stands in the place of a result that is not there (yet).


class ItemFailed(NamedTuple):
    """This item has raised, or was lost."""

    error: BaseException


class Part(NamedTuple):
    """These items were sent again. `several`: the new future gives a list too."""

    future: Future[Any]
    several: bool


# How many calls are drawn from a generator before any result is taken: some megabytes of futures.
AHEAD = 10_000

_NO_RESULTS = (ItemFailed, Part)
Submit = Callable[..., Future[Any]]


def chunks_of(calls: Iterator[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    while chunk := list(islice(calls, size)):
        yield chunk


class Feed:
    """The calls of one map(). `submit(args, first)` makes one, or a chunk if they have `several` items each.

    Which thread: the user's.
    """

    def __init__(
        self,
        submit: Submit,
        calls: Iterator[Any],
        ahead: int | None,
        return_exceptions: bool,
        several: bool,
        tracker: Tracker | None,
    ) -> None:
        self._return_exceptions = return_exceptions
        self._several = several
        self._tracker = tracker
        self._drawn = 0
        self._outcomes: list[Any] = []  # of a chunk, the next one last
        self._submit = submit
        self._calls = calls
        self._ahead = ahead
        self.over = False
        self.futures: deque[Future[Any]] = deque()

    def fill(self) -> None:
        """Draw as many calls as may be drawn now."""
        while not self.over and (self._ahead is None or len(self.futures) < self._ahead):
            self.draw()

    def draw(self) -> None:
        """Draw one more call, if there is one."""
        try:
            call = next(self._calls)
        except StopIteration:
            self.over = True
            if self._tracker is not None:
                self._tracker.total = self._drawn
            return
        first = self._drawn
        self._drawn += len(call) if self._several else 1
        self.futures.append(self._submit(call, first))

    def drain(self) -> None:
        """Draw the rest, one call each time another has ended. Perhaps nobody takes the results."""
        behind = 0
        while not self.over:
            if behind < len(self.futures):
                wait([self.futures[behind]])
                behind += 1
            self.draw()

    def _take(self, timeout: float | None) -> Any:
        """The next result."""
        if not self._several:
            return self._settled(self.futures, timeout)
        outcomes = self._outcomes
        while not outcomes:
            outcomes += reversed(self._settled(self.futures, timeout))
        while type(outcomes[-1]) is Part:
            part = outcomes[-1]
            futures = deque([part.future])
            try:
                result = self._settled(futures, timeout)
            finally:
                if not futures:
                    outcomes.pop()
            if not part.several:
                return result
            outcomes += reversed(result)
        outcome = outcomes.pop()
        if type(outcome) is ItemFailed:
            if not self._return_exceptions or not isinstance(outcome.error, Exception):
                raise outcome.error
            return outcome.error
        return outcome

    def _settled(self, futures: deque[Future[Any]], timeout: float | None) -> Any:
        """The result of the first call. When it is there, the call is removed."""
        future = futures[0]
        try:
            result = _outcome(future, timeout) if self._return_exceptions else future.result(timeout)
        finally:
            if future.done():
                futures.popleft()
        self.fill()
        return result

    def results(self, timeout: float | None) -> Iterator[Any]:
        """The results, in order. If the user stops taking them, the rest is cancelled."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while self.futures or self._outcomes:
                # While the user has a result, nothing here holds on to it.
                yield self._take(None if deadline is None else deadline - time.monotonic())
                while self._outcomes and type(self._outcomes[-1]) not in _NO_RESULTS:
                    yield self._outcomes.pop()
        finally:
            self.over = True
            _cancel(self._outcomes)
            while self.futures:
                _cancel([Part(self.futures.popleft(), self._several)])
            if self._tracker is not None:
                self._tracker.finish()


def _outcome(future: Future[Any], timeout: float | None) -> Any:
    """Its result, or its exception. Raises what something else raises meanwhile, a signal handler for example."""
    try:
        error = future.exception(timeout)
    except CancelledError as cancelled:
        return cancelled
    return error if isinstance(error, Exception) else future.result()


def _cancel(outcomes: Iterable[Any]) -> None:
    """Cancel these calls, and those that were sent again for items of theirs."""
    for part in [outcome for outcome in outcomes if type(outcome) is Part]:
        if not part.future.cancel() and part.several and part.future.done() and not part.future.exception():
            _cancel(part.future.result())


def ahead_of(iterables: tuple[Iterable[Any], ...], buffersize: int | None) -> int | None:
    """How many calls may be drawn; None for all of them."""
    if buffersize is not None:
        return buffersize
    return None if any(isinstance(it, Sized) for it in iterables) else AHEAD


def length_of(iterables: tuple[Iterable[Any], ...]) -> int | None:
    """How many calls there will be; None if that is not known."""
    if not all(isinstance(it, Sized) for it in iterables):
        return None
    return min((len(it) for it in iterables if isinstance(it, Sized)), default=0)
