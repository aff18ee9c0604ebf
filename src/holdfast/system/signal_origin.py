"""Who sent a signal, and what a fault was about: noted by a compiled handler (system/_sender.c) in a page that outlives
the process it came to.
"""

import functools
import logging
import os
import signal
import struct
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any

from holdfast.shm.memory_file import Memory
from holdfast.system.procfs import name_of, whole_command
from holdfast.system.redact import mask

try:
    from holdfast.system._sender import install, watch_gil
except ImportError:  # built without a compiler
    install = watch_gil = None  # type: ignore[assignment]

# Programs raise these against themselves; faulthandler catches them. Anybody may send them, too.
CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)

_NOTE = struct.Struct("<7q")  # serial, number, pid, uid, code, bytes of text, address of a fault
_CUT = "\x1e"  # as in system/_sender.c
_SAME = 100  # letters of a command line by which a process is known again
_FROM_TERMINAL = 0x80  # SI_KERNEL: the kernel, for Ctrl-C


@dataclass(frozen=True, slots=True)
class Sender:
    """`commands`: the sender's command line, its parent's, and so on; with their pids. `str()` says what each is."""

    pid: int
    uid: int
    code: int
    commands: tuple[tuple[int, str], ...]

    @property
    def from_kernel(self) -> bool:
        """True for a Ctrl-C in the terminal, and whatever else the kernel itself sends."""
        return self.code == _FROM_TERMINAL

    def __str__(self) -> str:
        if self.from_kernel:
            return "the kernel, for the terminal (Ctrl-C, a closed window)"
        if self.pid == 0:
            return "a process outside this container"
        chain = " < ".join(f"{pid} ({name_of(command) or 'gone already'})" for pid, command in self.commands)
        return f"pid {chain or self.pid}, uid {self.uid}"


@dataclass(frozen=True, slots=True)
class Fault:
    """The mapping that a fault lay in. `at`: the place in its file; `size`: the size of that file, -1 if unknown."""

    path: str
    at: int
    size: int = -1

    @property
    def cut_short(self) -> bool:
        """True when the file ends before the place that was touched."""
        page = os.sysconf("SC_PAGE_SIZE")
        return self.size >= 0 and -(-self.size // page) * page <= self.at


def _whole(pid: int, noted: str) -> str:
    """The command line of one that was noted: the whole of it where it is still there, without secrets.

    Of a long one the handler leaves the middle out. Then the value of an option may stand without its option.
    """
    head, cut, tail = noted.strip().partition(_CUT)
    now = whole_command(pid)
    if now.replace("\0", " ").startswith(head[:_SAME].rstrip(".")):
        return mask(now)
    return mask(head) + (" ... " + mask(" ".join(tail.split()[2:])) if cut else "")


class SenderNote:
    """A piece of shared memory in which senders are noted."""

    def __init__(self, memory: Memory, start: int, size: int) -> None:
        self._view = memory.view[start : start + size]
        self._address = memory.address + start
        self._size = size
        self._read = self._serial

    @property
    def _serial(self) -> int:
        return int(_NOTE.unpack_from(self._view)[0])

    def install(self, numbers: tuple[int, ...], wake: int = -1) -> None:
        """Which process: the one that gets the signals, after its own handlers are in place. `wake`: an eventfd."""
        if install is not None:
            install(self._address, self._size, numbers, wake)

    @property
    def number(self) -> int:
        """The signal that was noted last."""
        return int(_NOTE.unpack_from(self._view)[1])

    def last(self, number: int) -> Sender | None:
        """Who sent the last signal, if it had this number and was not told before. Which process: the keeper."""
        serial, noted, pid, uid, code, length, _ = _NOTE.unpack_from(self._view)
        if serial == self._read or noted != number or (code > 0 and number in CRASH_SIGNALS):
            return None
        self._read = serial
        pairs = (line.partition("\t") for line in self._text(length).split("\n"))
        commands = tuple((int(who), _whole(int(who), command)) for who, _, command in pairs if who.isdigit())
        return Sender(pid, uid, code, commands)

    def fault(self, number: int) -> Fault | None:
        """Which file's mapping the last fault lay in, if it lay in one. Which process: the keeper, after the death."""
        serial, noted, _, _, code, length, address = _NOTE.unpack_from(self._view)
        if serial == self._read or noted != number or code <= 0 or number not in CRASH_SIGNALS:
            return None
        self._read = serial
        words = self._text(length).split(None, 5)  # range, rights, offset, device, inode, path
        if len(words) < 6 or not words[5].startswith("/"):
            return None
        at = address - int(words[0].partition("-")[0], 16) + int(words[2], 16)
        return Fault(words[5], at, _size_of(words[5], int(words[4])))

    def _text(self, length: int) -> str:
        return bytes(self._view[_NOTE.size : _NOTE.size + length]).decode(errors="replace")


def can_note() -> bool:
    """False when built without a compiler: senders stay unknown then."""
    return install is not None


def note_gil(address: int, number: int) -> None:
    """A signal with this number also notes there whether the main thread has the GIL. Which process: the worker."""
    if watch_gil is not None:
        watch_gil(address, number)


def _size_of(path: str, inode: int) -> int:
    """The size of the file that was mapped; -1 if its name is now another file's, or gone."""
    try:
        about = os.stat(path)
    except OSError:
        return -1
    return about.st_size if about.st_ino == inode else -1


# Signal handlers that raise: did one raise this exception, and what does it leave behind?
#
# Between the user's code and us an exception says only what it is, not where it comes from. One that a handler of the
# trainer's raised (an alarm, a scheduler's warning) may come out of any line, and is nobody's mistake there.


log = logging.getLogger("holdfast")


def raised_by_handler(error: BaseException) -> bool:
    """True if a handler that is installed now is among the frames that raised it, or if that is unknown.

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


class LoggingFree:
    """While we log or fork: what logging takes of its locks, and does not give back, is given back at the end.

    Until Python 3.12 a handler that raises while logging takes a lock leaves it taken for ever: the next thread that
    logs would hang, a pool's for example. During a fork logging has its lock, too, and Python only prints what is
    raised there.
    """

    def __init__(self) -> None:
        self._before = [lock for lock in _locks_of_logging() if lock._is_owned()]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        for lock in _locks_of_logging():
            while lock._is_owned() and lock not in self._before:
                lock.release()


def warn(line: str) -> None:
    """One line in the log."""
    with LoggingFree():
        log.warning("%s", line)


def _locks_of_logging() -> list[Any]:
    """Those that it takes for a line of ours: the module's, and one for each handler."""
    handlers: list[Any] = [logging.lastResort]
    logger: logging.Logger | None = log
    while logger is not None:
        handlers += logger.handlers
        logger = logger.parent if logger.propagate else None
    locks = [getattr(logging, "_lock", None), *(getattr(handler, "lock", None) for handler in handlers)]
    return [lock for lock in locks if hasattr(lock, "_is_owned")]
