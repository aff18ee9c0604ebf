"""A signal that comes at one exact moment of a call: the n-th bytecode that is executed in it.

The signal becomes pending there, and nothing more: the interpreter itself runs the handler, where it next looks for
signals. (A trace function counts. It makes the signal pending by letting go of an object, which needs no call, so it
does not look for signals itself; and tracing has ended by then.)

Up to Python 3.12 an exception that comes while logging takes a lock leaves it taken for ever, and a later test of the
same process would hang. So each interruption looks for such locks and frees them. It is a failure where Holdfast has
called logging, and nothing else where the user's code has.
"""

import ctypes
import dis
import logging
import multiprocessing
import os
import signal
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import holdfast

_trip = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyErr_SetInterrupt", ctypes.pythonapi))  # as if SIGINT had come
# A process that is forked meanwhile is not interrupted.
os.register_at_fork(after_in_child=lambda: sys.settrace(None))

PACKAGE = Path(holdfast.__file__).parent
# Logging is called by those who fork, too.
_BETWEEN = (Path(logging.__file__).parent, Path(multiprocessing.__file__).parent)
# How many locks of logging were found taken and freed.
freed = 0


def taken() -> list[Any]:
    """Locks of logging that this thread has: the module's, and those of all handlers."""
    handlers = [logging.lastResort, *(ref() for ref in logging._handlerList)]
    locks = [getattr(logging, "_lock", None), *(getattr(handler, "lock", None) for handler in handlers)]
    return [lock for lock in locks if hasattr(lock, "_is_owned") and lock._is_owned()]


def place_of(frame: FrameType | None) -> tuple[bool, str]:
    """Whether Holdfast is the first behind logging that was running there, and that in words."""
    where = "nowhere"
    if frame is not None:
        name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        bytecode = f"bytecode {frame.f_lasti} ({name}) of {frame.f_code.co_qualname}"
        while frame.f_back is not None and Path(frame.f_code.co_filename).parent in _BETWEEN:
            frame = frame.f_back
        where = f"at {bytecode}, from {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return frame is not None and Path(frame.f_code.co_filename).is_relative_to(PACKAGE), where


def free_locks(before: list[Any], ours: bool, where: str) -> None:
    """Those of logging that were not taken before; if they are our fault this raises, for somebody would hang."""
    global freed
    left = [lock for lock in taken() if lock not in before]
    for lock in left:
        while lock._is_owned():
            lock.release()
    freed += len(left)
    assert not (left and ours), f"a lock of logging is left taken; the signal came {where}"


class Alarm(Exception):
    """What a handler raises for whom `except Exception` is a trap."""


class _Token:
    """Its end makes the signal pending."""


class Interrupt:
    """`at`: the number of the bytecode, from 1; 0 counts them only. `seen`: how many there were so far.

    `file`: only those of its functions.
    """

    def __init__(self, at: int, file: str = "") -> None:
        self.seen = 0
        self._at = at
        self._file = file
        self._process = os.getpid()
        self._token: _Token | None = None
        self._ref: weakref.ref[_Token] | None = None
        self._place = (False, "nowhere")
        self._taken: list[Any] = []

    def __enter__(self) -> "Interrupt":
        self._taken = taken()
        self._token = _Token()
        self._ref = weakref.ref(self._token, _trip)
        sys._getframe().f_trace_opcodes = True  # settrace of Python 3.12 asks whether any frame wants opcodes
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        self._ref = None  # it came, or there was no such bytecode
        free_locks(self._taken, *self._place)

    def _trace(self, frame, event, arg):
        frame.f_trace_opcodes = True
        if self._file and frame.f_code.co_filename != self._file:
            return self._trace
        if event == "opcode" and frame.f_code is not Interrupt.__exit__.__code__:
            self.seen += 1
            # (A process that is forked meanwhile runs what is registered before ours.)
            if self.seen == self._at and os.getpid() == self._process:
                sys.settrace(None)
                self._place = place_of(frame)
                self._token = None
        return self._trace


@contextmanager
def handler_raises(error: type[BaseException]) -> Iterator[None]:
    """Meanwhile the handler of SIGINT raises this."""

    def handler(number, frame):
        raise error(f"signal {number}")

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
