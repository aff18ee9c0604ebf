"""The run folder: what happened is written there at once, and outlives a trainer that is killed.

HOLDFAST_RUN_DIR names it. Each loader, pool and group of ranks is a *part*, with two logs (system/run_files.py):

    trainer-PID-N.jsonl   by the trainer: a header, incidents with their verdicts, totals
    keeper-PID-N.jsonl    by its keepers: raw facts as they happen (local/keeper/fact_log.py)

From its first incident on a loader has its dataset beside them, so that `holdfast repro` can load the sample again.
"""

import ast
import base64
import itertools
import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import cloudpickle

from holdfast.diagnose.stats import Stats, to_dict
from holdfast.policy import warn_of_misspelt
from holdfast.remote_exception import shown, text_of
from holdfast.system.procfs import command
from holdfast.system.run_files import AppendLog, open_new
from holdfast.system.signal_origin import raised_by_handler, warn

# A larger dataset is not written: `holdfast repro --dataset module:name` makes it again.
MOST_BYTES = 64 << 20
# How often totals are written.
TOTALS_S = 1.0
# Kinds of records in the trainer's log.
PART, INCIDENT, TOTALS = "part", "incident", "totals"
_CALLED = {INCIDENT: "incidents", TOTALS: "totals"}
# Of the records: a change of what a field means is a new number, a new field is not.
SCHEMA = 2
_numbers = itertools.count()


def to_text(indices: tuple[Any, ...]) -> str | None:
    """Indices as Python writes them, for `from_text`; None when one is of another kind. Numbers of numpy and torch
    become plain ones."""
    try:
        text = repr(_plain(indices))
        return text if _same(ast.literal_eval(text), _plain(indices)) else None
    except Exception:
        return None  # user code, or too deep: such indices are no literals


def from_text(text: str) -> tuple[Any, ...]:
    """Reads anybody's text and runs nothing. Raises ValueError if it is no tuple of literals or cannot be shown."""
    try:
        indices = ast.literal_eval(text)
        repr(indices)  # of a number like 0xffff... it may be too long for Python
    except (TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"no literal: {type(error).__name__}") from None
    return _checked(indices)


def _checked(indices: object) -> tuple[Any, ...]:
    if not isinstance(indices, tuple) or not indices:
        raise ValueError("no tuple of indices")
    return indices


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in (tuple, list, set):
        return kind(map(_plain, value))
    if kind is dict:
        return {_plain(key): _plain(item) for key, item in value.items()}
    if kind.__module__.partition(".")[0] in ("numpy", "torch") and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def _same(one: Any, other: Any) -> bool:
    """Equal, and of the same types throughout: a subclass writes itself as its base does."""
    if type(one) is not type(other) or one != other:
        return False
    match one:
        case tuple() | list():
            return all(map(_same, one, other))
        case set():
            return {(type(item), item) for item in one} == {(type(item), item) for item in other}
        case dict():
            return all(map(_same, one.items(), other.items()))
    return True


def to_pickle(indices: tuple[Any, ...]) -> str | None:
    """Indices that are no literals. Open the answer only if you trust its writer."""
    try:
        return base64.b64encode(pickle.dumps(indices)).decode()
    except Exception:
        return None  # objects of the user's that do not pickle: such a sample cannot be loaded again


def from_pickle(text: str) -> tuple[Any, ...]:
    """Runs whatever its writer wants."""
    return _checked(pickle.loads(base64.b64decode(text)))


def _loadable(incident: dict[str, Any]) -> dict[str, Any]:
    """With the indices as `holdfast repro` reads them."""
    again = incident.get("again")
    if again is None:
        return incident
    literal = to_text(again["indices"])
    pickled = to_pickle(again["indices"]) if literal is None else None
    return {**incident, "again": {**again, "literal": literal, "pickled": pickled}}


def _as_json(incident: dict[str, Any]) -> dict[str, Any]:
    """As a line of the log has it."""
    found: dict[str, Any] = json.loads(json.dumps(for_json(_loadable(incident)), default=shown))
    return found


def for_json(record: dict[str, Any]) -> dict[str, Any]:
    """An incident or a bad sample whose indices JSON can hold."""
    found: dict[str, Any] = {name: _for_json(record[name]) for name in ("index", "replaced_by") if name in record}
    if again := record.get("again"):
        found["again"] = {**again, "indices": [_for_json(index) for index in again["indices"]]}
    return record | found


def _for_json(index: object) -> object:
    """Numbers, text and their containers stay as they are; anything else becomes text."""
    try:
        return json.loads(json.dumps(index, default=shown))
    except Exception as error:  # user code, keys that are no text, or what holds itself
        if raised_by_handler(error):
            raise
        return shown(index)


class RunFolder:
    """The part of one loader, pool or group. Nothing is opened before there is something to write."""

    def __init__(self, folder: str, kind: str, dataset: object = None) -> None:
        """`kind`: "loader", "pool", or whose part it is."""
        self._kind = kind
        self._folder = os.path.abspath(folder)  # the script may change its directory, and the keeper has its own
        self._dataset = dataset
        self._begin()

    def _begin(self) -> None:
        self._owner = os.getpid()
        self.file = Path(self._folder) / f"trainer-{self._owner}-{next(_numbers)}.jsonl"
        self._log = AppendLog(self.file, (TOTALS,))
        self._next_totals = 0.0
        self._begun = False
        self._count = 0
        self._failed: set[str] = set()

    @classmethod
    def from_environment(cls, kind: str, dataset: object = None) -> "RunFolder | None":
        """None when nobody wants it."""
        warn_of_misspelt(os.environ)
        folder = os.environ.get("HOLDFAST_RUN_DIR")
        return cls(folder, kind, dataset) if folder else None

    def log_of_facts(self) -> str:
        """Where the keepers of this part write. The trainer's log is begun as well: a reader looks for it."""
        self._mind_forks()
        self._begin_log()
        return str(self.file.with_name(self.file.name.replace("trainer-", "keeper-")))

    def write(self, incident: dict[str, Any]) -> None:
        """One incident, with the verdict on it."""
        self._mind_forks()
        self._append(INCIDENT, lambda: {"number": self._count, **_as_json(incident)})
        self._count += 1

    def write_totals(self, stats: Callable[[], Stats], running: bool = True) -> None:
        """At most once a second."""
        now = time.monotonic()
        if running and now < self._next_totals:
            return
        self._next_totals = now + TOTALS_S
        self._mind_forks()
        self._append(TOTALS, lambda: {"running": running, "stats": to_dict(stats())})

    def _mind_forks(self) -> None:
        """A forked child has a part of its own: a log has one writer."""
        if os.getpid() != self._owner:
            self._begin()

    def _begin_log(self) -> None:
        """With its first record, which says whose part it is."""
        if self._begun:
            return
        self._begun = True
        about = {"schema": SCHEMA, "kind": self._kind, "pid": self._owner, "command": command(self._owner)}
        self._append(PART, lambda: about)

    def _append(self, record: str, fields: Callable[[], dict[str, Any]]) -> None:
        """If it cannot be kept, one warning for each kind says so."""
        self._begin_log()
        try:
            if record == INCIDENT and not self._count:
                self._write_dataset()
            self._log.append(record, **fields())
        except Exception as error:  # no room on the disk, or user code: a help, not a duty
            if raised_by_handler(error):
                raise
            if record in _CALLED and record not in self._failed:
                warn(f"{_CALLED[record]} cannot be kept in {self.file}: {text_of(error)}")
            self._failed.add(record)

    def _write_dataset(self) -> None:
        if self._dataset is None:
            return
        path = self.file.with_suffix(".dataset")
        try:
            with open(open_new(path), "wb") as file:
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
