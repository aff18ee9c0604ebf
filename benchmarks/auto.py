"""num_workers="auto" against fixed numbers, in one command and one table: python benchmarks/auto.py

Three loads: samples that compute, that wait, and that need much memory for a moment. Each number of workers runs the
same epoch; the rounds are interleaved. The first epoch of "auto" is the one that counts: it begins knowing nothing.
"""

import argparse
import gc
import time
from statistics import median
from typing import Any

import numpy as np
from torch.utils.data import Dataset

FIXED = (1, 2, 4, 8, 16)
GOAL = 0.9


class Computes(Dataset[int]):
    """8 ms or so of a processor."""

    def __getitem__(self, index: int) -> int:
        total = 0
        for number in range(200_000):
            total += number
        return index


class Waits(Dataset[int]):
    """20 ms for somebody else."""

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


class Heavy(Dataset[int]):
    """128 MiB for a moment, and 30 ms for somebody else."""

    def __getitem__(self, index: int) -> int:
        np.ones(128 << 20, np.uint8)
        time.sleep(0.03)
        return index


LOADS: dict[str, tuple[type[Dataset[int]], int]] = {
    "computes": (Computes, 4000),
    "waits": (Waits, 12000),
    "heavy": (Heavy, 600),
}


def epoch_s(dataset: Any, samples: int, workers: Any) -> tuple[float, int]:
    """Seconds of an epoch, and how many workers did a part of it."""
    import holdfast

    loader = holdfast.DataLoader(dataset, batch_size=8, sampler=range(samples), num_workers=workers)
    gc.collect()
    began = time.monotonic()
    got = sum(len(batch) for batch in loader)
    assert got == samples
    return time.monotonic() - began, sum(row["batches"] > 5 for row in loader.stats()["per_worker"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default=",".join(LOADS))
    arguments = parser.parse_args()
    print(f"{'samples/s':12}" + "".join(f"{n:>9}" for n in FIXED) + f"{'auto':>9}{'of best':>9}  workers of auto")
    missed = 0
    for name in arguments.loads.split(","):
        dataset, samples = LOADS[name]
        rates: dict[Any, list[float]] = {n: [] for n in (*FIXED, "auto")}
        used: list[int] = []
        for _ in range(arguments.rounds):
            for number, found in rates.items():
                seconds, workers = epoch_s(dataset(), samples, number)
                found.append(samples / seconds)
                if number == "auto":
                    used.append(workers)
        middle = {number: median(found) for number, found in rates.items()}
        share = middle["auto"] / max(middle[n] for n in FIXED)
        missed += share < GOAL
        cells = "".join(f"{middle[n]:9.0f}" for n in (*FIXED, "auto"))
        print(f"{name:12}{cells}{share:9.2f}  {used}{'' if share >= GOAL else '  MISSED'}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
