"""Where in a batch is the thing that cannot be sent?"""

from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle

from holdfast.errors import CannotSend

_DEPTH = 12


def explain_unsendable(error: BaseException, batch: Any, samples: Any, indices: Any) -> CannotSend:
    """An error that names the sample's index and the path inside it."""
    path, culprit = _culprit(batch)
    index = None
    if isinstance(samples, list) and indices is not None:
        for candidate, sample in zip(indices, samples, strict=False):
            if not _sendable(sample):
                index = candidate
                path, culprit = _culprit(sample)
                break
    of = f"sample at index {index!r}" if index is not None else "batch"
    return CannotSend(
        f"the {of} holds something that cannot be sent to another process: {path or 'the whole of it'} "
        f"is a {type(culprit).__name__}\n"
        f"    seen   pickling it raised {type(error).__name__}: {error}\n"
        "    try    return plain data (tensors, arrays, numbers, strings) instead, or give its class __reduce__",
        index,
        path,
    )


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
