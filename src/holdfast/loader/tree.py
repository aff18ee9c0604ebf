"""Going through a batch: lists, tuples and mappings of tensors and other things."""

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableSequence
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
        for step, part in parts(value):
            if not _sendable(part):
                return _culprit(part, path + step, depth - 1)
    return path, value


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What is in it, each with the step that leads there: "['image']", "[0]", ".name"."""
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
