"""A folder in which incidents are written the moment they happen: they outlive a trainer that is killed.

HOLDFAST_RUN_DIR names it. Each loader, pool and group of ranks has a file of JSON lines there. A loader has beside it,
from its first incident on, its dataset, so that `holdfast repro` can load the sample again; loaders and pools have a
file of totals, for `holdfast top`. Who may read and write them: see diagnose/run_folder.py.
"""

import ast
import base64
import itertools
import json
import os
import pickle
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import cloudpickle

from holdfast.diagnose.stats import Stats, to_dict
from holdfast.remote_exception import shown
from holdfast.system.signals import warn

# A larger dataset is not written: `holdfast repro --dataset module:name` makes it again.
MOST_BYTES = 64 << 20
# How often totals are written.
TOTALS_S = 1.0
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
    """Runs nothing, whoever wrote it. Raises ValueError for what is not a tuple of literals."""
    try:
        indices = ast.literal_eval(text)
    except (TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"no literal: {type(error).__name__}") from None
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
    """Indices that are no literals: whoever opens this must trust who wrote it."""
    try:
        return base64.b64encode(pickle.dumps(indices)).decode()
    except Exception:
        return None  # objects of the user's that do not pickle: such a sample cannot be loaded again


def from_pickle(text: str) -> tuple[Any, ...]:
    """Runs whatever its writer wants."""
    indices: tuple[Any, ...] = pickle.loads(base64.b64decode(text))
    return indices


class RunFolder:
    """The part of one loader, pool or group. Nothing is opened before there is something to write."""

    def __init__(self, folder: str, kind: str, dataset: object = None) -> None:
        """`kind`: "loader", "pool", or whose part it is."""
        self._kind = kind
        self._folder = folder
        self._dataset = dataset
        self._begin()

    def _begin(self) -> None:
        self._owner = os.getpid()
        self.file = Path(self._folder) / f"incidents-{self._owner}-{next(_numbers)}.jsonl"
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
            literal = to_text(again["indices"])
            pickled = to_pickle(again["indices"]) if literal is None else None
            incident["again"] = {**again, "literal": literal, "pickled": pickled}
        line = json.dumps({"number": self._count, **incident}, default=shown) + "\n"
        self._last_incident = str(incident.get("headline", ""))
        try:
            if not self._count:
                self._write_dataset()
            self._append(line)
        except OSError as error:
            if not self._failed:
                warn(f"incidents cannot be kept in {self.file}: {error}")
            self._failed = True
        self._count += 1

    def write_totals(self, stats: Callable[[], Stats], running: bool = True) -> None:
        """For `holdfast top`; at most once a second, whole or not at all."""
        now = time.monotonic()
        if self._totals_failed or (running and now < self._next_totals):
            return
        self._next_totals = now + TOTALS_S
        if os.getpid() != self._owner:
            self._begin()  # a forked child has files of its own: two that write the same totals lose them
        shot = {
            "kind": self._kind,
            "pid": os.getpid(),
            "since": self._since,
            "at": time.time(),
            "running": running,
            "last_incident": self._last_incident,
            "stats": to_dict(stats()),
        }
        path = self.file.with_name(self.file.name.replace("incidents-", "stats-")).with_suffix(".json")
        try:
            draft = path.with_suffix(".draft")
            with open(open_new(draft), "w") as file:
                json.dump(shot, file)
            draft.replace(path)
        except OSError as error:
            warn(f"totals cannot be kept in {path}: {error}")
            self._totals_failed = True

    def _append(self, line: str) -> None:
        fd = open_to_append(self.file)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)

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


# Folders and files that are their user's alone: what Holdfast keeps of a run, and what ranks print.
#
# A folder that we make is 0700, with those above it that were missing. One that was there keeps its rights, and must
# belong to us or to root: any other owner may put what he likes in the place of our files. Files are 0600, whatever the
# umask. What others may have put where a file goes (a link, a pipe) is never written to.


_FOLDER, _FILE = 0o700, 0o600
# O_NONBLOCK: a pipe without a reader is an error, not a wait for ever. It means nothing to a regular file.
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_new(path: Path) -> int:
    """A new file; what had its name goes."""
    folder = _folder_of(path)
    try:
        try:
            os.unlink(path.name, dir_fd=folder)
        except FileNotFoundError:
            pass  # as it should be
        return _made_private(os.open(path.name, _FLAGS | os.O_EXCL, _FILE, dir_fd=folder))
    finally:
        os.close(folder)


def open_to_append(path: Path) -> int:
    """A new file, or the one that an earlier run of this user left."""
    folder = _folder_of(path)
    try:
        fd = os.open(path.name, _FLAGS | os.O_APPEND, _FILE, dir_fd=folder)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        os.close(folder)
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1 or about.st_uid != os.geteuid():
        os.close(fd)
        raise PermissionError(f"{path} is not a plain file of ours (a link, or another user's): remove it")
    return _made_private(fd)


def _folder_of(path: Path) -> int:
    """A descriptor of the folder, which is made if it is not there: what is opened through it is opened in this one."""
    _make(path.parent)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    owner = os.fstat(folder).st_uid
    if owner in (os.geteuid(), 0):
        return folder
    os.close(folder)
    raise PermissionError(
        f"{path.parent} belongs to uid {owner}, and this is uid {os.geteuid()}: name a folder of your own, or one in "
        "it that does not exist yet"
    )


def _make(folder: Path) -> None:
    if folder.is_dir():
        return
    if folder.parent != folder:
        _make(folder.parent)
    try:
        folder.mkdir(_FOLDER)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return  # somebody was faster: one of our ranks, or another user, and then its owner tells
    if folder.stat().st_mode & 0o777 != _FOLDER:
        folder.chmod(_FOLDER)  # a umask that takes rights from the user himself


def _made_private(fd: int) -> int:
    try:
        if os.fstat(fd).st_mode & 0o777 != _FILE:
            os.fchmod(fd, _FILE)
    except BaseException:
        os.close(fd)
        raise
    return fd
