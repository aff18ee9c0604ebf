"""SharedFile: memory that many processes see. A process can claim a part of it for itself.

Forked children inherit the memory file (see memory_file.py); a pickled *address* leads other processes to it. A process
claims a part before it writes there. The kernel grants or refuses a claim at once, so no process waits. A claim is a
record lock on one byte number, of the kind that belongs to an open file and not to a process (F_OFD_SETLK). The kernel
releases it when the process ends, in whatever way. Two copies in one process exclude each other. With the older kind of
lock, closing any other descriptor of the file would drop the claim; with this kind it does not. The price is that a
forked child holds the same open file, and so its parent's claims. So a child first opens the file again, under the same
descriptor number.

Each process claims a *seat* for its life: a line of counters that it alone writes. So sums over all processes are right
without atomic operations. The counts of a dead process stay, and the next process on its seat adds to them.

Memory order. A number here is an aligned 8-byte word, written and read as one. On x86 the processor keeps stores in
order, and loads too, so plain Python stores need no barrier. But large copies do, because libc writes them past the
cache. `barrier()` is a full barrier on every machine: the system call `membarrier`, 2 us. Writers always call it.
Readers call it on processors that reorder loads (arm64). On a machine that is not x86 and refuses the call, nobody can
make a `SharedFile`. (We have tried x86 only.)
"""

import ctypes
import errno
import fcntl
import itertools
import os
import platform
import secrets
import struct
import threading
import weakref
from typing import NamedTuple

from holdfast.shm.memory_file import Memory, new_file

# How many processes have counters in the file. The counts of any further process stay in that process.
SEATS = 256
# Two cache lines each, so that neighbours do not slow each other down.
SEAT_WORDS = 16
_SEAT_BYTES = 8 * SEAT_WORDS
# The last word is not a count but a present figure: it ends with its process.
_NOW = SEAT_WORDS - 1
# The token, in a page of its own, then the seats.
_TOKEN_BYTES = 16
_SEATS_AT = 4096
BODY = _SEATS_AT + SEATS * _SEAT_BYTES
# The first byte number that belongs to no seat: users of this class claim from here on.
FIRST_CLAIM = SEATS
# struct flock of 64-bit Linux: type, whence, start, length, pid (0 is asked for).
_FLOCK = struct.Struct("hhqqi4x")
_NAME = "/memfd:holdfast-"
_MEMBARRIER = {"x86_64": 324, "aarch64": 283, "riscv64": 283}
# A full barrier, in the caller and in processes that have registered for it, which none has. (Linux 4.16)
_GLOBAL_EXPEDITED = 2
# What opening an address raises if its process, or its descriptor there, is not (or no longer) on this machine.
_ELSEWHERE = (errno.ENOENT, errno.ESRCH, errno.ENOTDIR, errno.ENXIO, errno.EINVAL)

_LIBC = ctypes.CDLL(None, use_errno=True)
LOADS_IN_ORDER = platform.machine() == "x86_64"
_CALL = _MEMBARRIER.get(platform.machine(), -1)


def barrier() -> None:
    """What this thread wrote before the call becomes visible before what it writes later. The same for its reads."""
    _LIBC.syscall(_CALL, _GLOBAL_EXPEDITED, 0, 0)


def _check_order() -> None:
    if not LOADS_IN_ORDER and _LIBC.syscall(_CALL, _GLOBAL_EXPEDITED, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"memory cannot be shared safely here: membarrier is refused ({os.strerror(number)})")


class Address(NamedTuple):
    """Where another process finds the file: a descriptor of a living process. The token proves that it is this file."""

    pid: int
    fd: int
    size: int
    token: bytes
    machine: str


class _Place:
    """What each process has for itself. `alone`: a lock for its threads, because they share the process's claims."""

    __slots__ = ("alone", "counters", "pid", "seat", "words")

    def __init__(self, pid: int, seat: int, words: memoryview) -> None:
        self.pid = pid
        self.seat = seat
        self.words = words
        words[_NOW] = 0
        self.alone = threading.Lock()
        # Two threads may count at once. `next` is one step. A word may be behind by one until the next count.
        self.counters = [itertools.count(word + 1) for word in words]


class SharedFile:
    """One shared file. It is closed when this object ends. The file goes with the last process that has it."""

    def __init__(self, name: str, size: int) -> None:
        """A new file, with `size` bytes behind the seats. Which process: the trainer."""
        _check_order()
        fd = new_file(name, BODY + size)
        try:
            memory = Memory(fd, BODY + size)
        except BaseException:
            os.close(fd)
            raise
        token = secrets.token_bytes(_TOKEN_BYTES)
        memory.view[:_TOKEN_BYTES] = token
        self._hold(fd, memory, token)

    @classmethod
    def find(cls, address: Address) -> "SharedFile | None":
        """The file at this address; None if it is not there (another machine, or its process has ended)."""
        path = f"/proc/{address.pid}/fd/{address.fd}"
        try:
            if not os.readlink(path).startswith(_NAME):
                return None
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _ELSEWHERE or address.machine != _machine():
                return None
            raise OSError(
                error.errno,
                f"cannot open the memory that process {address.pid} shares: {error.strerror}; "
                "it must belong to the same user, and /proc must show it",
                path,
            ) from None
        try:
            memory = Memory(fd, address.size) if os.fstat(fd).st_size == address.size else None
        except BaseException:
            os.close(fd)
            raise
        if memory is None or memory.view[:_TOKEN_BYTES] != address.token:
            os.close(fd)
            return None
        found = cls.__new__(cls)
        found._hold(fd, memory, address.token)
        return found

    def _hold(self, fd: int, memory: Memory, token: bytes) -> None:
        self._fd = fd
        self._inode = os.fstat(fd).st_ino
        self._memory = memory
        self._token = token
        self._seats = memory.view[_SEATS_AT:BODY].cast("q")
        self.body = memory.view[BODY:]
        self._settling: dict[int, threading.RLock] = {}  # by process: a forked child must not find it held
        self._can_claim = True
        self._place = self._sit(os.getpid())
        weakref.finalize(self, _close, fd, self._inode).atexit = False

    @property
    def address(self) -> Address:
        """An address. It is valid as long as this process, and this object in it, live."""
        self._mine()
        return Address(os.getpid(), self._fd, self._memory.size, self._token, _machine())

    # A process of its own -------------------------------------------------------------------------------------------

    def _mine(self) -> _Place:
        place = self._place
        return place if place.pid == os.getpid() else self._settle()

    def _settle(self) -> _Place:
        """The first use in a forked child: open the file again, and take a seat."""
        pid = os.getpid()
        with self._settling.setdefault(pid, threading.RLock()):
            if self._place.pid != pid:
                self._can_claim = self._open_again()
                self._place = self._sit(pid)
        return self._place

    def _open_again(self) -> bool:
        """Open the file again: the inherited one has the parent's claims. False if the descriptor is no longer ours."""
        try:
            fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False  # other code closed all descriptors after the fork: what is mapped can still be read
        if os.fstat(fd).st_ino == self._inode:
            os.dup2(fd, self._fd, inheritable=False)
            os.close(fd)
            return True
        os.close(fd)
        return False

    def _sit(self, pid: int) -> _Place:
        for seat in range(SEATS):
            if self._try(seat):
                return _Place(pid, seat, self._seats[seat * SEAT_WORDS : (seat + 1) * SEAT_WORDS])
        return _Place(pid, -1, memoryview(bytearray(_SEAT_BYTES)).cast("q"))

    # Claims ---------------------------------------------------------------------------------------------------------

    def _try(self, number: int) -> bool:
        if not self._can_claim:
            return False
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def claim(self, number: int) -> bool:
        """True if this process has it now, alone, until `release` or its death. Its threads use `alone`."""
        self._mine()
        return self._try(number)

    def release(self, number: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, number, 1, 0))

    @property
    def alone(self) -> threading.Lock:
        """The lock for the threads of this process. Try it, do not wait for it."""
        return self._mine().alone

    @property
    def seat(self) -> int:
        """The seat of this process; -1 if all were taken."""
        return self._mine().seat

    # Counts ---------------------------------------------------------------------------------------------------------

    def count(self, field: int) -> None:
        """Add one to this count, for this process."""
        place = self._mine()
        place.words[field] = next(place.counters[field])

    def note(self, value: int) -> None:
        """Note this process's present figure. The owner of this file says what it counts."""
        self._mine().words[_NOW] = value

    def total(self, field: int) -> int:
        """The sum over all processes, living and dead."""
        place = self._mine()
        apart = 0 if place.seat >= 0 else place.words[field]
        return int(sum(self._seats[field::SEAT_WORDS].tolist()) + apart)

    def now(self) -> int:
        """The sum of the present figures of all living processes."""
        place = self._mine()
        found = int(place.words[_NOW])
        for seat, value in enumerate(self._seats[_NOW::SEAT_WORDS].tolist()):
            if value and seat != place.seat and self._is_taken(seat):
                found += value
        return found

    def _is_taken(self, number: int) -> bool:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        kind: int = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked))[0]
        return kind != fcntl.F_UNLCK


def _close(fd: int, inode: int) -> None:
    try:
        if os.fstat(fd).st_ino == inode:
            os.close(fd)
    except OSError:
        pass  # other code has closed all descriptors


def _machine() -> str:
    """This boot of this machine, and this view of its processes."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()
