"""What a worker is told of a call: a head of a few numbers, and function and arguments, pickled.

A small call travels in a letter box of the worker. A large one (an array among the arguments) gets a memory file of its
own. The trainer writes the file once. The worker maps it privately and does not copy it, so no other task sees what a
task changes in its arguments. The worker opens the file by its path in /proc, so nobody has to send a descriptor.

**Items of a chunk that are sent again** are cut from the letter of the chunk: the same bytes, and the numbers of the
items. So the caller may change its objects meanwhile.

**Functions of `__main__`** travel by name if a worker knows them by that name, as with pickle. Then the task sees the
globals that an initializer has set. If a worker does not know the name (it was defined after the pool had started, in a
notebook, on stdin; it is a lambda or a closure), the function travels by value, with cloudpickle.
"""

import os
import pickle
import struct
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from holdfast.shm.main_module import MainModule
from holdfast.shm.memory_file import Memory, new_file
from holdfast.shm.pack import Packer, unpack
from holdfast.shm.slot_writer import ALIGN, FileSpace

_HEAD = struct.Struct("<14q")
# A larger call gets a file. A smaller one fits into every letter box, and copying it costs less than mapping a file.
INLINE = 256 << 10
_SIMPLE = frozenset((int, float, complex, str, bytes, bool, type(None)))
# The short way looks into containers up to this length.
_SHORT = 8
# `cut` of a letter that is whole.
WHOLE = -1


class Head(NamedTuple):
    """The numbers in front. `size`, `fd`, `inode`: the file of a large call. `pid`: the trainer, which has it open."""

    attempt: int  # from 0 on
    attempts: int
    allowed_ns: int
    memory: int
    items: int  # of a chunk; 0 for a single call
    cut: int  # where in a chunk that was packed before these items begin, or that single call stands; or WHOLE
    by_value: int
    size: int
    fd: int
    inode: int
    pid: int
    where: int
    buffers: int
    spec_bytes: int


class _File:
    """The file of a large letter, and of all letters cut from it. The last of them that is closed closes it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.letters = 1

    def close(self) -> None:
        self.letters -= 1
        if not self.letters:
            os.close(self.fd)


class Letter:
    """A packed call. Which process: the trainer. `close` when no worker will read it any more."""

    def __init__(self, head: Head, content: bytes, file: _File | None = None) -> None:
        self._head = head
        self._numbers = head[1:]
        self._content = content
        self._file = _File(head.fd) if file is None and head.fd >= 0 else file

    def payload(self, attempt: int) -> bytes:
        """The bytes for this attempt."""
        return _HEAD.pack(attempt, *self._numbers) + self._content

    @property
    def large(self) -> bool:
        """True if it has a file of its own."""
        return self._head.fd >= 0

    @property
    def is_cut(self) -> bool:
        return self._head.cut != WHOLE

    def cut(self, begin: int, items: int, attempts: int) -> "Letter":
        """A letter with some of its items: a chunk, or a single call."""
        head, file = self._head, self._file
        if file is not None:
            file.letters += 1
        return Letter(head._replace(attempts=attempts, items=items, cut=max(head.cut, 0) + begin), self._content, file)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def head_of(payload: memoryview) -> Head:
    """Which process: the worker."""
    return Head._make(_HEAD.unpack_from(payload))


def open_letter(head: Head, payload: memoryview) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Function, arguments, keyword arguments: new ones each time. Which process: the worker."""
    spec = (head.where, head.buffers, head.spec_bytes)
    if head.fd < 0:
        call = unpack(payload[_HEAD.size :], *spec, lambda: None)
    else:
        fd = os.open(f"/proc/{head.pid}/fd/{head.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_ino != head.inode:
                raise OSError("the trainer has closed this file meanwhile: the call was cancelled")
            memory = Memory(fd, head.size, private=True)
        finally:
            os.close(fd)
        call = unpack(memory.view, *spec, memory.export)
    fn, args, kwargs = call
    if head.cut != WHOLE:
        items = args[0]
        args = (items[head.cut : head.cut + head.items],) if head.items else items[head.cut]
    return fn, args, kwargs


class Envelope(FileSpace):
    """What pickle writes to: memory at first, and a file once it becomes large."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.content = bytearray()

    @property
    def fd(self) -> int:
        return self._fd

    def put(self, raw: memoryview) -> int:
        start = -(-self.size // ALIGN) * ALIGN
        if self._fd < 0 and start + raw.nbytes <= INLINE:
            self.content += bytes(start - self.size)
            self.content += raw
            self.size = start + raw.nbytes
            return start
        if self._fd < 0:
            self._fd = new_file("task", 0)
            os.pwrite(self._fd, self.content, 0)
            self.content.clear()
        return super().put(raw)

    def begin_again(self) -> None:
        """Drop what was written: nobody wants it."""
        self.size = 0
        self.content.clear()

    def abort(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LetterWriter(Packer):
    """Packs calls. Which process: the trainer, in the dispatcher's thread."""

    def __init__(self, main: MainModule) -> None:
        super().__init__()
        self.main: MainModule = main

    def write(
        self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], limits: tuple[int, int, int, int]
    ) -> Letter:
        """`limits`: attempts, allowed nanoseconds, bytes of memory, items. Raises whatever pickling raises."""
        self._short_way = self._is_short(fn, args, kwargs)
        if self._short_way and fn.__closure__ is None and all(type(arg) in _SIMPLE for arg in args):
            content = _briefly(fn, args)
            if content is not None:
                return Letter(Head(0, *limits, WHOLE, not self.main.all, 0, -1, 0, 0, 0, 0, len(content)), content)
        envelope = self._envelope = Envelope()
        try:
            spec = self.pack((fn, args, kwargs), envelope)
        except BaseException:
            envelope.abort()
            raise
        inode = os.fstat(envelope.fd).st_ino if envelope.fd >= 0 else 0
        file = (envelope.size, envelope.fd, inode, os.getpid())
        return Letter(Head(0, *limits, WHOLE, not self.main.all, *file, *spec), bytes(envelope.content))

    def _is_short(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True for a known function whose arguments cannot hold anything of `__main__`: pickle alone is enough."""
        if kwargs or type(fn) is not FunctionType or not all(map(_is_simple, args)):
            return False
        return fn.__module__ != "__main__" or self.main.knows(fn)

    def _pickle(self, batch: object) -> bytes:
        try:
            spec = self._dump(pickle.Pickler, self._plain, batch)
            if self._short_way or self.main.all or b"__main__" not in spec:
                return spec
        except (pickle.PicklingError, AttributeError, TypeError):
            pass  # a lambda, a closure: by value
        self._envelope.begin_again()
        return self._by_value(batch)


def _briefly(fn: Any, args: tuple[Any, ...]) -> bytes | None:
    """The short way, ten times as fast: a function with a name, numbers and strings. None for any other call."""
    try:
        content = pickle.dumps((fn, args, {}), 5)
    except (pickle.PicklingError, AttributeError):
        return None  # a lambda
    return content if len(content) <= INLINE else None


def is_brief(value: Any) -> bool:
    """True for plain numbers and strings, or a few of them. They hold no large bytes, so nobody looks for those."""
    kind = type(value)
    return kind in _SIMPLE or (
        kind in (tuple, list) and len(value) <= _SHORT and all(type(part) in _SIMPLE for part in value)
    )


def _is_simple(value: Any, depth: int = 2) -> bool:
    kind = type(value)
    if kind in _SIMPLE:
        return True
    if kind is np.ndarray:
        return bool(value.dtype.kind != "O")
    if kind in (tuple, list) and depth and len(value) <= _SHORT:
        return all(_is_simple(part, depth - 1) for part in value)
    return False
