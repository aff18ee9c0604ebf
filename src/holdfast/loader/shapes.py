"""Which samples of a batch are unlike the others? Asked when they cannot be stacked."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from holdfast.local.raised import text_of

_MOST = 5
_DEPTH = 6
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
    shapes = [dict(_shapes(sample, "", _DEPTH)) for sample in samples]
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
