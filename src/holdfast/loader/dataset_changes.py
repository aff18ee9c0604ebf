"""DatasetChanges: what epochs have made of a dataset, for a life that was not there: the number of the epoch, say.

A dataset that counts its epochs shuffles by that count, and each worker takes its share of the same order. A new life
that began to count anew would take another order's share: samples would be missing, and others come twice.

At the end of its stream, and with the first batch after one that was left, a worker looks which attributes of the
dataset have changed, and gives them on. Not those that are large, shared with other processes or cannot be pickled: of
them a new life has what every life begins with. Where one of those is seen to have changed, though, the next life goes
through the earlier epochs itself. So as much is looked at as can be: the beginning of what is large, some elements of
large arrays, and what stands beside a lock or an open file.
"""

import copyreg
import hashlib
import io
import pickle
import threading
from collections.abc import Callable
from types import FunctionType, GeneratorType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.shm.pack import bytes_of

# Of one attribute, pickled.
LIMIT = 4 << 20
_ITSELF = "the dataset"
# What cannot be pickled, and does not change by being iterated.
_INERT = FunctionType, ModuleType, type(threading.Lock()), type(threading.RLock())
# So many elements of a large array are looked at, from its beginning to its end.
_LOOKED_AT = 1024


class _Unfit(Exception):
    """This cannot be carried."""


class _Seen(NamedTuple):
    """Of an attribute: how it looks, whether it can be carried, and whether it moves where nobody can look."""

    digest: bytes
    fit: bool
    moves: bool


class _Digest(io.RawIOBase):
    """Where an attribute is pickled to, only to be compared."""

    def __init__(self) -> None:
        self._sum = hashlib.blake2b(digest_size=16)
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._size += size
        if self._size > LIMIT:
            raise _Unfit
        self._sum.update(data)
        return size

    def digest(self) -> bytes:
        return self._sum.digest()


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, dataset: Any) -> None:
        super().__init__(file, 5)
        self._dataset = dataset

    def persistent_id(self, value: Any) -> Any:
        if value is self._dataset:
            return _ITSELF
        if isinstance(value, torch.Tensor | np.ndarray) and (value.nbytes > LIMIT or _is_shared(value)):
            return self.left_out(value)
        return None

    def left_out(self, value: Any) -> Any:
        raise _Unfit


class _Looker(_Pickler):
    """To compare only. What cannot be pickled is left out, with what can be said of it in its place."""

    fit = True  # all of it can be carried
    seen = True  # all that may have changed was looked at, or a good part of it
    moves = False  # it has a place that cannot be looked at

    def left_out(self, value: Any) -> Any:
        self.fit = False
        return "shared" if _is_shared(value) else (str(value.dtype), tuple(value.shape), _some(value))

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType | type):
            return self._name_of(value) if "<" in value.__qualname__ else NotImplemented
        if type(value) in copyreg.dispatch_table:
            return NotImplemented
        try:
            return value.__reduce_ex__(5)
        except Exception:  # it cannot be pickled
            return self._name_of(value)

    def _name_of(self, value: Any) -> Any:
        self.fit = False
        self.seen = self.seen and isinstance(value, _INERT)
        self.moves = self.moves or (isinstance(value, GeneratorType) and value.gi_frame is not None)
        place = isinstance(value, io.IOBase) and _place(value)
        return tuple, ((type(value).__name__, place),)


def _place(file: io.IOBase) -> int:
    """Of one that is written, nobody asks: that may write what it holds back."""
    try:
        return file.tell() if file.readable() and not file.writable() else 0
    except (OSError, ValueError):  # a pipe; one that is read line by line, or closed
        return 0


def _some(value: Any) -> bytes:
    """Of a large array, the bytes of some elements."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.device.type != "cpu":
            return b""
        return bytes(bytes_of(value.flatten()[:: max(1, value.numel() // _LOOKED_AT)].resolve_conj().resolve_neg()))
    return bytes(value.flat[:: max(1, value.size // _LOOKED_AT)].tobytes())


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, dataset: Any) -> None:
        super().__init__(file)
        self._dataset = dataset

    def persistent_load(self, name: Any) -> Any:
        return self._dataset


def _is_shared(value: Any) -> bool:
    """Others may write there, and a copy would not hear of it."""
    if isinstance(value, torch.Tensor):
        return bool(value.is_shared())  # type: ignore[no-untyped-call]
    while isinstance(value.base, np.ndarray):
        value = value.base
    return not value.flags.owndata


class DatasetChanges:
    """Of one life's dataset. `catch()`: what may be caught around user code."""

    def __init__(self, dataset: Any, catch: Callable[[], Any]) -> None:
        self._dataset = dataset
        self._catch = catch
        self._names: set[str] = set()  # of what has changed since a life began
        self.sure = True  # of what cannot be carried, all was looked at
        self.lost = False  # something that cannot be carried has changed
        self._known = self._look()

    def restore(self, packed: bytes) -> None:
        """What an earlier life has given on."""
        values = _Unpickler(io.BytesIO(packed), self._dataset).load()
        self._dataset.__dict__.update(values)
        self._names |= values.keys()
        self._known = self._look()

    def moved(self) -> bytes:
        """What is to be given on; nothing where nothing has changed since that was asked, or restored."""
        now = self._look()
        changed = {name for name, seen in now.items() if self._known.get(name) != seen}
        self._known = now
        fit = {name for name, seen in now.items() if seen.fit}
        self.lost = self.lost or not changed <= fit or any(seen.moves for seen in now.values())
        self._names |= changed
        if not changed & fit:
            return b""
        file = io.BytesIO()
        _Pickler(file, self._dataset).dump({name: vars(self._dataset)[name] for name in self._names & fit})
        return file.getvalue()

    def _look(self) -> dict[str, _Seen]:
        """At each attribute."""
        found = {}
        self.sure = True
        for name, value in list(getattr(self._dataset, "__dict__", {}).items()):
            looker = _Looker(digest := _Digest(), self._dataset)
            whole = True
            try:
                looker.dump(value)
            except _Unfit:
                whole = False
            except self._catch():  # user code: __reduce__, __getstate__
                self.sure = False
                continue
            self.sure = self.sure and looker.seen
            found[name] = _Seen(digest.digest(), whole and looker.fit, looker.moves)
        return found
