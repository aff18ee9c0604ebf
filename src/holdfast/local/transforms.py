"""Was it a transform that raised? The frames of a traceback know: below a dataset whose `transform` was called.

Which process: the one that raised, while the exception is handled; later the frames are gone.
"""

import functools
import inspect
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

# Where torchvision's datasets, and those written after them, keep what is applied to a sample.
_ATTRIBUTES = ("transform", "target_transform", "transforms")
_LIBRARIES = (
    "torchvision.transforms",
    "albumentations",
    "kornia.augmentation",
    "monai.transforms",
    "torchio.transforms",
)
# A Compose holds those that it applies in one of these.
_PARTS = ("transforms", "transform", "fn", "lambd", "func")
_DEEP = 4


def transform_in(trace: TracebackType | None) -> str:
    """The transform that an exception came out of, innermost: "Compose > Resize"; "" when it came out of none."""
    known: dict[int, Any] = {}  # callables by id; and code objects, which a function's frames have
    path: list[str] = []
    for frame in _frames(trace):
        found = _callable_of(frame, known)
        if found:
            path = [*path, found] if path[-1:] != [found] else path
        elif path:
            continue  # what a transform calls, or is called through
        owner = _owner(frame)
        for name in _ATTRIBUTES:
            applied = _attribute(owner, name)
            if callable(applied):
                _learn(applied, known, _DEEP)
    return " > ".join(path)


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _owner(frame: FrameType) -> Any:
    """The object whose method a frame is; None for a function."""
    code = frame.f_code
    return frame.f_locals.get("self") if code.co_varnames[:1] == ("self",) else None


def _callable_of(frame: FrameType, known: dict[int, Any]) -> str:
    """The name of the transform whose own frame this is."""
    owner = _owner(frame)
    if id(frame.f_code) in known:
        return frame.f_code.co_name
    if owner is not None and known.get(id(owner)) is owner:
        return type(owner).__name__
    if str(frame.f_globals.get("__name__", "")).startswith(_LIBRARIES):
        return type(owner).__name__ if owner is not None and not isinstance(owner, type) else frame.f_code.co_name
    return ""


def _learn(applied: Any, known: dict[int, Any], deep: int) -> None:
    """A transform, and those inside it."""
    if deep == 0 or id(applied) in known:
        return
    while isinstance(applied, functools.partial):
        applied = applied.func
    code = getattr(getattr(applied, "__func__", applied), "__code__", None)
    if code is not None:
        known[id(code)] = code
        return
    known[id(applied)] = applied
    for name in _PARTS:
        inner = _attribute(applied, name)
        for part in inner if isinstance(inner, list | tuple) else [inner]:
            if callable(part):
                _learn(part, known, deep - 1)


def _attribute(owner: Any, name: str) -> Any:
    """Without running user code: a property may do anything."""
    return inspect.getattr_static(owner, name, None)
