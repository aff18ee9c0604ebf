"""What happened in a run: reads the run folder, also of a trainer that was killed.

It joins what the trainer and its keepers wrote, and diagnoses what the trainer had no time to tell. It needs no torch.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.cli import show
from holdfast.diagnose.report import Report
from holdfast.diagnose.run_reader import RunPart, now_lines, parts_of
from holdfast.errors import HoldfastError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", help="the run folder; by default $HOLDFAST_RUN_DIR")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def folder_of(chosen: argparse.Namespace) -> Path:
    """The folder that the user means."""
    name = chosen.folder or os.environ.get("HOLDFAST_RUN_DIR") or ""
    if not name:
        raise HoldfastError("no run folder is given: name it, or set HOLDFAST_RUN_DIR as for the training")
    if not Path(name).is_dir():
        raise HoldfastError(f"there is no folder {name}: was the training started with HOLDFAST_RUN_DIR={name}?")
    return Path(name)


def run(chosen: argparse.Namespace) -> int:
    """0: nothing went wrong. 1: something did, or there is nothing to read."""
    folder = folder_of(chosen)
    parts, odd = parts_of(folder)
    if chosen.json:
        json.dump([to_dict(part) for part in parts], sys.stdout, indent=2)
        print(flush=True)
    else:
        for part in parts:
            show("\n".join(lines_of(part)))
        if not parts:
            show(f"no loader or pool has written to {folder}")
    for line in odd:
        show(f"holdfast report: {line}", sys.stderr)
    return int(not parts or any(part.record.incidents for part in parts))


def lines_of(part: RunPart) -> list[str]:
    """One part, for people."""
    clock = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) for at in (part.since, part.at)]
    state = "running" if part.running else "ended"
    head = f"{part.kind} {part.name}: pid {part.pid}, {state}, {clock[0]} to {clock[1]}"
    lines = [head, *([f"  {part.command}"] if part.command else [])]
    lines += str(Report(part.record, part.stats)).splitlines()[1:]
    if part.untold:
        lines.append(f"  {part.untold} of these were not told by the trainer: the keeper's notes were diagnosed here")
    if not part.over and part.workers:
        lines += ["  what its workers did last", *(f"    {line}" for line in now_lines(part))]
    return lines


def to_dict(part: RunPart) -> dict[str, Any]:
    """One part, for programs."""
    about = {name: getattr(part, name) for name in ("name", "kind", "pid", "command", "since", "at", "running")}
    told = {"untold": part.untold, "workers": list(part.workers)}
    return about | told | {"report": json.loads(Report(part.record, part.stats).to_json())}
