"""How fast: batches per second once it runs, and seconds until the first batch; torch's loader and ours in turns.

In turns, because a machine that is slow for some seconds must be slow for both. The result is the median of the
ratios of each round, not the ratio of two medians from different seconds.
"""

import gc
import time
from statistics import median
from typing import Any

import torch.utils.data
from datasets import VECTORS, Load
from table import Row, ms

import holdfast

WORKERS = 2
WINDOW_S = 1.2
# Not counted: until the prefetched batches are used up, all slots were touched and the processor has found its pace.
WARM_S = 0.25
WARM_BATCHES = 16
# A spawned worker of torch's takes seconds to import it.
SPAWN_ROUNDS = 5

Loader = torch.utils.data.DataLoader[Any]
KINDS: dict[str, type[Loader]] = {"torch": torch.utils.data.DataLoader, "holdfast": holdfast.DataLoader}


def speed(load: Load, rounds: int) -> Row:
    """One row: torch, ours, torch, ours, ..."""
    dataset = load.make()
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, loader_class in KINDS.items():
            loader = loader_class(dataset, batch_size=load.batch_size, num_workers=WORKERS)
            rates[kind].append(batches_per_second(loader))
    ratios = [ours / theirs for theirs, ours in zip(rates["torch"], rates["holdfast"], strict=True)]
    ratio = median(ratios)
    return Row(
        name=load.name,
        theirs=f"{median(rates['torch']):.5g}/s",
        ours=f"{median(rates['holdfast']):.5g}/s",
        result=f"{ratio:.2f} x",
        spread=f"{min(ratios):.2f}, {max(ratios):.2f}",
        goal=f"{load.goal:g} x",
        missed=ratio < load.goal,
        numbers={"batches_per_s": rates, "ratios": ratios, "ratio": ratio, "goal": load.goal},
    )


def batches_per_second(loader: Loader) -> float:
    iterator = iter(loader)
    take(iterator, WARM_S, WARM_BATCHES)
    count, seconds = take(iterator, WINDOW_S)
    end(iterator)
    return count / seconds


def end(iterator: Any) -> None:
    """End its processes now: the next measurement must not share the machine with them."""
    iterator._shutdown_workers()
    gc.collect()


def take(iterator: Any, seconds: float, least: int = 1) -> tuple[int, float]:
    """Batches for so many seconds, at least some: how many, and in how much time. Nothing is done with them."""
    clock = time.perf_counter
    count = 0
    began = clock()
    end = began + seconds
    for _ in iterator:
        count += 1
        if clock() >= end and count >= least:
            break
    return count, clock() - began


def first_batch(method: str, rounds: int) -> Row:
    """One row: seconds from iter() to the first batch. The first round of all, which imports torch, is in the note."""
    rounds = min(rounds, SPAWN_ROUNDS) if method == "spawn" else 2 * rounds
    dataset = VECTORS.make()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, loader_class in KINDS.items():
            loader = loader_class(
                dataset, batch_size=VECTORS.batch_size, num_workers=WORKERS, multiprocessing_context=method
            )
            times[kind].append(seconds_to_first(loader))
    ratios = [theirs / ours for theirs, ours in zip(times["torch"], times["holdfast"], strict=True)]
    return Row(
        name=f"first batch, {method}",
        theirs=ms(median(times["torch"])),
        ours=ms(median(times["holdfast"])),
        result=f"{median(ratios):.2f} x",
        spread=f"{min(ratios):.2f}, {max(ratios):.2f}",
        goal="2 x" if method == "spawn" else "1 x",
        missed=median(ratios) < (2 if method == "spawn" else 1),
        note=f"the very first: {ms(times['torch'][0])} and {ms(times['holdfast'][0])}",
        numbers={"seconds": times, "ratios": ratios, "ratio": median(ratios)},
    )


def seconds_to_first(loader: Loader) -> float:
    began = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    seconds = time.perf_counter() - began
    end(iterator)
    return seconds
