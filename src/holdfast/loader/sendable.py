"""Where in a batch is the thing that cannot be sent?"""

from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle

from holdfast.errors import CannotSend
from holdfast.local.raised import text_of

_DEPTH = 12


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


def _culprit(value: Any, path: str = "", depth: int = _DEPTH) -> tuple[str, Any]:
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
