"""A second opinion on a process that hangs: py-spy, if it is installed, sees the native frames and who has the GIL.

faulthandler shows Python lines only. py-spy looks from outside and takes a third of a second, or a whole one where
torch's libraries with their many symbols are on the stack; it runs beside the keeper, which goes on watching meanwhile.
One process is looked at at a time: of ten workers that hang at once the others are told by their Python stacks alone.
"""

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

# Three times what it takes at most on a quiet machine. A hung worker may be killed this much later.
LOOK_S = 3.0
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


class Spy:
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
        self._due = time.monotonic() + LOOK_S
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
