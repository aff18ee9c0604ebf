"""num_workers="auto" against fixed numbers, in one command and one table: python benchmarks/auto.py

Three loads: samples that compute, that wait, and that need much memory for a moment. Each number, and "auto", begins
with nothing and runs for the same time, which counts from before the first process is started: what the search costs
"auto" is in its figure, and so is what many workers cost at the start. The rounds are interleaved, in another order
each time.
"""

import argparse
import gc
import random
import time
import warnings
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


LOADS: dict[str, type[Dataset[int]]] = {"computes": Computes, "waits": Waits, "heavy": Heavy}


def rate(dataset: Any, seconds: float, workers: Any) -> tuple[float, int]:
    """Samples per second from the start, and how many workers were there at the end."""
    import holdfast

    loader = holdfast.DataLoader(dataset, batch_size=8, sampler=range(1 << 40), num_workers=workers)
    gc.collect()
    began = time.monotonic()
    iterator: Any = iter(loader)
    count = 0
    while (spent := time.monotonic() - began) < seconds:
        count += len(next(iterator))
    there = sum(worker.is_alive() for worker in iterator._workers)
    iterator._shutdown_workers()
    return count / spent, there


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--fixed", default=",".join(str(n) for n in FIXED))
    arguments = parser.parse_args()
    fixed = [int(n) for n in arguments.fixed.split(",")]
    print(f"{'samples/s':12}" + "".join(f"{n:>9}" for n in fixed) + f"{'auto':>9}{'of best':>9}  workers of auto")
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more than processors: that is the question
    shuffle = random.Random(0).shuffle
    missed = 0
    for name in arguments.loads.split(","):
        rates: dict[Any, list[float]] = {n: [] for n in (*fixed, "auto")}
        used: list[int] = []
        for _ in range(arguments.rounds):
            order = list(rates)
            shuffle(order)
            for number in order:
                per_s, workers = rate(LOADS[name](), arguments.seconds, number)
                rates[number].append(per_s)
                if number == "auto":
                    used.append(workers)
        middle = {number: median(found) for number, found in rates.items()}
        share = middle["auto"] / max(middle[n] for n in fixed)
        missed += share < GOAL
        cells = "".join(f"{middle[n]:9.0f}" for n in (*fixed, "auto"))
        print(f"{name:12}{cells}{share:9.2f}  {used}{'' if share >= GOAL else '  MISSED'}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
