"""FileCache: open files kept for the next time, a bounded number, never shared across a fork.

    files = FileCache(64, opener=h5py.File, mode="r")
    files[path]["images"][index]

Each thread of each process has a *shelf* of its own, of `size` handles: a handle has a position and is used by one
thread at a time, and nobody closes it while another thread reads. The least recently used one is closed when one more
is opened. So a handle is to be used at once and asked for again the next time, not kept.

After a fork the child finds the parent's handles on the shelf. It never uses them: two processes would move one
position. What is known to be open for reading only (Python's files, zip archives, HDF5) is closed, which in the child
closes a copy of the descriptor and writes nothing. HDF5 must be: it would not open a file again that it knows to be
open, and would read with the parent's descriptor. (It also takes back its advisory lock of that file.) All others are
*parked*, kept for ever without being looked at: to close or to collect them might write the parent's unwritten bytes a
second time. That costs the child their descriptors, `size` at most per thread of the parent.
"""

import ctypes
import errno
import io
import os
import stat
import tarfile
import threading
import weakref
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import chain, islice
from pathlib import Path
from types import MemberDescriptorType, ModuleType
from typing import Any

from holdfast.remote_exception import shown
from holdfast.shm.shared_file import Address, SharedFile
from holdfast.system.signal_origin import raised_by_handler

HITS, MISSES, EVICTED = range(3)
_COUNTED = ("hits", "misses", "evicted")
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


# Where `shared_positions` looks: so many levels deep; at each, at so many items of a list or dict; and at so many parts
# in all, or attributes of one object. Ordinary datasets take 0.01 to 0.2 ms, and any at most 1 ms.
_ITEMS, _MOST, _ATTRIBUTES = (64, 64, 16, 8, 8, 8), 1000, 64
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, bytearray))


class _Shelf:
    """One thread's handles, the least recently used first."""

    __slots__ = ("handles", "pid")

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.handles: OrderedDict[tuple[Hashable, ...], Any] = OrderedDict()


class FileCache:
    """Open handles by path, at most `size` in each thread.

    size: how many handles stay open.
    opener: `open`, `h5py.File`, `zipfile.ZipFile`, `PIL.Image.open`: anything that takes a path first and returns
        something with `close()`.
    arguments: given to the opener after the path, each time.

    A file that is replaced on disk is not noticed: the handle goes on showing the old one, until it is evicted or
    `forget` is called. A handle comes as it was left: seek before reading. One that the user closed is opened anew.
    """

    def __init__(self, size: int, /, *arguments: Any, opener: Callable[..., Any] = open, **options: Any) -> None:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"FileCache({size!r}): size must be a whole number, 1 or more")
        self._size = size
        self._opener = opener
        self._arguments = arguments
        self._options = options
        self._make(SharedFile("files", 0))

    def _make(self, shared: SharedFile) -> None:
        self._shared = shared
        self._shelves: dict[int, _Shelf] = {}
        weakref.finalize(self, _leave, self._shelves)

    # Use ------------------------------------------------------------------------------------------------------------

    def __getitem__(self, path: Any) -> Any:
        """The open handle of this path."""
        return self.open(path)

    def open(self, path: Any, *arguments: Any, **options: Any) -> Any:
        """The same with arguments for the opener, behind and above those of the cache. They are part of the key."""
        shelf = self._shelf()
        key = (_plain(path), arguments, tuple(sorted(options.items())))
        handle = shelf.handles.get(key)
        if handle is not None and not _is_closed(handle):
            shelf.handles.move_to_end(key)
            self._shared.count(HITS)
            return handle
        self._shared.count(MISSES)
        shelf.handles.pop(key, None)
        self._evict(shelf, self._size - 1)
        handle = self._opened(shelf, path, arguments, options)
        shelf.handles[key] = handle
        self._note()
        return handle

    def _opened(self, shelf: _Shelf, path: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        arguments, options = self._arguments + arguments, self._options | options
        try:
            return self._opener(path, *arguments, **options)
        except OSError as error:
            if error.errno not in _OUT_OF_DESCRIPTORS or not shelf.handles:
                raise
        self._evict(shelf, len(shelf.handles) // 2)
        return self._opener(path, *arguments, **options)

    def _evict(self, shelf: _Shelf, keep: int) -> None:
        """Close the least recently used down to so many. What `close` raises is the user's to see: unwritten bytes."""
        while len(shelf.handles) > keep:
            _, handle = shelf.handles.popitem(last=False)
            self._shared.count(EVICTED)
            self._note()
            _close(handle)

    def forget(self, path: Any) -> None:
        """Close what this thread has open of this path, under whatever arguments."""
        shelf = self._shelf()
        for key in [key for key in shelf.handles if key[0] == _plain(path)]:
            _close(shelf.handles.pop(key))
        self._note()

    def close(self) -> None:
        """Close all handles of this process, also those of its other threads. It can be used again afterwards."""
        self._shelf()
        for shelf in list(self._shelves.values()):
            while shelf.handles:
                _close(shelf.handles.popitem()[1])
        self._note()

    def figures(self) -> dict[str, int | float]:
        """hits, misses, evicted and hit_rate over all processes so far, and handles open now in the living ones."""
        figures: dict[str, int | float] = {name: self._shared.total(i) for i, name in enumerate(_COUNTED)}
        asked = figures["hits"] + figures["misses"]
        figures["hit_rate"] = figures["hits"] / asked if asked else 0.0
        figures["open"] = self._shared.now()
        return figures

    # Shelves --------------------------------------------------------------------------------------------------------

    def _shelf(self) -> _Shelf:
        shelf = self._shelves.get(threading.get_ident())
        return shelf if shelf is not None and shelf.pid == os.getpid() else self._new_shelf()

    def _new_shelf(self) -> _Shelf:
        pid, thread = os.getpid(), threading.get_ident()
        threading.current_thread()  # now it is among the living below, whoever started it
        living = {each.ident for each in threading.enumerate()}
        for owner, shelf in list(self._shelves.items()):
            if shelf.pid != pid:
                # Another thread of the parent may have been in the middle of a read, and hold the handle's lock.
                _put_aside(shelf, close=owner == thread)
                self._shelves.pop(owner, None)
            elif owner not in living:
                self._shelves.pop(owner, None)
                _close_all(shelf)
        shelf = self._shelves[thread] = _Shelf(pid)
        return shelf

    def _note(self) -> None:
        pid = os.getpid()
        shelves = list(self._shelves.values())
        self._shared.note(sum(len(shelf.handles) for shelf in shelves if shelf.pid == pid))

    # Other processes ------------------------------------------------------------------------------------------------

    def __getstate__(self) -> tuple[Any, ...]:
        """The settings and where to count; no handles."""
        return self._size, self._opener, self._arguments, self._options, self._shared.address

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        address: Address
        self._size, self._opener, self._arguments, self._options, address = state
        self._make(SharedFile.find(address) or SharedFile("files", 0))


def _plain(path: Any) -> Any:
    """A `Path` is the file that its text names."""
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _is_closed(handle: Any) -> bool:
    """By its user. (`closed`: Python's files; an archive has lost its file; what h5py opened has an id no more.)"""
    if isinstance(handle, zipfile.ZipFile):
        return handle.fp is None
    if getattr(handle, "closed", False) is True:
        return True
    return getattr(getattr(handle, "id", None), "valid", 1) == 0


def _close(handle: Any) -> None:
    close = getattr(handle, "close", None)
    if callable(close):
        close()


def _close_all(shelf: _Shelf) -> None:
    while shelf.handles:
        _close(shelf.handles.popitem()[1])


def _put_aside(shelf: _Shelf, *, close: bool) -> None:
    """In a forked child: handles of the parent."""
    for handle in shelf.handles.values():
        if close and _only_reads(handle):
            _close(handle)
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(handle))  # parked: nothing will ever collect it


def _only_reads(handle: Any) -> bool:
    """Closing it can write nothing."""
    if isinstance(handle, zipfile.ZipFile):
        return handle.mode == "r"
    if hasattr(getattr(handle, "id", None), "valid"):  # h5py's
        return getattr(handle, "mode", "") == "r"
    return isinstance(handle, io.IOBase) and not handle.closed and not handle.writable()


def _leave(shelves: dict[int, _Shelf]) -> None:
    """The cache is gone, or the interpreter ends."""
    for shelf in shelves.values():
        if shelf.pid == os.getpid():
            _close_all(shelf)
        else:
            _put_aside(shelf, close=False)


# Files that forked workers would share: what a dataset holds open, and reads at the position of its descriptor.
#
# Not looked at: what is mapped (np.memmap, mmap); libraries that read by `pread` (HDF5, LMDB), which are no files of
# Python's; handles of a FileCache, which no child uses.


def shared_positions(dataset: Any) -> list[tuple[str, str]]:
    """Regular files that the dataset holds open for reading: where ("dataset.file"), and the path. A bounded search."""
    found: list[tuple[str, str]] = []
    try:
        for where, part in _parts_of(dataset):
            path = _read_at_position(part)
            if path:
                found.append((_spelt(where), path))
        maps = Path("/proc/self/maps").read_text() if found else ""
    except Exception as error:  # user code: `readable` or `fileno` of a file; or another thread changes a dict
        if raised_by_handler(error):
            raise
        maps = ""
    return [(where, path) for where, path in found if f" {path}\n" not in maps]


# How to get to a part: from its owner, by an attribute (a str) or an item (a list of its key).
_Way = tuple[Any, str | list[Any]] | None


def _parts_of(dataset: Any) -> Iterator[tuple[_Way, Any]]:
    """What it holds, the nearest first; each thing once."""
    seen, looked_at = {id(dataset)}, 0
    level: list[tuple[_Way, Any]] = [(None, dataset)]
    for width in _ITEMS:
        below: list[tuple[_Way, Any]] = []
        for owner, value in level:
            for step, part in _held_by(value, width):
                looked_at += 1
                if looked_at > _MOST:
                    return
                if type(part) not in _PLAIN and id(part) not in seen:
                    seen.add(id(part))
                    below.append(((owner, step), part))
                    yield below[-1]
        level = below


def _held_by(value: Any, width: int) -> Iterator[tuple[str | list[Any], Any]]:
    """Attributes and items, without a call of user code."""
    kind = type(value)
    if issubclass(kind, type | ModuleType | io.IOBase | zipfile.ZipFile | tarfile.TarFile | FileCache):
        return
    if issubclass(kind, list | tuple):
        items: Any = list if issubclass(kind, list) else tuple
        yield from (([place], part) for place, part in enumerate(islice(items.__iter__(value), width)))
    elif issubclass(kind, dict):
        yield from (([key], part) for key, part in islice(dict.items(value), width))
    try:
        known = object.__getattribute__(value, "__dict__")
    except AttributeError:
        known = {}
    yield from islice(known.items() if type(known) is dict else (), _ATTRIBUTES)
    slotted = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    for name, slot in chain.from_iterable(names.items() for names in slotted):
        if type(slot) is MemberDescriptorType:
            try:
                yield name, slot.__get__(value)
            except AttributeError:
                continue  # it is not set


def _spelt(way: _Way) -> str:
    if way is None:
        return "dataset"
    owner, step = way
    return f"{_spelt(owner)}.{step}" if isinstance(step, str) else f"{_spelt(owner)}[{shown(step[0])}]"


def _read_at_position(handle: Any) -> str:
    """The path of the file that it reads; "" if it is none, or closed, or only written."""
    kind = type(handle)
    if issubclass(kind, zipfile.ZipFile):
        handle = handle.fp
    elif issubclass(kind, tarfile.TarFile):
        handle = handle.fileobj
    if not issubclass(type(handle), io.IOBase) or handle.closed or not handle.readable():
        return ""
    try:
        number = handle.fileno()
        path = os.readlink(f"/proc/self/fd/{number}")
        regular = stat.S_ISREG(os.fstat(number).st_mode)
    except OSError:  # in memory only
        return ""
    return path if regular and not path.startswith("/memfd:") else ""
