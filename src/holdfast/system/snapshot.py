"""What a process has: descriptors and what they stand for, threads, children, limits, processors.

When a process has ended, the kernel keeps only its limits and processors, until it is reaped. So the keeper looks at
each worker now and then while it lives. The evidence of a death has the last look, with its age.
"""

import errno
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from holdfast.system import linux, procfs

# How often each worker is looked at. A look takes some 0.1 ms, and 20 us more for each thread.
LOOK_S = 5.0
SOON_S = 0.5
# Descriptors that make a look come early: a leak that ends a worker within seconds is then seen close to its end.
GROWN = 64
# Descriptors that are read one by one; of a leak any part shows what leaks.
_MOST_READ = 256
# Kinds of descriptors and children that are kept, and letters of a path: evidence goes over a socket as one message.
_MOST_PATHS = 32
_MOST_CHILDREN = 16
_MOST_THREADS = 64
_PATH = 200
_LIMITS = (
    "RLIMIT_AS",
    "RLIMIT_CORE",
    "RLIMIT_CPU",
    "RLIMIT_DATA",
    "RLIMIT_FSIZE",
    "RLIMIT_MEMLOCK",
    "RLIMIT_NOFILE",
    "RLIMIT_NPROC",
    "RLIMIT_STACK",
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a living process had."""

    age_s: float = 0.0
    """How long before the incident that was."""
    descriptors: int = 0
    paths: tuple[tuple[str, int], ...] = ()
    """What its descriptors stand for, and how many for each; the most frequent first. If many, a part of them."""
    threads: int = 0
    others: tuple[str, ...] = ()
    """Its threads but the main one: name and state."""
    children: tuple[tuple[int, str], ...] = ()
    """The processes it has started: pid, command line."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the kernel allows to one process."""

    limits: tuple[tuple[str, int | None, int | None], ...] = ()
    """Name, soft, hard; None is unlimited."""
    processors: tuple[int, ...] = ()
    """Those that it may run on."""

    def soft(self, name: str) -> int | None:
        return next((soft for limit, soft, _ in self.limits if limit == name), None)


def look_at(pid: int) -> Snapshot | None:
    """Which process: the keeper, of a worker that lives. None when it is gone."""
    read = _descriptors(pid)
    if not read:
        return None
    return Snapshot(
        descriptors=max(len(read), linux.descriptors(pid)),
        paths=procfs.most_open(read, _MOST_PATHS),
        threads=procfs.threads(pid),
        others=procfs.other_threads(pid),
        children=procfs.children(pid, _MOST_THREADS)[:_MOST_CHILDREN],
    )


def _descriptors(pid: int) -> list[str]:
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            numbers = [int(entry.name) for entry in itertools.islice(entries, _MOST_READ)]
    except OSError:
        return []  # gone, or not ours to look at
    return [name[:_PATH] for number in numbers if (name := procfs.descriptor(pid, number))]


def bounds_of(pid: int) -> Bounds:
    """Which process: the keeper, of its child, which may have ended and not been reaped."""
    try:
        processors = tuple(sorted(os.sched_getaffinity(pid)))
        limits = tuple((name, *_limit(pid, name)) for name in _LIMITS)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EPERM):
            raise
        return Bounds()  # gone, or it has made itself another user's
    return Bounds(limits, processors)


def _limit(pid: int, name: str) -> tuple[int | None, int | None]:
    soft, hard = resource.prlimit(pid, getattr(resource, name))
    unlimited = resource.RLIM_INFINITY
    return None if soft == unlimited else soft, None if hard == unlimited else hard


# A second opinion on a process that hangs: py-spy, if it is installed, sees the native frames and who has the GIL.
#
# faulthandler shows Python lines only. py-spy looks from outside. It takes a third of a second, or a whole one where
# torch's libraries with their many symbols are on the stack; the keeper goes on watching meanwhile. py-spy looks at one
# process at a time: if ten workers hang at once, the others are explained by their Python stacks alone.


# Three times what it takes at most on a quiet machine. A hung worker may be killed this much later.
SECOND_OPINION_S = 3.0
# Frames that are kept: where it waits, and which library called that.
_MOST = 12


@dataclass(frozen=True, slots=True)
class Native:
    """The main thread, as py-spy saw it. `frames`: native ones inside the innermost Python line, innermost first."""

    frames: tuple[str, ...] = ()
    gil: bool | None = None
    """Whether it has the GIL; None when nothing was seen."""


def find() -> str | None:
    """Where py-spy is: beside this interpreter, or on the PATH."""
    beside = os.path.join(os.path.dirname(sys.executable or "/"), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


class PySpy:
    """Which process: the keeper, which reaps all its children and so tells of ours, too."""

    def __init__(self) -> None:
        self.path = find()
        self._key: object = None  # what is being looked at, or was last
        self._pid = 0  # of py-spy, while it runs
        self._file = -1
        self._due = 0.0
        self._seen: Native | None = None

    def awaited(self, pid: int, key: object) -> bool:
        """True while an answer about this process may still come; the first call asks. `key`: the hang it is about."""
        if self.path is None:
            return False
        if self._key == key:
            if self._pid and time.monotonic() >= self._due:
                os.kill(self._pid, signal.SIGKILL)  # (not reaped yet: `reaped` would have been told)
                self._due = float("inf")
                return False
            return bool(self._pid) and self._due != float("inf")
        if self._pid:
            return False  # busy with another one
        self._key, self._seen = key, None
        self._due = time.monotonic() + SECOND_OPINION_S
        return self._start(self.path, pid)

    def _start(self, path: str, pid: int) -> bool:
        self._file = os.memfd_create("holdfast-spy", os.MFD_CLOEXEC)
        nowhere = (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0)
        out = [nowhere, (os.POSIX_SPAWN_DUP2, self._file, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]
        words = [path, "dump", "--native", "--json", "--pid", str(pid)]
        try:
            self._pid = os.posix_spawn(path, words, os.environ, file_actions=out, setsigmask=[])
        except OSError:  # no process to be had, or not a program
            os.close(self._file)
            self._file = -1
            return False
        return True

    def reaped(self, pid: int) -> None:
        """A child of this process ended."""
        if pid != self._pid:
            return
        self._pid = 0
        try:
            os.lseek(self._file, 0, os.SEEK_SET)
            with open(self._file, encoding="utf-8", errors="replace") as file:
                self._file = -1
                self._seen = read_dump(file.read())
        except ValueError:
            self._seen = None  # it could not look: not allowed to, or the process was gone

    def answer(self, key: object) -> Native:
        """What was seen of this hang; empty when nothing was."""
        return self._seen if self._key == key and self._seen is not None else Native()

    def close_in_child(self) -> None:
        """In a fork of the keeper."""
        if self._pid:
            os.close(self._file)
            self._pid, self._file = 0, -1

    def stop(self) -> None:
        """Nobody waits any more."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)


def read_dump(text: str) -> Native:
    """py-spy's JSON: a list of threads; the main one has the process's own number."""
    threads: list[dict[str, Any]] = json.loads(text)
    main = next((one for one in threads if one.get("os_thread_id") == one.get("pid")), None)
    if main is None:
        return Native()
    frames = []
    for frame in main.get("frames") or ():
        name = str(frame.get("filename") or "")
        if name.endswith(".py") or name.startswith("<"):
            break
        module = os.path.basename(str(frame.get("module") or name))
        frames.append(f"{frame.get('name')} ({module})")
    return Native(tuple(frames[:_MOST]), bool(main.get("owns_gil")))
