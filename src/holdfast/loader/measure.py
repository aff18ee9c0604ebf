"""Stands before a dataset in a worker, measures its samples there, and sends numbers back, never the samples."""

import hashlib
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from holdfast.diagnose.fitness import Sample
from holdfast.remote_exception import text_of
from holdfast.system import linux
from holdfast.system.signal_origin import raised_by_handler

# smaps_rollup takes milliseconds: it is read with each so many samples.
_PRIVATE_EVERY = 8
_DEPTH = 12
# Fewer objects than this are not worth a word.
_MANY = 50_000


class Unsendable(Exception):
    """A part of a sample cannot be pickled."""


class Weighed(Dataset[Sample]):
    """The dataset's samples as their measures."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._count = 0

    def __getitem__(self, index: Any) -> Sample:
        _seed(index)
        began = time.perf_counter()
        sample = self._dataset[index]
        seconds = time.perf_counter() - began
        self._count += 1
        return measure(index, sample, seconds, self._count)


class Repeated(Dataset[tuple[Any, str, str, str]]):
    """Each index loaded three times: twice with the seed of the first time, once with another."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, index: Any) -> tuple[Any, str, str, str]:
        prints = []
        for salt in (0, 0, 1):
            _seed(index, salt)
            prints.append(weigh(self._dataset[index])[2])
        return index, prints[0], prints[1], prints[2]


class WeighedStream(IterableDataset[Sample]):
    """The first items of a stream as their measures; an item is named by its place."""

    def __init__(self, dataset: Any, count: int) -> None:
        self._dataset = dataset
        self._count = count

    def __iter__(self) -> Iterator[Sample]:
        began = time.perf_counter()
        for place, item in enumerate(islice(iter(self._dataset), self._count)):
            yield measure(place, item, time.perf_counter() - began, place)
            began = time.perf_counter()


def _seed(index: Any, salt: int = 0) -> None:
    """By the index: what a sample draws is then the same each time, in any order."""
    number = (hash(index) * 2 + salt) % (1 << 32)
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def measure(index: Any, sample: Any, seconds: float, count: int) -> Sample:
    """What a sample is, and what the worker has become by it."""
    unsendable, size, shape, digest = "", 0, type(sample).__name__, ""
    try:
        size, shape, digest = weigh(sample)
    except Unsendable as error:
        unsendable = str(error)
    except BaseException:  # user code again: items() of a mapping, __str__ of a key. What is sent, the loader finds out
        shape = type(sample).__name__
    status = _status()
    pid = os.getpid()
    return Sample(
        index=index,
        seconds=seconds,
        bytes=size,
        shape=shape,
        digest=digest,
        pid=pid,
        resident=linux.memory_of(pid)[0],
        peak=status.get("VmHWM", 0),
        private=_private() if count % _PRIVATE_EVERY == 1 else 0,
        descriptors=len(os.listdir("/proc/self/fd")) - 1,  # less the one that lists them
        unsendable=unsendable,
    )


def weigh(sample: Any) -> tuple[int, str, str]:
    """Bytes, shape in words, and a fingerprint of the content."""
    digest = hashlib.blake2b(digest_size=16)
    size, shape = _weigh(sample, digest, _DEPTH)
    return size, shape, digest.hexdigest()


def _weigh(value: Any, digest: Any, depth: int) -> tuple[int, str]:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
        try:
            raw = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        except RuntimeError:  # a dtype of which this torch can do little more than hold it
            return _as_pickled(value, digest)
        digest.update(raw.numpy().data)
        return raw.numel(), f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(value.tobytes())
        return value.nbytes, f"{value.dtype}{list(value.shape)}"
    if isinstance(value, Mapping) and depth:
        parts = [(key, _weigh(part, digest, depth - 1)) for key, part in value.items()]
        return sum(part[0] for _, part in parts), "{" + ", ".join(f"{key}: {part[1]}" for key, part in parts) + "}"
    if isinstance(value, list | tuple) and depth:
        inner = [_weigh(part, digest, depth - 1) for part in value]
        words = [part[1] for part in inner]
        text = f"{words[0]} x {len(words)}" if len(words) > 4 and len(set(words)) == 1 else ", ".join(words)
        return sum(part[0] for part in inner), f"[{text}]" if isinstance(value, list) else f"({text})"
    return _as_pickled(value, digest)


def _as_pickled(value: Any, digest: Any) -> tuple[int, str]:
    try:
        pickled = cloudpickle.dumps(value, 5)
    except BaseException as error:  # user code: __reduce__, __getstate__
        raise Unsendable(
            f"a {type(value).__name__} ({type(error).__name__}: {text_of(error, BaseException)})"
        ) from error
    digest.update(pickled)
    return len(pickled), type(value).__name__


def attributes(dataset: Any) -> dict[str, Any]:
    """What it holds, by name; nothing, if it cannot be asked."""
    try:
        return dict(getattr(dataset, "__dict__", {}))
    except Exception as error:  # user code: a property
        if raised_by_handler(error):
            raise
        return {}


def large_parts(dataset: Any) -> tuple[str, ...]:
    """Attributes of a dataset, and of the datasets inside it, that are many Python objects."""
    found: list[str] = []
    try:
        for _ in range(_DEPTH):
            found += filter(None, (_as_large(dataset, name, part) for name, part in attributes(dataset).items()))
            dataset = getattr(dataset, "dataset", None)
    except Exception as error:  # user code: a part that is asked for its length
        if raised_by_handler(error):
            raise
    return tuple(found)


def _as_large(dataset: Any, name: str, value: Any) -> str:
    """In words; nothing of one that is not large."""
    if not issubclass(type(value), list | dict | tuple | set) or len(value) < _MANY:
        return ""
    some = list(islice(value.items() if isinstance(value, dict) else value, 100))
    each = sum(sys.getsizeof(part) for part in some) / len(some)
    about = f"about {len(value) * (each + 8) / 2**20:.0f} MiB"
    kind, part = type(value).__name__, type(some[0]).__name__
    return f"{type(dataset).__name__}.{name} is a {kind} of {len(value):,} {part}, {about}"


def _status() -> dict[str, int]:
    return _kilobytes(Path("/proc/self/status"), ("VmHWM",))


def _private() -> int:
    """Bytes that are this process's alone: a fork's shared pages are not."""
    return sum(_kilobytes(Path("/proc/self/smaps_rollup"), ("Private_Clean", "Private_Dirty")).values())


def _kilobytes(path: Path, names: Sequence[str]) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split(":", 1) for line in lines if line.endswith("kB"))
    return {name: int(rest.split()[0]) * 1024 for name, rest in fields if name in names}
