"""What a benchmark has to say: one row each, drawn as text, as Markdown or as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

HEAD = ("", "torch", "holdfast", "result", "lowest, highest", "goal", "", "")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `numbers` are for JSON: all that was measured."""

    name: str
    theirs: str = ""
    ours: str = ""
    result: str = ""
    spread: str = ""
    goal: str = ""
    missed: bool = False
    note: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def cells(self) -> tuple[str, ...]:
        verdict = "MISSED" if self.missed else ""
        return (self.name, self.theirs, self.ours, self.result, self.spread, self.goal, verdict, self.note)


# Wide enough for every row, so that a line can be printed as soon as it is known.
WIDTHS = (27, 12, 12, 9, 16, 10, 7, 0)


def line(cells: Sequence[str]) -> str:
    """One line of the printed table."""
    first, *rest = (cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True))
    return "  ".join((first, *rest)).rstrip()


def to_markdown(rows: Sequence[Row]) -> str:
    lines = [HEAD, ("---",) * len(HEAD), *(row.cells for row in rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def to_json(rows: Sequence[Row], machine: dict[str, Any]) -> str:
    return json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
