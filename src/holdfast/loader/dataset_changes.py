"""DatasetChanges: what epochs have made of a dataset, for a life that was not there: the number of the epoch, say.

A dataset that counts its epochs shuffles by that count, and each worker takes its share of the same order. A new life
that began to count anew would take another order's share: samples would be missing, and others come twice.

At the end of its stream, and with the first batch after one that was left, a worker looks which attributes of the
dataset have changed, and gives them on. Not those that are large, shared with other processes or cannot be pickled: of
them a new life has what every life begins with.
"""

import hashlib
import io
import pickle
import threading
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

# Of one attribute, pickled.
LIMIT = 4 << 20
_ITSELF = "the dataset"
# What cannot be pickled, and does not change by being iterated.
_INERT = FunctionType, ModuleType, type(threading.Lock()), type(threading.RLock())


class _Unfit(Exception):
    """This cannot be carried."""


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

    def persistent_id(self, value: Any) -> str | None:
        if value is self._dataset:
            return _ITSELF
        if isinstance(value, torch.Tensor | np.ndarray) and (value.nbytes > LIMIT or _is_shared(value)):
            raise _Unfit
        return None


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
        self.all = True  # nothing that cannot be carried may have changed
        self._known = self._digests()

    def restore(self, packed: bytes) -> None:
        """What an earlier life has given on."""
        values = _Unpickler(io.BytesIO(packed), self._dataset).load()
        self._dataset.__dict__.update(values)
        self._names |= values.keys()
        self._known = self._digests()

    def moved(self) -> bytes:
        """What is to be given on; nothing where nothing has changed since that was asked, or restored."""
        now = self._digests()
        changed = {name for name, digest in now.items() if self._known.get(name) != digest}
        self._known = now
        self._names |= changed
        if not changed:
            return b""
        file = io.BytesIO()
        _Pickler(file, self._dataset).dump({name: vars(self._dataset)[name] for name in self._names & now.keys()})
        return file.getvalue()

    def _digests(self) -> dict[str, bytes]:
        """Of each attribute that can be carried."""
        found = {}
        self.all = True
        for name, value in list(getattr(self._dataset, "__dict__", {}).items()):
            digest = _Digest()
            try:
                _Pickler(digest, self._dataset).dump(value)
            except _Unfit:
                continue
            except self._catch():  # user code: __reduce__, __getstate__
                self.all = self.all and isinstance(value, _INERT)
                continue
            found[name] = digest.digest()
        return found
