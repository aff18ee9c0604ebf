"""Going through a batch: lists, tuples and mappings of tensors and other things."""

import copy
import re
from collections import Counter, UserDict
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from itertools import islice
from typing import Any

import cloudpickle
import numpy as np
import torch

from holdfast.errors import CannotSend
from holdfast.remote_exception import text_of
from holdfast.shm.pack import SMALL, is_plain


def mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The same structure with `leaf(x)` for each x in it that is not a list, tuple or mapping."""
    kind = type(value)
    if kind is dict:
        return {key: mapped(part, leaf) for key, part in value.items()}
    if kind is list:
        return [mapped(part, leaf) for part in value]
    if kind is tuple:
        return tuple([mapped(part, leaf) for part in value])
    if isinstance(value, torch.Tensor | np.ndarray | str | bytes | int | float):
        return leaf(value)
    if _can_move(value) and not isinstance(value, UserDict):  # (what tokenizers make is a UserDict with a `to`)
        return leaf(value)
    if isinstance(value, Mapping):
        parts = {key: mapped(part, leaf) for key, part in value.items()}
        try:
            clone: Any = copy.copy(value)
            clone.update(parts)
        except (AttributeError, TypeError):
            return parts  # one that cannot be changed
        return clone
    if isinstance(value, tuple):
        inside = [mapped(part, leaf) for part in value]
        return kind(*inside) if hasattr(value, "_fields") else kind(inside)
    if isinstance(value, MutableSequence) and not isinstance(value, bytearray):
        clone = copy.copy(value)
        for place, part in enumerate(value):
            clone[place] = mapped(part, leaf)
        return clone
    return leaf(value)


def _can_move(value: Any) -> bool:
    return callable(getattr(type(value), "to", None))


def moved(batch: Any, device: torch.device) -> Any:
    """The batch on the device, in the order of the current stream."""

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device, non_blocking=True)
        if not _can_move(value):
            return kept(value)
        try:
            return value.to(device, non_blocking=True)
        except TypeError:
            return value.to(device)  # one that knows no such argument

    return mapped(batch, move)


def kept(value: Any) -> Any:
    """What stays on the host; out of the slot, if it is small: a kept label shall not keep its batch."""
    return value.copy() if type(value) is np.ndarray and value.nbytes < SMALL else value


def tensors_of(batch: Any) -> dict[int, torch.Tensor] | None:
    """All its tensors, by identity; None where something in it is more than a plain tensor and must be asked to go."""
    found: dict[int, torch.Tensor] = {}
    odd = False

    def look(value: Any) -> Any:
        nonlocal odd
        if type(value) is torch.Tensor and is_plain(value):
            found[id(value)] = value
        elif isinstance(value, torch.Tensor) or _can_move(value):
            odd = True
        return value

    mapped(batch, look)
    return None if odd else found


# Where in a batch is the thing that cannot be sent?


_SENDABLE_DEPTH = 12


def explain_unsendable(error: BaseException, batch: Any, samples: Any, indices: Any) -> CannotSend:
    """An error that names the sample's index and the path inside it."""
    try:
        index, path, culprit, of = _found(batch, samples, indices)
    except BaseException:  # user code again: __repr__ of a key, items() of a mapping. The error itself is what counts
        index, path, culprit, of = None, "", batch, "batch"
    return CannotSend(
        f"the {of} holds something that cannot be sent to another process: {path or 'the whole of it'} "
        f"is a {type(culprit).__name__}\n"
        f"    seen   pickling it raised {type(error).__name__}: {text_of(error, BaseException)}\n"
        "    try    return plain data (tensors, arrays, numbers, strings) instead, or give its class __reduce__",
        index,
        path,
    )


def _found(batch: Any, samples: Any, indices: Any) -> tuple[Any, str, Any, str]:
    """The index of the sample, where in it, what, and the sample in words."""
    if isinstance(samples, list) and indices is not None:
        for candidate, sample in zip(indices, samples, strict=False):
            if not _sendable(sample):
                return candidate, *_culprit(sample), f"sample at index {candidate!r}"
    return None, *_culprit(batch), "batch"


def _sendable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except BaseException:  # whatever user code raises there: it cannot be sent
        return False
    return True


def _culprit(value: Any, path: str = "", depth: int = _SENDABLE_DEPTH) -> tuple[str, Any]:
    """The innermost part that cannot be pickled, and the way to it."""
    if depth:
        for step, part in _parts(value):
            if not _sendable(part):
                return _culprit(part, path + step, depth - 1)
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield f"[{key!r}]", part
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name, part in zip(value._fields, value, strict=True):
            yield f".{name}", part
    elif isinstance(value, list | tuple | set | frozenset):
        for i, part in enumerate(value):
            yield f"[{i}]", part
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for name, part in vars(value).items():
            yield f".{name}", part


# Which samples of a batch are unlike the others? Asked when they cannot be stacked.


_MOST = 5
_SHAPE_DEPTH = 6
_WIDTH = 100
# What torch says of samples that cannot be stacked.
UNEQUAL = re.compile(r"stack expects each tensor to be equal size|should be of equal size|same shape", re.IGNORECASE)


def differing(
    error: BaseException, samples: Any, indices: Any, catch: type[BaseException] = Exception
) -> tuple[str, ...]:
    """The samples whose shapes are not what most have, in words; nothing where that is not the trouble."""
    if not UNEQUAL.search(text_of(error, catch)) or not isinstance(samples, list) or len(samples) < 2:
        return ()
    try:
        return _differing(samples, indices)
    except catch:  # user code again: `shape`, `__len__`, `items`. The error itself is what counts
        return ()


def _differing(samples: list[Any], indices: Any) -> tuple[str, ...]:
    names = [f"index {index!r}" for index in indices] if indices is not None else []
    if len(names) != len(samples):
        names = [f"sample {position} of the batch" for position in range(len(samples))]
    shapes = [dict(_shapes(sample, "", _SHAPE_DEPTH)) for sample in samples]
    facts = []
    for path in dict.fromkeys(path for found in shapes for path in found):
        usual, _ = Counter(found.get(path) for found in shapes).most_common(1)[0]
        for name, found in zip(names, shapes, strict=True):
            if found.get(path) != usual:
                what = f"{path} of {name}" if path else name
                facts.append(f"{what} is {found.get(path, 'not there')}, most are {usual or 'not there'}")
    return tuple(facts[:_MOST]) + ((f"and {len(facts) - _MOST} more",) if len(facts) > _MOST else ())


def _shapes(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    shape = getattr(value, "shape", None)
    if shape is not None:
        yield path, str(tuple(shape))
    elif depth and isinstance(value, Mapping):
        for key, part in islice(value.items(), _WIDTH):
            yield from _shapes(part, f"{path}[{key!r}]", depth - 1)
    elif depth and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        yield f"len(){path and ' of '}{path}", str(len(value))
        for position, part in enumerate(islice(value, _WIDTH)):
            yield from _shapes(part, f"{path}[{position}]", depth - 1)
