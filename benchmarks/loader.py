"""holdfast.DataLoader against torch's, in one command and one table: python benchmarks/loader.py

speed.py         batches per second, and seconds to the first batch
survival.py      the gap that a killed worker leaves
memory.py        the peak of all processes
supervision.py   what watching over workers costs

Rows that miss their goal say MISSED; a row that could not be measured says why. The exit code is 0 either way. Nothing
heavy is imported here before `main`: every spawned worker imports this file again.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# No single row takes a third of this; one that does hangs.
ROW_PATIENCE_S = 200


class Stuck(Exception):
    """A row took too long."""


def all_rows(rounds: int) -> dict[str, Callable[[], Any]]:
    """Each row by its name, and how to measure it."""
    from datasets import LARGE_IMAGES, LOADS, SMALL_IMAGES
    from memory import peak_memory
    from speed import first_batch, speed
    from supervision import supervision_cost
    from survival import gap_after_kill

    rows: dict[str, Callable[[], Any]] = {load.name: partial(speed, load, rounds) for load in LOADS}
    for method in ("fork", "spawn"):
        rows[f"first batch, {method}"] = partial(first_batch, method, rounds)
    rows["gap after SIGKILL"] = gap_after_kill
    rows["peak memory"] = peak_memory
    for load in (LARGE_IMAGES, SMALL_IMAGES):
        rows[f"supervision, {load.name}"] = partial(supervision_cost, load)
    return rows


def chosen(rows: dict[str, Callable[[], Any]], wanted: str | None) -> dict[str, Callable[[], Any]]:
    """The rows whose names contain one of the given words, in whatever case; all, where none are given."""
    if wanted is None:
        return rows
    words = [word.strip().lower() for word in wanted.split(",") if word.strip()]
    for word in words:
        if not any(word in name.lower() for name in rows):
            print(f"no row is called {word!r}; there are: {'; '.join(rows)}", file=sys.stderr)
    return {name: row for name, row in rows.items() if any(word in name.lower() for word in words)}


def measured(name: str, row: Callable[[], Any]) -> Any:
    """The row, or one that says why it could not be measured: one failure must not cost the whole table."""
    from table import Row

    signal.alarm(ROW_PATIENCE_S)
    try:
        return row()
    except Exception as error:
        text = (str(error).splitlines() or [""])[0]
        return Row(name, missed=True, note=f"not measured: {type(error).__name__}: {text}")
    finally:
        signal.alarm(0)


def give_up(number: int, frame: object) -> None:
    raise Stuck(f"took more than {ROW_PATIENCE_S} s")


def this_machine() -> dict[str, Any]:
    import torch

    import holdfast

    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "kernel": os.uname().release,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "holdfast": holdfast.__version__,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", help="only rows whose names contain one of these words: a,b")
    parser.add_argument("--rounds", type=int, default=5, help="torch and ours in turns, so many times each (5)")
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    options = parser.parse_args(argv)

    from table import HEAD, line, to_json, to_markdown

    signal.signal(signal.SIGALRM, give_up)
    machine = this_machine()
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(line(HEAD), flush=True)
    began = time.monotonic()
    rows = []
    for name, row in chosen(all_rows(max(1, options.rounds)), options.rows).items():
        rows.append(measured(name, row))
        print(line(rows[-1].cells), flush=True)
    missed = sum(row.missed for row in rows)
    print(f"{len(rows)} rows, {missed} missed, in {time.monotonic() - began:.0f} s")
    if options.json is not None:
        options.json.write_text(to_json(rows, machine))
    if options.markdown is not None:
        options.markdown.write_text(to_markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
