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
from concurrent.futures import Future, wait
from itertools import islice
from typing import Any

# Calls of a generator that are drawn before any result is taken: some megabytes of futures.
AHEAD = 10_000

Submit = Callable[..., Future[Any]]


def run_chunk(fn: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
    """Several calls as one task. Which process: the worker."""
    return [fn(*args) for args in chunk]


def chunks_of(calls: Iterator[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    while chunk := list(islice(calls, size)):
        yield chunk


class Feed:
    """The calls of one map(). `submit(args)` makes one; which thread: those of the user."""

    def __init__(self, submit: Submit, calls: Iterator[Any], ahead: int | None, return_exceptions: bool) -> None:
        self._return_exceptions = return_exceptions
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
            return
        self.futures.append(self._submit(call))

    def drain(self) -> None:
        """Draw all that is left, each when one has ended; nobody may be there to take the results."""
        behind = 0
        while not self.over:
            if behind < len(self.futures):
                wait([self.futures[behind]])
                behind += 1
            self.draw()

    def _take(self, timeout: float | None) -> Any:
        future = self.futures[0]
        try:
            result = future.result(timeout)
        except Exception as error:
            if not self._return_exceptions or not future.done():
                raise
            result = error
        finally:
            if future.done():
                self.futures.popleft()
        self.fill()
        return result

    def results(self, timeout: float | None) -> Iterator[Any]:
        """In order. Whoever stops taking them cancels the rest."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while self.futures:
                # Nothing is held here of a result while it is looked at.
                yield self._take(None if deadline is None else deadline - time.monotonic())
        finally:
            self.over = True
            while self.futures:
                self.futures.popleft().cancel()


def ahead_of(iterables: tuple[Iterable[Any], ...], buffersize: int | None) -> int | None:
    """How many calls may be drawn; None for all of them."""
    if buffersize is not None:
        return buffersize
    return None if any(isinstance(it, Sized) for it in iterables) else AHEAD
