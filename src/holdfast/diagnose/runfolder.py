"""A folder in which incidents are written the moment they happen: they outlive a trainer that is killed.

HOLDFAST_RUN_DIR names it. Each loader has a file of JSON lines there, and beside it, from its first incident on, its
dataset, so that `holdfast repro` can load the sample again.
"""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import cloudpickle

# A larger dataset is not written: `holdfast repro --dataset module:name` makes it again.
MOST_BYTES = 64 << 20
_numbers = itertools.count()


class RunFolder:
    """One loader's part of it. Nothing is opened before there is something to write."""

    def __init__(self, folder: str, dataset: object) -> None:
        self.file = Path(folder) / f"incidents-{os.getpid()}-{next(_numbers)}.jsonl"
        self._dataset = dataset
        self._count = 0

    def write(self, incident: dict[str, Any]) -> None:
        """One line, whole or not at all, and with the kernel before this returns."""
        if not self._count:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._write_dataset()
        line = json.dumps({"number": self._count, **incident}, default=repr) + "\n"
        self._count += 1
        fd = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)

    def _write_dataset(self) -> None:
        try:
            data = cloudpickle.dumps(self._dataset)
        except Exception:
            return  # a help, not a duty: repro asks for --dataset then
        if len(data) <= MOST_BYTES:
            self.file.with_suffix(".dataset").write_bytes(data)
