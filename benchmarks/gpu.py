"""To the device, against torch's own loader and against the bare link: python benchmarks/gpu.py

Each row is one batch type, one number of workers, one length of the training step (a kernel that does nothing for so
long); its cells are torch (pin_memory=True, then .to("cuda", non_blocking=True)), ours in the same two lines, and ours
with device="cuda". Of each: GB/s into the device, and the share of the time that the device's stream waited for data.

The share is measured on the stream itself, for all three alike: an event before next(), one behind the batch's arrival.
If the device is busy in between, it reaches the first one late and no time passes between the two.
"""

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Prepared

import holdfast

BATCH = 64
SHAPE = (3, 224, 224)
DTYPES = {"float32": torch.float32, "uint8": torch.uint8}
WORKERS = (4, 8, 14)
STEPS_MS = (0, 5, 20)
WAYS = ("torch", "pin_memory", "device")
WINDOW_S = 1.5
# Not counted: until each worker has filled all the slots that it will use, and they are registered.
WARM_S = 1.5
WARM_ROUNDS = 12
LINK_COPIES = 60
# What we want; the first is of the link, in the row with the most workers and no step.
LEAST_SHARE, LEAST_RATIO = 0.75, 10
MOST_WAIT, TORCH_WAITS = 0.02, 0.5


@dataclass(frozen=True, slots=True)
class Cell:
    """What one loader did."""

    batches_per_s: float
    gb_per_s: float
    waited: float


def link(size: int) -> float:
    """GB/s of copies from one pinned buffer, one after another."""
    source = torch.empty(size, dtype=torch.uint8).pin_memory()
    target = torch.empty(size, dtype=torch.uint8, device="cuda")
    best = 0.0
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(LINK_COPIES):
            target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        best = max(best, size * LINK_COPIES / begin.elapsed_time(end) / 1e6)
    return best


def cycles_per_ms() -> float:
    """Of the kernel that does nothing, at the clock that the device runs at when it is busy."""
    for _ in range(2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(200_000_000)
        end.record()
        end.synchronize()
    return 200_000_000 / begin.elapsed_time(end)


def loader_of(way: str, dataset: Any, workers: int) -> Any:
    if way == "torch":
        return torch.utils.data.DataLoader(dataset, BATCH, num_workers=workers, pin_memory=True)
    if way == "pin_memory":
        return holdfast.DataLoader(dataset, BATCH, num_workers=workers, pin_memory=True)
    return holdfast.DataLoader(dataset, BATCH, num_workers=workers, device="cuda")


def measured(way: str, dataset: Any, workers: int, step_cycles: int) -> Cell:
    iterator = iter(loader_of(way, dataset, workers))
    train(iterator, WARM_S, WARM_ROUNDS * workers, step_cycles)
    torch.cuda.synchronize()
    pairs, size = train(iterator, WINDOW_S, 5, step_cycles)
    torch.cuda.synchronize()
    ran_ms = pairs[0][1].elapsed_time(pairs[-1][1])
    waited_ms = sum(asked.elapsed_time(given) for asked, given in pairs[1:])
    rate = (len(pairs) - 1) / ran_ms * 1000
    iterator._shutdown_workers()
    del iterator
    gc.collect()
    return Cell(rate, rate * size / 1e9, waited_ms / ran_ms)


def train(iterator: Any, seconds: float, least: int, step_cycles: int) -> tuple[list[Any], int]:
    """A training loop without a model: the events of each batch, and a batch's bytes."""
    pairs = []
    end = time.monotonic() + seconds
    total = torch.zeros((), device="cuda")
    while time.monotonic() < end or len(pairs) < least:
        asked, given = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        asked.record()
        batch = next(iterator)
        if not batch.is_cuda:
            batch = batch.to("cuda", non_blocking=True)
        given.record()
        pairs.append((asked, given))
        if step_cycles:
            torch.cuda._sleep(step_cycles)
        total += batch[0, 0, 0, 0]
    return pairs, batch.nbytes


def verdict(dtype: str, step: int, workers: int, cells: dict[str, Cell], of_link: float) -> str:
    """Which goal this row has, and whether it met it."""
    if dtype != "float32" or "device" not in cells:
        return ""
    ours, theirs = cells["device"], cells.get("torch")
    met = []
    if step == 0 and workers == WORKERS[-1]:
        met.append((f">= {LEAST_SHARE:.0%} of the link", of_link >= LEAST_SHARE))
        if theirs is not None:
            met.append((f">= {LEAST_RATIO} x", ours.gb_per_s >= LEAST_RATIO * theirs.gb_per_s))
    if step == 5 and workers == 8:
        met.append((f"waits < {MOST_WAIT:.0%}", ours.waited < MOST_WAIT))
        if theirs is not None:
            met.append((f"torch's > {TORCH_WAITS:.0%}", theirs.waited > TORCH_WAITS))
    return "; ".join(f"{goal}: {'met' if ok else 'MISSED'}" for goal, ok in met)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)))
    parser.add_argument("--steps", default=",".join(map(str, STEPS_MS)), help="milliseconds")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device on this machine: nothing to measure", file=sys.stderr)
        return 0
    per_ms = cycles_per_ms()
    cpus = len(os.sched_getaffinity(0))
    print(f"{torch.cuda.get_device_name()}, {cpus} CPUs, torch {torch.__version__}, holdfast {holdfast.__version__}")
    print("| batch | step | workers | torch | pin_memory=True | device= | x torch | of the link | goal |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    ways = options.ways.split(",")
    rows = []
    for dtype in options.dtypes.split(","):
        dataset = Prepared(torch.ones(SHAPE, dtype=DTYPES[dtype]))
        speed = link(BATCH * dataset[0].nbytes)
        for step in map(int, options.steps.split(",")):
            for workers in map(int, options.workers.split(",")):
                cells = {way: measured(way, dataset, workers, int(step * per_ms)) for way in ways}
                rows.append(
                    {"dtype": dtype, "step_ms": step, "workers": workers, "link_gb_per_s": speed} | _plain(cells)
                )
                print(_line(dtype, speed, step, workers, cells), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def _plain(cells: dict[str, Cell]) -> dict[str, Any]:
    return {way: asdict(cell) for way, cell in cells.items()}


def _line(dtype: str, speed: float, step: int, workers: int, cells: dict[str, Cell]) -> str:
    def text(way: str) -> str:
        cell = cells.get(way)
        return "" if cell is None else f"{cell.gb_per_s:.1f} GB/s, waits {cell.waited:.1%}"

    ours, theirs = cells.get("device"), cells.get("torch")
    ratio = f"{ours.gb_per_s / theirs.gb_per_s:.1f}" if ours and theirs else ""
    of_link = ours.gb_per_s / speed if ours else 0.0
    share = f"{of_link:.0%} of {speed:.1f} GB/s"
    goal = verdict(dtype, step, workers, cells, of_link)
    name = f"{BATCH}x{'x'.join(map(str, SHAPE))} {dtype}"
    cells_text = " | ".join(text(way) for way in WAYS)
    return f"| {name} | {step} ms | {workers} | {cells_text} | {ratio} | {share} | {goal} |"


if __name__ == "__main__":
    sys.exit(main())
