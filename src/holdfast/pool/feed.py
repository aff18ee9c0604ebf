"""map(): calls drawn from iterables, results in their order.

What is drawn is bounded. With `buffersize`, as Python 3.14 has it: never more calls than that, beyond those whose
result was taken. Without it, the standard library draws everything at once. So do we where the length is known, since
the items are in memory anyway; but of a generator never more than AHEAD calls, and more as results are taken. What is
left of it when the pool is shut down, or its `with` block ends, is drawn then: all calls are made, as with the
standard library, whether somebody takes the results or not.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import CancelledError, Future, wait
from itertools import islice
from typing import Any

from holdfast.pool.chunk import ItemFailed, Part
from holdfast.pool.progress import Tracker

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
