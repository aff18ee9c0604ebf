"""map(): calls drawn from iterables, results in their order.

What is drawn is bounded. With `buffersize`, as Python 3.14 has it: never more calls than that, beyond those whose
result was taken. Without it, the standard library draws everything at once. So do we where the length is known, since
the items are in memory anyway; but of a generator never more than AHEAD calls, and more as results are taken. What is
left of it when the pool is shut down, or its `with` block ends, is drawn then: all calls are made, as with the
standard library, whether somebody takes the results or not.
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

# Chunks: several items of a map() as one task, of which each has an outcome of its own.
#
# The worker puts each result into the slot as soon as it is there, behind a table of where it lies. A slot belongs to
# the trainer, so results outlive their worker: when it dies, the trainer takes what is there, the item that was begun
# and has no result is the guilty one, and those that had not begun are sent once more.
#
#     slot: items begun | (where, buffers, spec bytes, retries) per item | results | the table once more
#
# `retries`: below 0, it is a Failure.


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


def left_by(saved: bytes, count: int, position: int = 0) -> tuple[list[ItemOutcome], int]:
    """What a dead worker left of its chunk: outcomes, and how many items it had begun.

    `position`: the item that it was on. Where nothing is left, those before it have begun, too.
    """
    if not count:
        return [], max(1, position + 1)
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


# Calls of a generator that are drawn before any result is taken: some megabytes of futures.
AHEAD = 10_000

_NO_RESULTS = (ItemFailed, Part)
Submit = Callable[..., Future[Any]]


def chunks_of(calls: Iterator[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    while chunk := list(islice(calls, size)):
        yield chunk


class Feed:
    """The calls of one map(). `submit(args, first)` makes one, or a chunk if they have `several` items each.

    Which thread: those of the user.
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
        """Draw what may be drawn."""
        while not self.over and (self._ahead is None or len(self.futures) < self._ahead):
            self.draw()

    def draw(self) -> None:
        """One more, if there is one."""
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
        """Draw all that is left, each when one has ended; nobody may be there to take the results."""
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
        """The result of the first of them; it is taken away when it is there."""
        future = futures[0]
        try:
            result = _outcome(future, timeout) if self._return_exceptions else future.result(timeout)
        finally:
            if future.done():
                futures.popleft()
        self.fill()
        return result

    def results(self, timeout: float | None) -> Iterator[Any]:
        """In order. Whoever stops taking them cancels the rest."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while self.futures or self._outcomes:
                # Nothing is held here of a result while it is looked at.
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
    """Its result or its exception. What is raised meanwhile is neither: a signal handler's, say."""
    try:
        error = future.exception(timeout)
    except CancelledError as cancelled:
        return cancelled
    return error if isinstance(error, Exception) else future.result()


def _cancel(outcomes: Iterable[Any]) -> None:
    """What is not wanted any more, and what was sent once more of it."""
    for part in [outcome for outcome in outcomes if type(outcome) is Part]:
        if not part.future.cancel() and part.several and part.future.done() and not part.future.exception():
            _cancel(part.future.result())


def ahead_of(iterables: tuple[Iterable[Any], ...], buffersize: int | None) -> int | None:
    """How many calls may be drawn; None for all of them."""
    if buffersize is not None:
        return buffersize
    return None if any(isinstance(it, Sized) for it in iterables) else AHEAD


def length_of(iterables: tuple[Iterable[Any], ...]) -> int | None:
    """How many calls there will be; None when nobody says."""
    if not all(isinstance(it, Sized) for it in iterables):
        return None
    return min((len(it) for it in iterables if isinstance(it, Sized)), default=0)
