"""Folders and files that are their user's alone: what Holdfast keeps of a run, and what ranks print.

A folder that we make is 0700, with those above it that were missing. One that was there keeps its rights, and must
belong to us or to root: any other owner may put what he likes in the place of our files. Files are 0600, whatever the
umask. What others may have put where a file goes (a link, a pipe) is never written to.
"""

import os
import stat
from pathlib import Path

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
