"""A signal that comes at one exact moment of a call: the n-th bytecode that is executed in it.

The signal becomes pending there, and nothing more: the interpreter itself runs the handler, where it next looks for
signals. (A trace function counts. It makes the signal pending by letting go of an object, which needs no call, so it
does not look for signals itself; and tracing has ended by then.)
"""

import ctypes
import os
import signal
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

_trip = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyErr_SetInterrupt", ctypes.pythonapi))  # as if SIGINT had come
# A process that is forked meanwhile is not interrupted.
os.register_at_fork(after_in_child=lambda: sys.settrace(None))


class Alarm(Exception):
    """What a handler raises for whom `except Exception` is a trap."""


class _Token:
    """Its end makes the signal pending."""


class Interrupt:
    """`at`: the number of the bytecode, from 1; 0 counts them only. `seen`: how many there were so far."""

    def __init__(self, at: int) -> None:
        self.seen = 0
        self._at = at
        self._token: _Token | None = None
        self._ref: weakref.ref[_Token] | None = None

    def __enter__(self) -> "Interrupt":
        self._token = _Token()
        self._ref = weakref.ref(self._token, _trip)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        self._ref = None  # it came, or there was no such bytecode

    def _trace(self, frame, event, arg):
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_code is not Interrupt.__exit__.__code__:
            self.seen += 1
            if self.seen == self._at:
                sys.settrace(None)
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
