"""Workers that take items from an endless source until it ends: no queue, no sentinel, and never far ahead of it."""

from collections.abc import Iterator
from itertools import tee

from work import ITEMS, process_data

from holdfast import Policy, Pool


def source() -> Iterator[str]:
    yield from ITEMS  # or from a file, a message broker, a directory that fills


def main() -> None:
    with Pool(policy=Policy(sample_timeout=2, worker_memory="512MiB")) as pool:
        items, names = tee(source())
        results = pool.map(process_data, items, buffersize=4, return_exceptions=True)
        for item, result in zip(names, results, strict=True):
            lost = isinstance(result, Exception)
            print(f"{item}: LOST, {type(result).__name__}: {result}" if lost else f"{item}: {result}")


if __name__ == "__main__":
    main()
