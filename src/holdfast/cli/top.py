"""Watch loaders and pools that run with HOLDFAST_RUN_DIR: their rates and waits, and the memory of each worker.

It reads what they write there once a second. It starts no process and disturbs none.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.cli import show
from holdfast.diagnose.report import done_by
from holdfast.errors import HoldfastError

# A loader that has written nothing for so long does something long, or has ended.
_STALE_S = 5.0
_CLEAR = "\033[H\033[J"


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
        json.dump(snapshots(folder), sys.stdout, indent=2)
        print()
        return 0
    before: dict[str, Any] = {}
    while True:
        now = snapshots(folder)
        text = "\n".join(lines_of(now, before, time.time())) or f"no loader or pool has written to {folder} yet"
        if chosen.once:
            show(text)
            return 0
        print(_CLEAR, end="")
        show(text)
        before = {shot["name"]: shot for shot in now}
        time.sleep(max(0.1, chosen.interval))


def snapshots(folder: Path) -> list[dict[str, Any]]:
    """What each loader and pool wrote last; the newest comes first."""
    found = []
    for path in folder.glob("stats-*.json"):
        try:
            found.append({"name": path.stem.removeprefix("stats-"), **json.loads(path.read_text())})
        except (OSError, ValueError):
            continue  # it was removed just now, or is being replaced: the next update has it
    return sorted(found, key=lambda shot: -shot["at"])


def lines_of(shots: list[dict[str, Any]], before: dict[str, Any], now: float) -> list[str]:
    """A block of lines for each. `before`: the figures of the last update, for rates."""
    lines: list[str] = []
    for shot in shots:
        stats, old = shot["stats"], before.get(shot["name"])
        age = now - shot["at"]
        state = "" if age < _STALE_S else f", silent for {age:.0f} s" + ("" if shot["running"] else ": ended")
        kind = shot.get("kind", "loader")
        work, trouble = (_of_pool if kind == "pool" else _of_loader)(shot, old)
        lines.append(f"{kind} {shot['name']} (pid {shot['pid']}{state}): {work}")
        last = f"; last: {shot['last_incident'][:160]}" if shot["last_incident"] else ""
        lines.append(f"  {stats['restarts']} workers restarted, {trouble}, {stats['retries']} retries{last}")
        for w in stats["per_worker"]:
            busy = w["busy_s"] / max(w["busy_s"] + w["waiting_s"], 1e-9)
            lines.append(
                f"  worker {w['worker']:<3} {done_by(stats, w):>18}  busy {busy:4.0%}  "
                f"grown {w['memory_bytes'] / 2**20:6.0f} MiB (peak {w['peak_bytes'] / 2**20:.0f})  "
                f"{w['descriptors']:.0f} descriptors"
            )
        for name, figures in stats.get("caches", {}).items():
            lines.append(f"  {name}: " + ", ".join(f"{key} {value}" for key, value in figures.items()))
    return lines


def _of_loader(shot: dict[str, Any], old: dict[str, Any] | None) -> tuple[str, str]:
    """What the loader does, and what went wrong."""
    stats = shot["stats"]
    work = f"{stats['batches']:,} batches, {_rate(shot, old, 'batches')}; waited {_share(shot, old)}{_device(stats)}"
    return work, f"{stats['bad_samples']} bad samples"


def _of_pool(shot: dict[str, Any], old: dict[str, Any] | None) -> tuple[str, str]:
    stats = shot["stats"]
    work = f"{stats['done']:,} of {stats['submitted']:,} tasks, {_rate(shot, old, 'done')}; "
    work += f"{stats['running']:,} with workers, {stats['waiting']:,} waiting"
    return work, f"{stats['raised']} raised, {stats['lost']} lost, {stats['cancelled']} cancelled"


def _rate(shot: dict[str, Any], old: dict[str, Any] | None, what: str) -> str:
    """How many per second since the last update, or since the start."""
    seconds = shot["at"] - (old["at"] if old else shot["since"])
    count = shot["stats"][what] - (old["stats"][what] if old else 0)
    return f"{count / seconds:.1f}/s" if seconds > 0 else "-/s"


def _share(shot: dict[str, Any], old: dict[str, Any] | None) -> str:
    """The share of time in which next() waited for a batch."""
    seconds = shot["at"] - (old["at"] if old else shot["since"])
    waited = shot["stats"]["waited_s"] - (old["stats"]["waited_s"] if old else 0)
    return f"{waited / seconds:.0%} of the time" if seconds > 0 else "-"


def _device(stats: dict[str, Any]) -> str:
    share = stats.get("device_waited_share")
    return "" if share is None else f"; the device waited for data {share:.1%} of the time"
