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
import re
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import cloudpickle

from holdfast.diagnose.stats import Stats, to_dict
from holdfast.policy import warn_of_misspelt
from holdfast.remote_exception import shown, text_of
from holdfast.system.signal_origin import raised_by_handler, warn

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
        warn_of_misspelt(os.environ)
        folder = os.environ.get("HOLDFAST_RUN_DIR")
        return cls(folder, kind, dataset) if folder else None

    def write(self, incident: dict[str, Any]) -> None:
        """One line, whole or not at all; the kernel has it when this returns. If it fails, one warning says so."""
        self._last_incident = str(incident.get("headline", ""))
        try:
            line = json.dumps({"number": self._count, **for_json(_loadable(incident))}, default=shown) + "\n"
            if not self._count:
                self._write_dataset()
            self._append(line)
        except Exception as error:  # no room on the disk, or user code: a help, not a duty
            if raised_by_handler(error):
                raise
            if not self._failed:
                warn(f"incidents cannot be kept in {self.file}: {text_of(error)}")
            self._failed = True
        self._count += 1

    def write_totals(self, stats: Callable[[], Stats], running: bool = True) -> None:
        """For `holdfast top`; at most once a second, whole or not at all. Trouble here is said once."""
        now = time.monotonic()
        if self._totals_failed or (running and now < self._next_totals):
            return
        self._next_totals = now + TOTALS_S
        if os.getpid() != self._owner:
            self._begin()  # a forked child has files of its own: two that write the same totals lose them
        path = self.file.with_name(self.file.name.replace("incidents-", "stats-")).with_suffix(".json")
        try:
            self._keep_totals(path, stats(), running)
        except Exception as error:  # no room on the disk, or what is asked for totals raises: a help, not a duty
            if raised_by_handler(error):
                raise
            warn(f"totals cannot be kept in {path}: {text_of(error)}")
            self._totals_failed = True

    def _keep_totals(self, path: Path, stats: Stats, running: bool) -> None:
        shot = {
            "kind": self._kind,
            "pid": os.getpid(),
            "since": self._since,
            "at": time.time(),
            "running": running,
            "last_incident": self._last_incident,
            "stats": to_dict(stats),
        }
        text = json.dumps(shot)
        draft = path.with_suffix(".draft")
        with open(open_new(draft), "w") as file:
            file.write(text)
        draft.replace(path)

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
# A folder that we make is 0700, with those above it that were missing. One that was there must belong to us or to root:
# any other owner could replace our files. If it is ours, open to others, and holds nothing but
# files of Holdfast, it becomes 0700, too; one that holds other things (a project, /tmp) keeps its rights. Files are
# 0600, whatever the umask. If somebody put a link or a pipe where a file goes, Holdfast never writes to it.


_FOLDER, _FILE = 0o700, 0o600
_OTHERS = 0o077
# What a run folder and a `log_dir` hold: see RunFolder and launch/output.py.
_OURS = re.compile(r"(?:incidents|stats)-\d+-\d+\.(?:jsonl|json|draft|dataset)|rank-\d+-attempt-\d+\.log")
# O_NONBLOCK: a pipe without a reader is an error, not a wait for ever. It means nothing to a regular file.
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Folders that were open to others, by device, inode and rights. Holdfast warns once about each.
_found: set[tuple[int, int, int]] = set()


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
    try:
        about = os.fstat(folder)
        owner = about.st_uid
        if owner == os.geteuid() and about.st_mode & _OTHERS:
            _narrow(folder, about, path.parent)
        if owner in (os.geteuid(), 0):
            return folder
    except BaseException:
        os.close(folder)
        raise
    os.close(folder)
    raise PermissionError(
        f"{path.parent} belongs to uid {owner}, and this is uid {os.geteuid()}: name a folder of your own, or one in "
        "it that does not exist yet"
    )


def _narrow(folder: int, about: os.stat_result, path: Path) -> None:
    """One of ours that is open to others. What is there is asked through the descriptor: a name may lead elsewhere."""
    known = (about.st_dev, about.st_ino, about.st_mode)
    if known in _found:
        return
    _found.add(known)
    here, rights = f"/proc/self/fd/{folder}", stat.S_IMODE(about.st_mode)
    try:
        if rights & stat.S_ISVTX or _holds_other_things(here):
            warn(f"{path} is open to other users ({rights:04o}) and keeps its rights: name a folder of its own")
            return
        os.chmod(here, rights & ~_OTHERS)
        warn(f"{path} was open to other users ({rights:04o}): now {rights & ~_OTHERS:04o}")
    except OSError as error:
        warn(f"{path} is open to other users ({rights:04o}) and stays so: {error.strerror}")


def _holds_other_things(folder: str) -> bool:
    """Anything but files of ours, by name and owner."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # it has just gone
                if not _OURS.fullmatch(entry.name) or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                    return True
    return False


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
