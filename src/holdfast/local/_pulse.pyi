from collections.abc import Iterable, Iterator
from typing import Any

def noted(words: memoryview, position: int, since: int, first: int, indices: Iterable[Any], /) -> Iterator[Any]: ...
