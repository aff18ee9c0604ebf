"""One call on its way: what to run, under which limits, and the future that waits for it.

Made by whoever submits; from then on the dispatcher's thread owns it, and the user only its future.
"""

import os
from _thread import RLock, allocate_lock
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, PENDING, RUNNING
from contextlib import suppress
from typing import Any

from holdfast.errors import WrongProcess
from holdfast.pool.call_codec import Letter
from holdfast.pool.progress import Tracker
from holdfast.shm import forks


class FutureLock(RLock):  # type: ignore[misc]  # typeshed has it final, which it is not
    """What a future does under its lock is done whole; and who waits for it is woken.

    A signal handler may raise at the start of any Python function, and threading.Condition has such between its lock
    and the `with`: the lock would stay taken for ever, and the pool's thread would wait for it. Here both are C.
    """

    def __init__(self) -> None:
        self.bells: list[Any] = []

    def notify_all(self) -> None:
        """The future is settled. In whatever thread, under the lock."""
        while self.bells:
            self.bells.pop().release()


class InheritedLock:
    """In a forked child, in the place of all locks of futures: those of the parent's may be held there by a thread that
    there is not here, and nobody here will ever settle one.
    """

    def __get__(self, future: "PoolFuture", kind: type | None = None) -> Any:
        owner, here = future._owner, os.getpid()
        if owner not in (0, here):
            if future._state in (PENDING, RUNNING):
                raise forks.wrong_process("future", owner, "ask for the result where the task was submitted")
            if future._state == CANCELLED:
                future._state = CANCELLED_AND_NOTIFIED
            future._owner = here
            self.__set__(future, FutureLock())
        return vars(future)["_condition"]

    def __set__(self, future: "PoolFuture", lock: Any) -> None:
        vars(future)["_condition"] = lock


class PoolFuture(Future[Any]):
    """A future that can be cancelled while its task runs: the worker is killed, and another takes its place."""

    def __init__(self) -> None:
        self._owner = 0
        super().__init__()
        self._condition: Any = FutureLock()
        self._withdraw: Callable[[int], None] | None = None
        self._number = 0

    def on_cancel(self, withdraw: Callable[[int], None], number: int, owner: int) -> None:
        """`withdraw(number)` is called, in the thread that cancels, when a running task is not wanted any more.

        `owner`: the process whose pool settles this.
        """
        self._withdraw = withdraw
        self._number = number
        self._owner = owner

    def result(self, timeout: float | None = None) -> Any:
        if self._state != FINISHED:
            self._wait(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if self._state != FINISHED:
            self._wait(timeout)
        return super().exception()

    def _wait(self, timeout: float | None) -> None:
        """Until it is settled. No lock is held meanwhile: what a signal handler raises leaves none taken."""
        bells, bell = self._condition.bells, allocate_lock()
        bell.acquire()
        bells.append(bell)  # before the look at the state: who settles it comes after this, or was seen
        try:
            if self._state in (PENDING, RUNNING) and not bell.acquire(timeout=_patience(timeout)):
                raise TimeoutError
        finally:
            with suppress(ValueError):
                bells.remove(bell)

    def cancel(self) -> bool:
        if self._owner not in (0, os.getpid()):
            return False  # a forked child
        with self._condition:
            withdraw = self._withdraw if self._state == RUNNING else None
            self._withdraw = None if withdraw is not None else self._withdraw
            if withdraw is not None:
                # As `set_running_or_notify_cancel` does it for one that has not begun.
                self._state = CANCELLED_AND_NOTIFIED
                for waiter in self._waiters:
                    waiter.add_cancelled(self)
                self._condition.notify_all()
            elif self._state in (RUNNING, FINISHED):
                return False
        if withdraw is None:
            return super().cancel()
        withdraw(self._number)
        self._invoke_callbacks()  # type: ignore[attr-defined]
        return True

    def __repr__(self) -> str:
        try:
            return super().__repr__()
        except WrongProcess:
            return f"<PoolFuture of process {self._owner}>"

    def settle(self, result: Any, error: BaseException | None) -> bool:
        """The outcome; False when it was cancelled meanwhile, and nobody wants it."""
        with self._condition:
            if self._state in (CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED):
                return False
            # Callbacks must not run under the lock; RUNNING is left by nobody but `cancel`, which waits for it.
            self._withdraw = None
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(result)
        return True


def _patience(timeout: float | None) -> float:
    """As a lock takes it."""
    return -1 if timeout is None else max(0.0, timeout)


def close_futures_in_child() -> None:
    """In a forked child, before anything else runs there."""
    PoolFuture._condition = InheritedLock()


class Call:
    """`number`: of all calls of this pool, from 0 on. `lives`: how often it may be begun.

    `items`: how many items of a map it has, of which `first` is the first; 0 for a single call. `args`: nothing, where
    `letter` was cut from another one.
    """

    __slots__ = (
        "args",
        "first",
        "fn",
        "future",
        "items",
        "kwargs",
        "letter",
        "lives",
        "memory",
        "number",
        "said",
        "timeout_s",
        "tracker",
    )

    def __init__(
        self,
        number: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        lives: int,
        timeout_s: float | None = None,
        memory: int = 0,
        name: str | None = None,
        items: int = 0,
        first: int = 0,
        tracker: Tracker | None = None,
    ) -> None:
        self.number = number
        self.fn = fn
        self.args = args
        self.kwargs = kwargs
        self.said = name
        self.lives = lives
        self.timeout_s = timeout_s
        self.memory = memory
        self.items = items
        self.first = first
        self.tracker = tracker
        self.future = PoolFuture()
        self.letter: Letter | None = None

    @property
    def name(self) -> str:
        """What people are told of it."""
        return self.said or name_of(self.fn)

    def part(self, number: int, begin: int, end: int) -> "Call":
        """Some items of a chunk, as a chunk."""
        args = (self.args[0][begin:end],) if self.args else ()
        return self._like(number, args, self.said, self.lives, end - begin, self.first + begin)

    def alone(self, number: int, item: int, tried: int = 0) -> "Call":
        """One item of a chunk, as a call; `tried`: it has been begun that often."""
        name = f"{self.name}, item {self.first + item}" + (", again" if tried else "")
        args = self.args[0][item] if self.args else ()
        return self._like(number, args, name, self.lives - tried, 0, self.first + item)

    def _like(self, number: int, args: tuple[Any, ...], name: str | None, lives: int, items: int, first: int) -> "Call":
        return Call(
            number,
            self.fn,
            args,
            {},
            lives=lives,
            timeout_s=self.timeout_s,
            memory=self.memory,
            name=name,
            items=items,
            first=first,
            tracker=self.tracker,
        )

    def cut_from(self, chunk: "Call") -> "Call":
        """A part of this chunk: its items are those that were packed, whatever the caller has made of them since."""
        assert chunk.letter is not None
        self.letter = chunk.letter.cut(self.first - chunk.first, self.items, self.lives)
        self.args = ()
        return self

    def close(self) -> None:
        """It is done with, one way or another: let go of what it holds."""
        if self.letter is not None:
            self.letter.close()
            self.letter = None
        self.fn, self.args, self.kwargs = _nothing, (), {}


def _nothing() -> None:
    """Stands where a function was."""


def name_of(fn: object) -> str:
    """A function as people call it: the name of what a partial calls, of a method with its class."""
    inner = getattr(fn, "func", fn)
    return str(getattr(inner, "__qualname__", None) or type(inner).__qualname__)
