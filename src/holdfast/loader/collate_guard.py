"""Does any code of the user's come by a batch while torch's default_collate makes it? Asked before each batch.

A batch that is collated into its slot is a tensor that is used again, over memory that is written again. That is safe
as long as nobody can change or keep it before it is sent. Torch's own functions do neither. A function that the user
has registered may, and so may a class of the user's that torch fills with parts of the batch: `update` of a mapping,
`__new__` of a named tuple; a tensor subclass, which is told of each function that it is given to; and a mode of
torch's, which is told of all. Where there is one, the batch is made in memory of its own.

Torch goes by the first sample, and so do we. A later one may be of a class of the user's that calls default_collate
when it is asked for its parts. So what writes into the slot is in no place where that looks for its functions: it is in
a copy of torch's registry, which only the call that makes the batch is given, and hands on to torch's own functions.
"""

from collections import OrderedDict
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import torch
import torch.utils.data._utils.collate as torch_collate
from torch.utils._device import DeviceContext

# What torch looks up in its registry at once, and what it goes into.
_LEAVES = frozenset((torch.Tensor, np.ndarray, int, float, bool, str, bytes))
_CONTAINERS = frozenset((dict, list, tuple, OrderedDict))
# By the type of a sample, as torch has it; or by another function.
Functions = dict[Any, Callable[..., Any]]
# Samples that go deeper than this are collated in memory of their own.
_DEPTH = 12


def is_torchs(function: object) -> bool:
    """Written in torch's module: not put in the place of its function, nor around it."""
    return type(function) is FunctionType and function.__globals__ is vars(torch_collate)


def is_plain_torch(tensors: Any) -> bool:
    """True where no code of the user's is told of a function of torch's that these are given to."""
    return {torch.Tensor}.issuperset(map(type, tensors)) and not _is_watched()


def _is_watched() -> bool:
    """A mode of the user's is told of all of torch's functions. (Torch's own, of the default device, is harmless.)"""
    if torch._C._len_torch_dispatch_stack():
        return True
    modes = range(torch._C._len_torch_function_stack())
    return any(type(torch._C._get_function_stack_at(mode)) is not DeviceContext for mode in modes)


class CollateGuard:
    """Knows torch's functions, and the one of ours that stands in for one of them. Which process: the worker.

    `in_slot`: a function of these -> what does the same into the slot.
    """

    def __init__(self, in_slot: Functions) -> None:
        self._in_slot = in_slot
        self._collate = torch_collate.collate if is_torchs(torch_collate.collate) else None
        self._seen: list[Any] = []  # the registry's types and functions, as they were judged last
        self._untouched = False
        self._functions: Functions = {}

    def functions_for(self, samples: Any) -> Functions | None:
        """What is to be used in place of torch's registry, to make a batch of these samples in the slot.

        None where code of the user's can come by it.
        """
        if type(samples) not in (list, tuple) or not samples or torch_collate.collate is not self._collate:
            return None
        if _is_watched():
            return None
        first = samples[0]  # torch goes by the first sample
        try:
            functions = torch_collate.default_collate_fn_map
            seen = [*functions, *functions.values()]
            if seen != self._seen:
                self._seen = seen
                self._untouched = all(map(self._may, functions.values()))
                self._functions = {kind: self._into_slot(function) for kind, function in functions.items()}
            plain = (self._untouched and type(first) in _LEAVES) or self._is_plain(first, _DEPTH)
            return self._functions if plain else None
        except BaseException:  # code of the user's: __eq__ of a function, __hash__ of a type, __class__ of a sample
            return None

    def _may(self, function: Any) -> bool:
        return is_torchs(function) or self._into_slot(function) is not function

    def _into_slot(self, function: Any) -> Any:
        return next((into for own, into in self._in_slot.items() if own is function), function)

    def _is_plain(self, part: Any, depth: int) -> bool:
        kind = type(part)
        if self._untouched and kind in _LEAVES:
            return True
        known = self._untouched and kind in _CONTAINERS
        function = None if known else _function_for(part)
        if function is not None:
            return self._may(function)
        if not depth or not (kind in _CONTAINERS or _is_named_tuple(kind)):
            return False
        parts = part.values() if isinstance(part, dict) else part
        if self._untouched and _LEAVES.issuperset(map(type, parts)):
            return True
        return all(self._is_plain(inside, depth - 1) for inside in parts)


def _function_for(part: Any) -> Any:
    """As torch looks for it."""
    functions = torch_collate.default_collate_fn_map
    function = functions.get(type(part))
    if function is not None:
        return function
    return next((function for kind, function in functions.items() if isinstance(part, kind)), None)


def _is_named_tuple(kind: type) -> bool:
    """Made by `namedtuple` or `NamedTuple`, with the constructor that these write."""
    return kind.__bases__ == (tuple,) and getattr(kind.__new__, "__module__", "") == f"namedtuple_{kind.__name__}"
