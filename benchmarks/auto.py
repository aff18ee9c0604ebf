"""num_workers="auto" against fixed numbers, in one command and one table: python benchmarks/auto.py

Three loads: samples that compute, that wait, and that need much memory for a moment. A fixed number has a rate, which a
few seconds tell; "auto" has to find its own, and the time that takes counts: it runs longer, from a start at which it
knows nothing. The rounds are interleaved.
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


LOADS: dict[str, type[Dataset[int]]] = {"computes": Computes, "waits": Waits, "heavy": Heavy}


def rate(dataset: Any, seconds: float, workers: Any) -> tuple[float, int]:
    """Samples per second, and how many workers were there at the end."""
    import holdfast

    loader = holdfast.DataLoader(dataset, batch_size=8, sampler=range(1 << 40), num_workers=workers)
    gc.collect()
    iterator: Any = iter(loader)
    began = time.monotonic()
    count = 0
    while time.monotonic() - began < seconds:
        count += len(next(iterator))
    spent = time.monotonic() - began
    there = sum(worker.is_alive() for worker in iterator._workers)
    iterator._shutdown_workers()
    return count / spent, there


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--fixed-seconds", type=float, default=6.0)
    parser.add_argument("--auto-seconds", type=float, default=30.0)
    parser.add_argument("--loads", default=",".join(LOADS))
    arguments = parser.parse_args()
    print(f"{'samples/s':12}" + "".join(f"{n:>9}" for n in FIXED) + f"{'auto':>9}{'of best':>9}  workers of auto")
    missed = 0
    for name in arguments.loads.split(","):
        rates: dict[Any, list[float]] = {n: [] for n in (*FIXED, "auto")}
        used: list[int] = []
        for _ in range(arguments.rounds):
            for number, found in rates.items():
                seconds = arguments.auto_seconds if number == "auto" else arguments.fixed_seconds
                per_s, workers = rate(LOADS[name](), seconds, number)
                found.append(per_s)
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
