"""CachedDataset: keeps the samples of a dataset in memory that all workers and the trainer share.

The dataset in the trainer and its copies in the workers see one `RecordStore` (shm/record_store.py). Forked copies
inherit it; spawned ones find it by its address. A copy that is unpickled where the store cannot be found (another
machine, a later run) starts an empty one of its own. The store keeps a sample as the bytes that would cross to the
trainer (shm/pack.py). Each lookup makes a copy of its own, so the caller may modify it.

By default the samples that came first stay. If the store holds a share c of the samples, and each epoch visits every
sample once in random order, a share c of the lookups hits. Evicting the least recently used sample gives only
c + (1-c) ln(1-c), about c^2/2, because a sample is still there only if fewer than c N others were visited since.
For c = 1/2 that is 50 % against 15 %. ("oldest", which goes by the time of storing, gives 19 %.) Eviction helps where
visits are not like that: curricula, weighted sampling, windows.
"""

import copy
import logging
import operator
import pickle
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from holdfast.diagnose.machine import read_machine
from holdfast.policy import parse_bytes
from holdfast.shm.pack import Packer
from holdfast.shm.record_store import Evict, Put, RecordStore, room_for
from holdfast.shm.slot_writer import FileSpace

_LOG = logging.getLogger("holdfast")
# What is counted in each process, see `figures`.
HITS, MISSES, STORED, TOO_LARGE, UNPICKLABLE, NO_ROOM, BUSY, ODD_KEYS, RANDOM = range(9)
_COUNTED = ("hits", "misses", "stored", "too_large", "unpicklable", "no_room", "busy", "odd_keys", "random")
_OUTCOMES = {Put.STORED: STORED, Put.TOO_LARGE: TOO_LARGE, Put.NO_ROOM: NO_ROOM, Put.BUSY: BUSY}
# Loads that a process compares the random generators around: it costs 30 us each.
_LOOKS = 8
_ABSENT = object()


class _Draft(FileSpace):
    """Where a sample's parts are gathered, without a copy, until the size of all is known."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.parts: list[memoryview] = []

    def put(self, raw: memoryview) -> int:
        self.parts.append(raw)
        return len(self.parts) - 1


class CachedDataset(Dataset[Any]):
    """A map-style dataset whose samples are loaded once, and then come from memory.

    dataset: any dataset with `__getitem__` and `__len__`, whose samples do not depend on chance.
    size: bytes, or like "4GiB": all that is ever taken, in all processes together.
    evict: "never" keeps what came first; "oldest" makes room for what comes.
    then: called with each sample, kept or not: the place for random augmentation.

    Attributes that are not found here are the dataset's: `cached.classes` works.
    """

    def __init__(
        self,
        dataset: Any,
        size: int | str,
        *,
        evict: Evict = "never",
        then: Callable[[Any], Any] | None = None,
    ) -> None:
        self.dataset = dataset
        self.evict = evict
        self.then = then
        self._length = _checked_length(dataset)
        self._size = parse_bytes(size) if isinstance(size, str) else operator.index(size)
        if evict not in ("never", "oldest"):
            raise ValueError(f"CachedDataset(evict={evict!r}): evict must be 'never' or 'oldest'")
        if room_for(self._length, self._size) <= 0:
            need = self._size - room_for(self._length, self._size)
            raise ValueError(
                f"CachedDataset(size={size!r}) is too small: "
                f"to know where {self._length:,} samples are takes {need:,} bytes alone"
            )
        _warn_if_it_does_not_fit(self._size)
        self._make()

    def _make(self, store: RecordStore | None = None) -> None:
        self._store = RecordStore(self._length, self._size, self.evict) if store is None else store
        self._packers: list[Packer] = []  # one for each thread that is packing now
        self._looks = _LOOKS

    def __len__(self) -> int:
        return len(self.dataset)

    def __repr__(self) -> str:
        return f"CachedDataset({self.dataset!r}, {self._size}, evict={self.evict!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)

    # Samples --------------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Any:
        index = self._index(key)
        sample = self._look_up(index)
        if sample is _ABSENT:
            sample = self._load(key)
            self._keep(index, sample)
        return sample if self.then is None else self.then(sample)

    @property
    def __getitems__(self) -> Callable[[list[Any]], list[Any]]:
        """Only where the dataset has it: of samples loaded one by one it is known which ended a worker."""
        if not callable(getattr(self.dataset, "__getitems__", None)):
            raise AttributeError("the dataset has no __getitems__")
        return self._many

    def _many(self, keys: list[Any]) -> list[Any]:
        indices = [self._index(key) for key in keys]
        samples = [self._look_up(index) for index in indices]
        missing = [place for place, sample in enumerate(samples) if sample is _ABSENT]
        if missing:
            loaded = self.dataset.__getitems__([keys[place] for place in missing])
            for place, sample in zip(missing, loaded, strict=True):
                samples[place] = sample
                self._keep(indices[place], sample)
        return samples if self.then is None else [self.then(sample) for sample in samples]

    def _index(self, key: Any) -> int | None:
        """None for what is not kept: a key that is no whole number, or none of this dataset's first length."""
        if type(key) is not int:
            if isinstance(key, bool) or getattr(key, "ndim", None) or getattr(key, "dtype", None) is torch.bool:
                return None  # a tensor in the dataset takes these for something else than their number
            try:
                key = operator.index(key)
            except TypeError:
                return None
        return key if 0 <= key < self._length else None

    def _look_up(self, index: int | None) -> Any:
        count = self._store.shared.count
        if index is None:
            count(ODD_KEYS)
            return _ABSENT
        parts = self._store.get(index)
        if parts is not None:
            try:
                (sample,) = pickle.loads(parts[0], buffers=parts[1:])
            except MemoryError:
                raise
            except Exception:  # user code: it pickles, and cannot be unpickled
                count(UNPICKLABLE)
            else:
                count(HITS)
                return sample
        count(MISSES)
        return _ABSENT

    def _load(self, key: Any) -> Any:
        if not self._looks:
            return self.dataset[key]
        self._looks -= 1
        before = _generators()
        sample = self.dataset[key]
        if _generators() != before:
            self._store.shared.count(RANDOM)
            if self._store.shared.total(RANDOM) == 1:
                _LOG.warning(
                    "CachedDataset: sample %s drew random numbers as it was loaded; the same sample comes in every "
                    "epoch. Random augmentation belongs behind the cache: CachedDataset(dataset, size, then=augment)",
                    key,
                )
        return sample

    def _keep(self, index: int | None, sample: Any) -> None:
        if index is None:
            return
        store = self._store
        if store.full:
            store.shared.count(NO_ROOM)
            return
        try:
            parts = self._pack(sample)
        except MemoryError:
            store.shared.count(NO_ROOM)  # not even to pack it: the sample itself is well
            return
        except Exception:  # user code: __reduce__, __getstate__
            store.shared.count(UNPICKLABLE)
            return
        outcome = _OUTCOMES.get(store.put(index, parts))
        if outcome is not None:
            store.shared.count(outcome)

    def _pack(self, sample: Any) -> list[memoryview]:
        """Spec and buffers."""
        try:
            packer = self._packers.pop()
        except IndexError:
            packer = Packer()
        draft = _Draft()
        _, buffers, spec_bytes = packer.pack([sample], draft)  # (in a list: nothing that Packer knows a short way for)
        self._packers.append(packer)
        last = draft.parts[-1]
        numbers = struct.unpack_from(f"<{2 * buffers}Q", last)[::2]
        parts = [last[-spec_bytes:], *(draft.parts[number] for number in numbers)]
        draft.parts.clear()  # the packer goes on holding the draft; the sample is the user's alone
        return parts

    # Figures --------------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, int | float]:
        """Over all processes so far, living and dead.

        hits, misses, stored, hit_rate; samples and bytes held now, and size; too_large, unpicklable, no_room and
        busy: not stored, and why; odd_keys: asked for by what is no index; random: samples that drew random numbers,
        of the first few of each process.
        """
        store = self._store
        figures: dict[str, int | float] = {name: store.shared.total(i) for i, name in enumerate(_COUNTED)}
        asked = figures["hits"] + figures["misses"]
        figures["hit_rate"] = figures["hits"] / asked if asked else 0.0
        figures["samples"] = store.held()
        figures["bytes"] = store.used()
        figures["size"] = self._size
        return figures

    def clear(self) -> None:
        """Forget all samples and counts, after the dataset was changed. Workers see it when they are started next."""
        self._make()

    # Other processes, and copies ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("_store", "_packers", "_looks")}
        return state | {"_address": self._store.shared.address}

    def __setstate__(self, state: dict[str, Any]) -> None:
        address = state.pop("_address")
        self.__dict__.update(state)
        self._make(RecordStore.find(address, self._length, self._size, self.evict))

    def __deepcopy__(self, memo: dict[int, Any]) -> "CachedDataset":
        """With an empty cache of its own: the dataset's copy may be changed to give other samples."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        state = {name: value for name, value in self.__getstate__().items() if name != "_address"}
        made.__dict__.update(copy.deepcopy(state, memo))
        made._make()
        return made


def _checked_length(dataset: Any) -> int:
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"CachedDataset needs a map-style dataset, and {kind} is an IterableDataset: "
            "a stream has no index under which a sample could be kept"
        )
    if not hasattr(type(dataset), "__getitem__") or not hasattr(type(dataset), "__len__"):
        raise TypeError(f"CachedDataset needs a dataset with __getitem__ and __len__, and {kind} has not both")
    return len(dataset)


def _warn_if_it_does_not_fit(size: int) -> None:
    free = read_machine().memory_free
    if size > free:
        _LOG.warning(
            "CachedDataset: %.1f GiB are more than the %.1f GiB of memory that are free now; "
            "the kernel kills workers when there is no more",
            size / (1 << 30),
            free / (1 << 30),
        )


def _generators() -> tuple[Any, ...]:
    """Where torch's, Python's and numpy's are. (A draw from numpy's usual one moves its place; others are short.)"""
    numpys: Any = np.random.get_state(legacy=False)
    inner = numpys["state"]
    place = (inner["pos"] if "pos" in inner else repr(inner)), numpys.get("has_gauss")
    return torch.default_generator.get_state().numpy().tobytes(), random.getstate(), place
