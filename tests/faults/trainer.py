"""A trainer that ends in the middle of an epoch: `python -m tests.faults.trainer HOW START`."""

import sys

from holdfast import DataLoader
from holdfast.testing import FAULTS, inflict

from ..process.data import Numbers


def main(how: str, start: str) -> None:
    loader = DataLoader(Numbers(10_000, 0.02), batch_size=4, num_workers=2, multiprocessing_context=start)
    for step, _ in enumerate(loader):
        if step == 3:
            print("going", flush=True)
        if step == 6 and how in FAULTS and not how.startswith("sig"):
            inflict(how)


if __name__ == "__main__":
    main(*sys.argv[1:])
