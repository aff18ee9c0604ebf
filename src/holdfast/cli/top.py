"""Watch loaders and pools that run with HOLDFAST_RUN_DIR: their rates and waits, and the memory of each worker.

It reads what they write there once a second. It starts no process and disturbs none.
"""

import argparse
import json
import sys
import time
from typing import Any

from holdfast.cli import show
from holdfast.cli.read_run import folder_of
from holdfast.diagnose.run_reader import RunPart, parts_of
from holdfast.diagnose.stats import LoaderStats, PoolStats, done_by, to_dict

# A loader that has written nothing for so long does something long, or has ended.
_STALE_S = 5.0
_CLEAR = "\033[H\033[J"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", help="the run folder; by default $HOLDFAST_RUN_DIR")
    parser.add_argument("--once", action="store_true", help="print the figures once, and end")
    parser.add_argument("--json", action="store_true", help="print the figures once, as JSON")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two updates (1)")


def run(chosen: argparse.Namespace) -> int:
    folder = folder_of(chosen)
    if chosen.json:
        found, odd = parts_of(folder)
        json.dump([_figures(part) for part in found if is_measured(part)], sys.stdout, indent=2)
        print(flush=True)
        for line in odd:
            show(f"holdfast top: {line}", sys.stderr)
        return 0
    before: dict[str, RunPart] = {}
    while True:
        found, odd = parts_of(folder)
        now = [part for part in found if is_measured(part)]
        lines = [*lines_of(now, before, time.time()), *odd]
        text = "\n".join(lines) or f"no loader or pool has written to {folder} yet"
        if chosen.once:
            show(text)
            return 0
        print(_CLEAR, end="")
        show(text)
        before = {part.name: part for part in now}
        time.sleep(max(0.1, chosen.interval))


def is_measured(part: RunPart) -> bool:
    """A loader or a pool. (Ranks have no totals.)"""
    return part.kind in ("loader", "pool")


def _figures(part: RunPart) -> dict[str, Any]:
    """For programs."""
    about = {name: getattr(part, name) for name in ("name", "kind", "pid", "since", "running", "last_incident")}
    return {**about, "at": part.totals_at, "stats": to_dict(part.stats), "workers": list(part.workers)}


def lines_of(parts: list[RunPart], before: dict[str, RunPart], now: float) -> list[str]:
    """One block for each. `before`: the look before, for rates."""
    lines: list[str] = []
    for part in parts:
        stats, old = part.stats, before.get(part.name)
        if old is not None and type(old.stats) is not type(stats):
            old = None  # another process has the number now
        age = now - part.totals_at
        state = "" if age < _STALE_S else f", silent for {age:.0f} s" + ("" if part.running else ": ended")
        match stats:
            case LoaderStats():
                work, trouble = _of_loader(part, stats, old), f"{stats.bad_samples} bad samples"
            case PoolStats():
                work = _of_pool(part, stats, old)
                trouble = f"{stats.raised} raised, {stats.lost} lost, {stats.cancelled} cancelled"
        lines.append(f"{part.kind} {part.name} (pid {part.pid}{state}): {work}")
        last = f"; last: {part.last_incident[:160]}" if part.last_incident else ""
        lines.append(f"  {stats.restarts} workers restarted, {trouble}, {stats.retries} retries{last}")
        for w in stats.per_worker:
            busy = w.busy_s / max(w.busy_s + w.waiting_s, 1e-9)
            line = f"  worker {w.worker:<3} {done_by(stats, w):>18}  busy {busy:4.0%}"
            if w.descriptors:  # (every process has some: the keeper has looked at this one)
                line += f"  grown {w.memory_bytes / 2**20:6.0f} MiB (peak {w.peak_bytes / 2**20:.0f})"
                line += f"  {w.descriptors:.0f} descriptors"
            lines.append(line)
        for name, figures in (stats.caches if isinstance(stats, LoaderStats) else {}).items():
            lines.append(f"  {name}: " + ", ".join(f"{key} {value}" for key, value in figures.items()))
    return lines


def _of_loader(part: RunPart, stats: LoaderStats, old: RunPart | None) -> str:
    """What it does."""
    before = old.stats if old is not None and isinstance(old.stats, LoaderStats) else LoaderStats()
    seconds = _seconds(part, old)
    share = f"{(stats.waited_s - before.waited_s) / seconds:.0%} of the time" if seconds > 0 else "-"
    work = f"{stats.batches:,} batches, {_rate(stats.batches - before.batches, seconds)}; waited {share}"
    if stats.device_waited_share is not None:
        work += f"; the device waited for data {stats.device_waited_share:.1%} of the time"
    return work


def _of_pool(part: RunPart, stats: PoolStats, old: RunPart | None) -> str:
    before = old.stats if old is not None and isinstance(old.stats, PoolStats) else PoolStats()
    rate = _rate(stats.done - before.done, _seconds(part, old))
    work = f"{stats.done:,} of {stats.submitted:,} tasks, {rate}; "
    return work + f"{stats.running:,} with workers, {stats.waiting:,} waiting"


def _seconds(part: RunPart, old: RunPart | None) -> float:
    """Since the last look, or since the start."""
    return part.totals_at - (old.totals_at if old is not None else part.since)


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.1f}/s" if seconds > 0 else "-/s"
