"""A folder in which incidents are written the moment they happen: they outlive a trainer that is killed.

HOLDFAST_RUN_DIR names it. Each loader, pool and group of ranks has a file of JSON lines there. A loader has beside it,
from its first incident on, its dataset, so that `holdfast repro` can load the sample again; loaders and pools have a
file of totals, for `holdfast top`.
"""

import base64
import itertools
import json
import logging
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import cloudpickle

from holdfast.local.raised import shown

log = logging.getLogger("holdfast")
# A larger dataset is not written: `holdfast repro --dataset module:name` makes it again.
MOST_BYTES = 64 << 20
# How often totals are written.
TOTALS_S = 1.0
_numbers = itertools.count()


def to_text(indices: tuple[Any, ...]) -> str | None:
    """Indices as they are, not as JSON knows them: numpy's numbers, tuples, strings."""
    try:
        return base64.b64encode(pickle.dumps(indices)).decode()
    except Exception:
        return None  # objects of the user's that do not pickle: such a sample cannot be loaded again


def from_text(text: str) -> tuple[Any, ...]:
    indices: tuple[Any, ...] = pickle.loads(base64.b64decode(text))
    return indices


class RunFolder:
    """The part of one loader, pool or group. Nothing is opened before there is something to write."""

    def __init__(self, folder: str, kind: str, dataset: object = None) -> None:
        """`kind`: "loader", "pool", or whose part it is."""
        self._kind = kind
        self.file = Path(folder) / f"incidents-{os.getpid()}-{next(_numbers)}.jsonl"
        self._dataset = dataset
        self._since = time.time()
        self._next_totals = 0.0
        self._last_incident = ""
        self._count = 0
        self._failed = False
        self._totals_failed = False

    @classmethod
    def from_environment(cls, kind: str, dataset: object = None) -> "RunFolder | None":
        """None when nobody wants it."""
        folder = os.environ.get("HOLDFAST_RUN_DIR")
        return cls(folder, kind, dataset) if folder else None

    def write(self, incident: dict[str, Any]) -> None:
        """One line, whole or not at all, and with the kernel before this returns. Trouble here is said once."""
        again = incident.get("again")
        if again is not None:
            incident["again"] = {**again, "pickled": to_text(again["indices"])}
        line = json.dumps({"number": self._count, **incident}, default=shown) + "\n"
        self._last_incident = str(incident.get("headline", ""))
        try:
            if not self._count:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self._write_dataset()
            self._append(line)
        except OSError as error:
            if not self._failed:
                log.warning("incidents cannot be kept in %s: %s", self.file, str(error))
            self._failed = True
        self._count += 1

    def write_totals(self, stats: Callable[[], dict[str, Any]], running: bool = True) -> None:
        """For `holdfast top`; at most once a second, whole or not at all."""
        now = time.monotonic()
        if self._totals_failed or (running and now < self._next_totals):
            return
        self._next_totals = now + TOTALS_S
        shot = {
            "kind": self._kind,
            "pid": os.getpid(),
            "since": self._since,
            "at": time.time(),
            "running": running,
            "last_incident": self._last_incident,
            "stats": stats(),
        }
        path = self.file.with_name(self.file.name.replace("incidents-", "stats-")).with_suffix(".json")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(".draft")
            draft.write_text(json.dumps(shot))
            draft.replace(path)
        except OSError as error:
            log.warning("totals cannot be kept in %s: %s", path, str(error))
            self._totals_failed = True

    def _append(self, line: str) -> None:
        fd = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)

    def _write_dataset(self) -> None:
        if self._dataset is None:
            return
        path = self.file.with_suffix(".dataset")
        try:
            with open(path, "wb") as file:
                cloudpickle.dump(self._dataset, _Bounded(file))
        except Exception:  # user code, or too large: a help, not a duty; repro asks for --dataset then
            path.unlink(missing_ok=True)


class _Bounded:
    """A file that refuses more than MOST_BYTES: a dataset in memory must not be copied to find out its size."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._left = MOST_BYTES

    def write(self, data: Any) -> int:
        self._left -= memoryview(data).nbytes
        if self._left < 0:
            raise ValueError("too large to keep")
        return self._file.write(data)
