"""Watch loaders and pools that run with HOLDFAST_RUN_DIR: their rates and waits, and the memory of each worker.

It reads what they write there once a second. It starts no process and disturbs none.
"""

import argparse
import json
import os
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.cli import show
from holdfast.diagnose.stats import LoaderStats, PoolStats, Stats, done_by, from_dict
from holdfast.errors import HoldfastError

# A loader that has written nothing for so long does something long, or has ended.
_STALE_S = 5.0
# What a file that says something else than we wrote may raise when it is shown.
_NONSENSE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_CLEAR = "\033[H\033[J"


@dataclass(frozen=True, slots=True)
class Shot:
    """What one loader or pool wrote last. Times are in seconds since 1970."""

    name: str
    kind: str
    pid: int
    since: float
    at: float
    running: bool
    last_incident: str
    stats: Stats


def shot_of(written: dict[str, Any]) -> Shot:
    kind = written.get("kind", "loader")
    if ("submitted" if kind == "pool" else "batches") not in written["stats"]:
        raise ValueError("no totals of this kind")
    stats = from_dict(written["stats"], of_pool=kind == "pool")
    when = written["since"], written["at"]
    return Shot(written["name"], kind, written["pid"], *when, written["running"], written["last_incident"], stats)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", help="the run folder; by default $HOLDFAST_RUN_DIR")
    parser.add_argument("--once", action="store_true", help="print the figures once, and end")
    parser.add_argument("--json", action="store_true", help="print the figures once, as JSON")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between two updates (1)")


def run(chosen: argparse.Namespace) -> int:
    folder = Path(chosen.folder or os.environ.get("HOLDFAST_RUN_DIR") or "")
    if not str(chosen.folder or os.environ.get("HOLDFAST_RUN_DIR") or ""):
        raise HoldfastError("no run folder is given: name it, or set HOLDFAST_RUN_DIR as for the training")
    if not folder.is_dir():
        raise HoldfastError(f"there is no folder {folder}: was the training started with HOLDFAST_RUN_DIR={folder}?")
    if chosen.json:
        found, odd = snapshots(folder)
        json.dump(found, sys.stdout, indent=2)
        print(flush=True)
        for line in odd:
            show(f"holdfast top: {line}", sys.stderr)
        return 0
    before: dict[str, Shot] = {}
    while True:
        written, odd = snapshots(folder)
        now = [shot_of(shot) for shot in written]
        lines = [*lines_of(now, before, time.time()), *odd]
        text = "\n".join(lines) or f"no loader or pool has written to {folder} yet"
        if chosen.once:
            show(text)
            return 0
        print(_CLEAR, end="")
        show(text)
        before = {shot.name: shot for shot in now}
        time.sleep(max(0.1, chosen.interval))


def snapshots(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """What each loader and pool wrote last, the newest first; and a line for each file that cannot be shown."""
    found, odd = [], []
    for path in sorted(folder.glob("stats-*.json")):
        try:
            found.append(_snapshot(path))
        except FileNotFoundError:
            continue  # it has just gone
        except (OSError, *_NONSENSE) as error:
            why = error.strerror if isinstance(error, OSError) else "no totals of a loader or pool"
            odd.append(f"left out {path.name}: {why}")
    return sorted(found, key=lambda shot: -shot["at"]), odd


def _snapshot(path: Path) -> dict[str, Any]:
    """A snapshot that can be shown; anybody may have written it. Raises one of `_NONSENSE` if it cannot."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("no plain file")
    name = {"name": path.stem.removeprefix("stats-")}
    shot: dict[str, Any] = name | json.loads(path.read_text()) | name
    if not isinstance(shot.get("kind", ""), str):
        raise ValueError("no kind of ours")
    lines_of([shot_of(shot)], {}, time.time())
    return shot


def lines_of(shots: list[Shot], before: dict[str, Shot], now: float) -> list[str]:
    """One block for each. `before`: the look before, for rates."""
    lines: list[str] = []
    for shot in shots:
        stats, old = shot.stats, before.get(shot.name)
        if old is not None and type(old.stats) is not type(stats):
            old = None  # another process has the number now
        age = now - shot.at
        state = "" if age < _STALE_S else f", silent for {age:.0f} s" + ("" if shot.running else ": ended")
        match stats:
            case LoaderStats():
                work, trouble = _of_loader(shot, stats, old), f"{stats.bad_samples} bad samples"
            case PoolStats():
                work = _of_pool(shot, stats, old)
                trouble = f"{stats.raised} raised, {stats.lost} lost, {stats.cancelled} cancelled"
        lines.append(f"{shot.kind} {shot.name} (pid {shot.pid}{state}): {work}")
        last = f"; last: {shot.last_incident[:160]}" if shot.last_incident else ""
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


def _of_loader(shot: Shot, stats: LoaderStats, old: Shot | None) -> str:
    """What it does."""
    before = old.stats if old is not None and isinstance(old.stats, LoaderStats) else LoaderStats()
    seconds = _seconds(shot, old)
    share = f"{(stats.waited_s - before.waited_s) / seconds:.0%} of the time" if seconds > 0 else "-"
    work = f"{stats.batches:,} batches, {_rate(stats.batches - before.batches, seconds)}; waited {share}"
    if stats.device_waited_share is not None:
        work += f"; the device waited for data {stats.device_waited_share:.1%} of the time"
    return work


def _of_pool(shot: Shot, stats: PoolStats, old: Shot | None) -> str:
    before = old.stats if old is not None and isinstance(old.stats, PoolStats) else PoolStats()
    rate = _rate(stats.done - before.done, _seconds(shot, old))
    work = f"{stats.done:,} of {stats.submitted:,} tasks, {rate}; "
    return work + f"{stats.running:,} with workers, {stats.waiting:,} waiting"


def _seconds(shot: Shot, old: Shot | None) -> float:
    """Since the last look, or since the start."""
    return shot.at - (old.at if old is not None else shot.since)


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.1f}/s" if seconds > 0 else "-/s"
