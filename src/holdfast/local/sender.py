"""Who sent a signal: noted by a compiled handler (local/_sender.c) in a page that outlives the process it came to."""

import struct
from dataclasses import dataclass

from holdfast.shm.memory import Memory

try:
    from holdfast.local._sender import install
except ImportError:  # built without a compiler
    install = None  # type: ignore[assignment]

_NOTE = struct.Struct("<6q")  # serial, number, pid, uid, code, bytes of text
_MOST = 80  # letters of a command line that are shown
_FROM_TERMINAL = 0x80  # SI_KERNEL: the kernel, for Ctrl-C


@dataclass(frozen=True, slots=True)
class Sender:
    """`commands`: the sender's command line, its parent's, and so on; with their pids."""

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
        chain = " < ".join(f"{pid} ({_short(command) or 'gone already'})" for pid, command in self.commands)
        return f"pid {chain or self.pid}, uid {self.uid}"


def _short(command: str) -> str:
    return command if len(command) <= _MOST else command[: _MOST - 3] + "..."


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

    def install(self, numbers: tuple[int, ...]) -> None:
        """Which process: the one that gets the signals, after its own handlers are in place."""
        if install is not None:
            install(self._address, self._size, numbers)

    def last(self, number: int) -> Sender | None:
        """Who sent the last signal, if it had this number and was not told before. Which process: the keeper."""
        serial, noted, pid, uid, code, length = _NOTE.unpack_from(self._view)
        if serial == self._read or noted != number:
            return None
        self._read = serial
        text = bytes(self._view[_NOTE.size : _NOTE.size + length]).decode(errors="replace")
        pairs = (line.partition("\t") for line in text.splitlines())
        return Sender(pid, uid, code, tuple((int(who), command.strip()) for who, _, command in pairs if who.isdigit()))
