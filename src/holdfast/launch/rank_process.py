"""How a rank's process starts, by each start method, and how it is reaped.

The processes are multiprocessing's own, so that `active_children`, `daemon` and `join` work, and multiprocessing waits
for them at exit. Three things are ours. A spawned rank has its output and its environment from its first moment, not
only after its imports. No start method tries to import a `__main__` that has no file. The exit status and the peak of
the memory are kept, whichever thread reaps.
"""

import io
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, popen_fork, reduction, resource_tracker, spawn, util
from multiprocessing.context import ForkProcess, ForkServerProcess, SpawnProcess, set_spawning_popen
from multiprocessing.popen_forkserver import _DupFd as ServerDupFd
from multiprocessing.popen_spawn_posix import _DupFd as SpawnDupFd
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from holdfast.launch.phases import KILLED_S
from holdfast.launch.rank_main import RankSetup, ShippedFunction, run_rank
from holdfast.local.trainer.keeper_birth import preload
from holdfast.shm.main_module import refuse_without_guard, true_main
from holdfast.system import linux
from holdfast.system.signal_origin import LoggingFree, raised_by_handler

# The pause between two looks where no descriptor wakes the thread.
LOOK_S = 0.005
# How many descriptors multiprocessing opens to fork, and to ask its fork server, which it may have to start.
FORKING, ASKING = 4, 7


class _Reaped(popen_fork.Popen):
    """A child process. `peak_bytes` is known once it is reaped. A start that fails half-way leaves nothing behind."""

    pid: int = 0
    returncode: int | None
    peak_bytes = 0
    status_lost = False
    _ended = False
    _lock: threading.Lock
    pidfd: int | None = None
    finalizer: Any = None

    def __init__(self, process: BaseProcess) -> None:
        self._lock = threading.Lock()  # several threads may ask at once
        self._owner = os.getpid()  # a fork of this process is not its parent
        self._fds: list[int] = []
        self._closing = util.Finalize(self, close_all, (self._fds,))
        try:
            super().__init__(process)
            self.pidfd = linux.open_pidfd(self.pid)
            self._keep_pidfd()
        except BaseException:
            self._undo()
            raise

    def _launch(self, process: BaseProcess) -> None:
        """As multiprocessing does, which leaves its pipes open where the system refuses a new process."""
        linux.need_descriptors(FORKING)
        self.finalizer = self._closing
        self._fds += os.pipe()
        self._fds += os.pipe()
        self.sentinel, childs_end, childs_sentinel, end = self._fds
        with _interrupts_kept(), LoggingFree():
            self.pid = os.fork()
            if self.pid == 0:
                self._live(process, childs_sentinel, end)
        for _ in (childs_end, childs_sentinel):
            os.close(self._fds.pop(1))

    def _live(self, process: Any, sentinel: int, end: int) -> NoReturn:
        """In the child."""
        code = 1
        try:
            os.close(self.sentinel)
            os.close(end)
            code = process._bootstrap(parent_sentinel=sentinel)
        finally:
            os._exit(code)

    def _keep_pidfd(self) -> None:
        if self.pidfd is not None and self.pidfd not in self._fds:
            self._fds.append(self.pidfd)

    def _undo(self) -> None:
        """End this process. One that has not read its pickled text yet ends when its pipe is closed."""
        self._keep_pidfd()
        try:
            if self.pid:
                self.kill()
                self.wait(KILLED_S)
        finally:
            if self.finalizer is not None:
                self.finalizer()
            self._closing()

    def wait(self, timeout: float | None = None) -> int | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            self._wait_for_end(left)
        return self.returncode

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if flag != os.WNOHANG:
            return self.wait()
        with self._lock:
            if self.returncode is None:
                self._reap()
        return self.returncode

    def _wait_for_end(self, most_s: float | None) -> None:
        """Wait on its pidfd, not on a pipe: its own children may hold a pipe open."""
        if self.pidfd is None or self._ended:
            # There is no pidfd, or the process has ended and the fork server has not sent its status yet.
            time.sleep(LOOK_S if most_s is None else min(LOOK_S, most_s))
            return
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        self._ended = bool(poll.poll(None if most_s is None else most_s * 1000))

    def _reap(self) -> None:
        try:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        except ChildProcessError:
            self.returncode, self.status_lost = 255, True  # other code waited for all children, or ignores SIGCHLD
            return
        if pid == self.pid:
            self.peak_bytes = usage.ru_maxrss * 1024
            self.returncode = os.waitstatus_to_exitcode(status)


def _described(process: BaseProcess, popen: Any) -> memoryview:
    """The pickled process, as a new interpreter of multiprocessing reads it."""
    refuse_without_guard("holdfast-")
    with true_main():
        prepared = spawn.get_preparation_data(process.name)
    file = io.BytesIO()
    set_spawning_popen(popen)
    try:
        reduction.dump(prepared, file)
        reduction.dump(process, file)
    finally:
        set_spawning_popen(None)
    return file.getbuffer()


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """A Ctrl-C that is raised in one of Python's hooks at a fork is raised again after the fork.

    Python would print and forget it.
    """
    lost: list[BaseException] = []
    owner, before = os.getpid(), sys.unraisablehook

    def keep(unraisable: Any) -> None:
        error = unraisable.exc_value
        meant = error is not None and (not isinstance(error, Exception) or raised_by_handler(error))
        if os.getpid() == owner and meant:
            lost.append(error)
        else:
            before(unraisable)

    sys.unraisablehook = keep
    try:
        yield
    finally:
        sys.unraisablehook = before
    if lost:
        raise lost[0]


def close_all(fds: list[int] | set[int]) -> None:
    """Each leaves the list before it is closed, so that none is closed twice."""
    while fds:
        os.close(fds.pop())


def _write_all(fd: int, text: memoryview) -> None:
    """Write all of it. If the process dies before it has read, the watch notices that as it does every death."""
    try:
        while text:
            text = text[os.write(fd, text) :]
    except BrokenPipeError:
        pass


class _Described(_Reaped):
    """A process that is not a fork of this one: it gets its text pickled, and its descriptors passed."""

    def __init__(self, process: BaseProcess) -> None:
        self._passed: list[int] = []
        super().__init__(process)


class _Spawned(_Described):
    """A fresh interpreter."""

    method = "spawn"
    DupFd = SpawnDupFd

    def duplicate_for_child(self, fd: int) -> int:
        self._passed.append(fd)
        return fd

    def _launch(self, process: Any) -> None:
        self.finalizer = self._closing
        tracker = resource_tracker.getfd()
        assert tracker is not None
        text = _described(process, self)
        self._fds += os.pipe()
        self._fds += os.pipe()
        self.sentinel, childs_end, childs_text, words = self._fds
        command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=childs_text)
        # Kept, and given the status: subprocess would reap the child once this object is gone.
        self._child: Any = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=process.setup.descriptors.out,
            stderr=process.setup.descriptors.err,
            env=process.setup.environment,
            pass_fds=[*self._passed, tracker, childs_text, childs_end],
        )
        self.pid = self._child.pid
        for _ in (childs_end, childs_text):
            os.close(self._fds.pop(1))
        _write_all(words, text)

    def _undo(self) -> None:
        if "_child" in self.__dict__:
            self.pid = self._child.pid
        super()._undo()

    def _reap(self) -> None:
        super()._reap()
        self._child.returncode = self.returncode


class _Served(_Described):
    """A fork of Python's fork server, which is its parent and reaps it."""

    method = "forkserver"
    DupFd = ServerDupFd

    def duplicate_for_child(self, fd: int) -> int:
        self._passed.append(fd)
        return len(self._passed) - 1

    def _launch(self, process: BaseProcess) -> None:
        self.finalizer = self._closing
        text = _described(process, self)
        linux.need_descriptors(ASKING)  # the server ends when it is asked by halves
        self._fds += forkserver.connect_to_new_process(self._passed)
        self.sentinel, words = self._fds
        _write_all(words, text)
        self.pid = forkserver.read_signed(self.sentinel)

    def _reap(self) -> None:
        if os.getpid() != self._owner:
            self.returncode, self.status_lost = 255, True  # the server sends the status to the process that started it
            return
        poll = select.poll()
        poll.register(self.sentinel, select.POLLIN)
        if poll.poll(0):
            try:
                self.returncode = forkserver.read_signed(self.sentinel)
            except (OSError, EOFError):
                self.returncode = 255  # the server has ended, and with it the way to its children's status


class Forked(ForkProcess):
    """A fork of the trainer."""

    @staticmethod
    def _Popen(process: BaseProcess) -> Any:
        return _Reaped(process)


class Spawned(SpawnProcess):
    """A fresh interpreter. The trainer's side needs `setup` to start it."""

    setup: RankSetup

    @staticmethod
    def _Popen(process: BaseProcess) -> Any:
        return _Spawned(process)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "setup"}  # the rank has it among its arguments


class Served(ForkServerProcess):
    """A fork of Python's fork server."""

    @staticmethod
    def _Popen(process: BaseProcess) -> Any:
        return _Served(process)


KINDS: dict[str, type[Any]] = {"fork": Forked, "spawn": Spawned, "forkserver": Served}


def process(setup: RankSetup, function: ShippedFunction, daemon: bool) -> Any:
    """A rank's process, not started yet."""
    if setup.method == "forkserver":
        preload(run_rank.__module__)  # and torch with it
    name = f"holdfast-rank-{setup.rank}"
    process = KINDS[setup.method](target=run_rank, args=(setup, function), name=name, daemon=daemon)
    if setup.method == "spawn":
        process.setup = setup
    return process
