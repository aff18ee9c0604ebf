"""Anonymous memory files, sparse and mapped.

A file of `memfd_create` has no name, so nothing appears in /dev/shm and nothing is left behind. It may be far larger
than the machine's memory, because only pages that were written cost anything. This module maps it through libc:
`mmap.mmap` would keep a descriptor open for each mapping. Here both sides may close it once they have mapped the file.

The mapping lives as long as the `Memory` object, so code that reads it must hold on to that object. It is in no core
dump. If a signal handler raises at the end of that object, the mapping goes at the end of the next one, see `_unmap`.
"""

import atexit
import ctypes
import os
import weakref
from collections import deque
from typing import Any

_PROT_READ_WRITE = 0x3
_MAP_SHARED = 0x01
_MAP_PRIVATE = 0x02
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_REMOVE = 9
# A core dump would read the holes of a sparse file too, and so make gigabytes of pages that nobody has written.
_MADV_DONTDUMP = 16
_PAGE = os.sysconf("SC_PAGE_SIZE")


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


_LIBC = _libc()


def new_file(name: str, size: int) -> int:
    """The descriptor of a new memory file of `size` bytes. It has no pages yet."""
    fd = os.memfd_create(f"holdfast-{name}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


_mapped: dict[weakref.ref["Memory"], tuple[int, int, Any]] = {}  # address, size, and the second weak reference
_ended: deque[weakref.ref["Memory"]] = deque()
# It holds True once the interpreter has begun to exit.
_at_exit: list[bool] = []
atexit.register(_at_exit.append, True)


def _unmap(
    _: object,
    ended: Any = _ended,
    mapped: Any = _mapped,
    munmap: Any = _LIBC.munmap,
    at_exit: Any = _at_exit,
) -> None:
    """A `Memory` has ended. If a signal handler raised just then, `weakref.finalize` would forget it.

    So the first callback is `deque.append`, which runs no signal handlers. It notes the mapping. This is the second
    callback. It makes no other call between the note and the system call. If it is cut short, the next one goes on.
    """
    if at_exit:
        return  # the mappings end with the process: until then a compiled signal handler may write there
    while ended:
        memory = ended[-1]
        del ended[-1]
        address, size, _ = mapped[memory]
        del mapped[memory]
        munmap(address, size)


class Memory:
    """One mapped memory file."""

    def __init__(self, fd: int, size: int, *, private: bool = False) -> None:
        flags = (_MAP_PRIVATE if private else _MAP_SHARED) | _MAP_NORESERVE
        address = _LIBC.mmap(None, size, _PROT_READ_WRITE, flags, fd, 0)
        if address == _MAP_FAILED or address is None:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot map {size} bytes: {os.strerror(number)}")
        _LIBC.madvise(address, size, _MADV_DONTDUMP)
        self.address: int = address
        self.size = size
        self.view = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        second = weakref.ref(self, _unmap)  # callbacks are called from the newest to the oldest
        _mapped[weakref.ref(self, _ended.append)] = address, size, second

    def give_back(self, start: int, end: int) -> None:
        """Return the pages that lie wholly inside [start, end) to the system; they read as zeros again."""
        start = -(-start // _PAGE) * _PAGE
        end = end // _PAGE * _PAGE
        if end > start and not self.view.readonly:
            _LIBC.madvise(self.address + start, end - start, _MADV_REMOVE)

    def close_to_writing(self) -> None:
        """In a forked child. Views that were taken before stay as they are."""
        self.view = self.view.toreadonly()

    def export(self) -> memoryview:
        """The whole memory, for views of the user. The mapping lives as long as any of them."""
        exporter = (ctypes.c_char * self.size).from_address(self.address)
        exporter.memory = self  # type: ignore[attr-defined]
        return memoryview(exporter).cast("B")


# The file of one life: cut into strides, of which each slot and each letter box has one. See slots.py.


# Address space for one life. 64 TiB hold 256 lives; the strides come from it.
ROOM = 256 << 30
SMALLEST_STRIDE = 1 << 20
LARGEST_STRIDE = 8 << 30
# What the state of a slot says.
FREE, CLAIMED = 0, 1


def strides_for(count: int, busy: int) -> int:
    """How many strides the file of a life has."""
    return count + busy + 1


def states_of(memory: Memory, count: int) -> memoryview:
    """The state bytes: at the very end of the file."""
    return memory.view[memory.size - count :]


def stride_for(slots: int) -> int:
    """The largest power of two of which `slots` fit the room."""
    stride = LARGEST_STRIDE
    while stride * slots > ROOM and stride > SMALLEST_STRIDE:
        stride //= 2
    return stride


def slot_view(memory: Memory, stride: int, slot: int) -> tuple[memoryview, int]:
    """One slot's bytes and their address. Which process: any; it owns nothing."""
    start = slot * stride
    return memory.view[start : start + stride], memory.address + start


def sparse_file(slots: int) -> tuple[int, Memory, int]:
    """(descriptor, mapping, stride) of a file with that many slots: as wide as the limits on size allow."""
    stride = stride_for(slots)
    while True:
        try:
            fd = new_file("batches", slots * stride)
        except OSError:
            if stride <= SMALLEST_STRIDE:
                raise
        else:
            try:
                return fd, Memory(fd, slots * stride), stride
            except BaseException as error:
                os.close(fd)
                if stride <= SMALLEST_STRIDE or not isinstance(error, OSError):
                    raise
        stride //= 4
        stride = max(stride, SMALLEST_STRIDE)
