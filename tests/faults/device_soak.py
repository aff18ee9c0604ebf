"""Batches to the device while workers are killed, checked on the device: python -m tests.faults.device_soak [BATCHES]

Each sample is computed from its index, on the host in a worker and on the device from the index that should be there.
Every byte is compared, and nothing is waited for until the end. Exit code 0 when all is exact.
"""

import argparse
import os
import random
import signal
import sys
import threading
import time

import torch
from torch.utils.data import Dataset

from holdfast import DataLoader

NUMBERS = 8192
BATCH = 32
KILL_EVERY_S = 0.05
PRIME = 2_654_435_761


class Computed(Dataset):
    """64 KiB each: a row of numbers that no other index has."""

    def __init__(self, length):
        self.length = length
        self.row = torch.arange(NUMBERS)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.row * (index + 1) + index * PRIME, index


class Killer(threading.Thread):
    """Kills a worker, any, again and again."""

    def __init__(self, iterator):
        super().__init__(daemon=True)
        self.workers = iterator._workers
        self.stopped = threading.Event()
        self.kills = 0

    def run(self):
        chooser = random.Random(5)
        while not self.stopped.wait(KILL_EVERY_S):
            pid = chooser.choice(self.workers).pid
            if pid:
                try:
                    os.kill(pid, signal.SIGKILL)
                    self.kills += 1
                except ProcessLookupError:
                    pass  # dead already


def soak(batches, workers, way):
    """(batches seen, wrong samples, samples out of place, kills, restarts)"""
    options = {"device": "cuda"} if way == "device" else {"pin_memory": True}
    loader = DataLoader(Computed(batches * BATCH), batch_size=BATCH, num_workers=workers, **options)
    row = torch.arange(NUMBERS, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    misplaced = torch.zeros((), dtype=torch.int64, device="cuda")
    iterator = iter(loader)
    killer = Killer(iterator)
    killer.start()
    seen = 0
    for batch in iterator:
        samples, labels = (part.to("cuda", non_blocking=True) for part in batch)  # the same, if they are there already
        place = torch.arange(seen * BATCH, (seen + 1) * BATCH, device="cuda")
        misplaced += (labels != place).sum()
        want = row * (place[:, None] + 1) + place[:, None] * PRIME
        wrong += (samples != want).any(1).sum()
        seen += 1
    killer.stopped.set()
    killer.join()
    return seen, int(wrong), int(misplaced), killer.kills, loader.stats()["restarts"]


def main(argv=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("batches", type=int, nargs="?", default=10_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--ways", default="device,pin_memory")
    options = parser.parse_args(argv)
    exact = True
    for way in options.ways.split(","):
        began = time.monotonic()
        seen, wrong, misplaced, kills, restarts = soak(options.batches, options.workers, way)
        seconds = time.monotonic() - began
        exact = exact and seen == options.batches and not wrong and not misplaced
        print(
            f"{way}: {seen} of {options.batches} batches of {BATCH} in {seconds:.1f} s; {kills} kills, "
            f"{restarts} workers restarted; {wrong} samples wrong, {misplaced} out of place",
            flush=True,
        )
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
