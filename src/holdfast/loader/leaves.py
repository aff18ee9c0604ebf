"""Going through a batch: lists, tuples and mappings of tensors and other things."""

import copy
from collections import UserDict
from collections.abc import Callable, Mapping, MutableSequence
from typing import Any

import numpy as np
import torch

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
