"""Signal handlers that raise: did one raise this exception, and what does it leave behind?

Between the user's code and us an exception says only what it is, not where it comes from. One that a handler of the
trainer's raised (an alarm, a scheduler's warning) may come out of any line, and is nobody's mistake there.
"""

import functools
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, TracebackType
from typing import Any

log = logging.getLogger("holdfast")


def raised_by_handler(error: BaseException) -> bool:
    """True if a handler that is installed now is among the frames which raised it, or if nobody can tell.

    A handler that the user's code had installed for itself, and has taken away by now, is part of that code.
    """
    if issubclass(type(error), KeyboardInterrupt):
        return True
    codes: list[CodeType] = []
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            code = _code_of(handler)
            if code is None:
                return True
            codes.append(code)
    traceback: TracebackType | None = vars(BaseException)["__traceback__"].__get__(error)  # its class has no say
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return False


def _code_of(handler: object) -> CodeType | None:
    """None where it is not Python's."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    called = vars(type(handler)).get("__call__")
    for function in (handler, getattr(handler, "__func__", None), called):
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None


def warn(line: str) -> None:
    """One line in the log."""
    with locks_given_back():
        log.warning("%s", line)


@contextmanager
def locks_given_back() -> Iterator[None]:
    """Around a line for the log, or a fork: logging takes its lock in a hook there.

    Until Python 3.12 a handler that raises while logging takes a lock leaves it taken for ever: the next thread that
    logs would hang, a pool's for example. So what was taken here and not given back is given back.
    """
    before = [lock for lock in _locks_of_logging() if lock._is_owned()]
    try:
        yield
    finally:
        for lock in _locks_of_logging():
            while lock._is_owned() and lock not in before:
                lock.release()


def _locks_of_logging() -> list[Any]:
    """Those that it takes for a line of ours: the module's, and one for each handler."""
    handlers: list[Any] = [logging.lastResort]
    logger: logging.Logger | None = log
    while logger is not None:
        handlers += logger.handlers
        logger = logger.parent if logger.propagate else None
    locks = [getattr(logging, "_lock", None), *(getattr(handler, "lock", None) for handler in handlers)]
    return [lock for lock in locks if hasattr(lock, "_is_owned")]
