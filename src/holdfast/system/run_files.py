"""Files of a run, for its user alone: private folders and files, and logs of JSON lines that only grow so far.

A folder that we make is 0700, with those above it that were missing. One that was there must belong to us or to root:
any other owner could replace our files. If it is ours, open to others, and holds nothing but files of Holdfast, it
becomes 0700, too; one that holds other things (a project, /tmp) keeps its rights. Files are 0600, whatever the umask.
If somebody put a link or a pipe where a file goes, Holdfast never writes to it.

An `AppendLog` has one writer. Each record is one line, written at once. A reader takes a line that ends and is JSON,
and passes over all else: a SIGKILL, or a full disk, may leave part of a line.
"""

import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.system.signal_origin import warn

# A log that is larger is thinned to at most half of that.
MOST_BYTES = 8 << 20


class AppendLog:
    """Lines of JSON, one record each. `periodic`: kinds of which every second one may go when room is needed."""

    def __init__(self, path: Path, periodic: tuple[str, ...], show: Callable[[Any], Any] | None = None) -> None:
        """`show`: gives what JSON does not know as something that it does."""
        self.path = path
        self._periodic = tuple(f'{{"record": "{kind}"'.encode() for kind in periodic)
        self._show = show

    def append(self, record: str, **fields: Any) -> None:
        """The kernel has it when this returns. Raises OSError if it is not kept, TypeError if it is no JSON."""
        line = json.dumps({"record": record, "at": time.time(), **fields}, default=self._show).encode() + b"\n"
        fd = open_to_append(self.path)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                line = b"\n" + line  # the last writer was killed in the middle of a line
            done = 0
            while done < len(line):
                done += os.write(fd, line[done:])
        finally:
            os.close(fd)
        if size + len(line) > MOST_BYTES:
            self._thin()

    def _thin(self) -> None:
        """Every second periodic record goes; then, if need be, the oldest records of all. The first one stays."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        first, rest = lines[:1], lines[1:]
        kept = [line for at, line in enumerate(rest) if at % 2 or not line.startswith(self._periodic)]
        left, gone = MOST_BYTES // 2, 0
        for at, line in reversed(list(enumerate(kept))):
            left -= len(line)
            if left < 0:
                gone = at + 1
                break
        draft = self.path.with_suffix(".draft")
        with open(open_new(draft), "wb") as file:
            file.writelines([*first, *kept[gone:]])
        draft.replace(self.path)


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a log, which anybody may have written. Whatever is no record is passed over."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue  # part of a line
            if isinstance(record, dict) and isinstance(record.get("record"), str):
                yield record


# Private folders and files.


_FOLDER, _FILE = 0o700, 0o600
_OTHERS = 0o077
# What a run folder and a `log_dir` hold: see diagnose/run_folder.py and launch/output.py.
_OURS = re.compile(r"(?:trainer|keeper)-\d+-\d+\.(?:jsonl|draft|dataset)|rank-\d+-attempt-\d+\.log")
# O_NONBLOCK: a pipe without a reader is an error, not a wait for ever. It means nothing to a regular file.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
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
