"""A training that waits: `python -m tests.process.waiting HOW`. It prints "waits" as soon as it does."""

import os
import signal
import sys
import threading
import time

from torch.utils.data import Dataset, IterableDataset

from holdfast import DataLoader, Policy
from holdfast.local.keeper import worker_life


class Hangs(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 3:
            threading.Event().wait()
        return index


class Dies(Hangs):
    def __getitem__(self, index):
        if index == 3:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGSEGV)
        return index


class Endless(IterableDataset):
    """Gives its first item."""

    def __iter__(self):
        yield 0
        threading.Event().wait()


def main(how):
    worker_life.SILENT_S = 1.0  # the keeper is a fork of this process: it knows
    if how == "dies":
        loader = DataLoader(Dies(), num_workers=1, policy=Policy(strikes=1000, restarts=1000))
    elif how == "left":
        loader = DataLoader(Endless(), num_workers=1, persistent_workers=True)
    else:
        loader = DataLoader(Hangs(), num_workers=1)
    print("waits", flush=True)
    try:
        if how == "left":
            next(iter(loader))
            iter(loader)
        for _ in loader:
            pass
    except KeyboardInterrupt:
        print(loader.report(), flush=True)
        print(f"waited {loader.stats()['waited_s']} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
