"""How a keeper comes to be: forked from the trainer, or spawned as a fresh interpreter.

Forked: nothing is pickled, the dataset's pages are shared copy-on-write, as with torch.

Spawned (and forkserver): a fork of Python's own fork server, which is a fresh interpreter that has imported torch and
nothing else of the trainer's. So the second which that import takes is paid once per run, not once per epoch. The job
is pickled while the process is being started, because multiprocessing's own primitives pickle only then. The keeper
holds the *bytes*; each worker unpickles a copy of its own after its fork. (Unpickling once and forking that would share
what `__setstate__` opens: file offsets.) Large arrays and tensors lie in a memory file that each worker maps privately:
one copy for all, until somebody writes.
"""

import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver, reduction
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from holdfast.core.host import Job, JobContext, Reply
from holdfast.local.keeper.fork_worker import KeeperOrders
from holdfast.local.keeper.keeper_loop import Keeper, note_signals_only
from holdfast.local.keeper.memory_budget import MemoryBudget
from holdfast.shm.main_module import refuse_without_guard, true_main
from holdfast.shm.memory_file import Memory, new_file
from holdfast.shm.pack import Packer, unpack
from holdfast.shm.slot_writer import FileSpace, SlotSpace
from holdfast.system import linux
from holdfast.system.cgroups import OomWatch
from holdfast.system.signal_origin import LoggingFree

_LIMITS = (
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_MEMLOCK,
    resource.RLIMIT_NOFILE,
    resource.RLIMIT_NPROC,
    resource.RLIMIT_AS,
    resource.RLIMIT_DATA,
    resource.RLIMIT_CORE,
)

NAME = "holdfast-keeper"
# Descriptors that multiprocessing opens to start a process, its fork server and resource tracker before it included.
# When it gets only some of them, it leaves those open, and the fork server ends.
STARTING = 8


class Package:
    """A job that travels as bytes and is opened in each worker. Itself a Job."""

    def __init__(self, job: Job[SlotSpace]) -> None:
        self._job: Job[SlotSpace] | None = job
        self._memory: Memory | None = None
        self._size = 0
        self._spec = (0, 0, 0)

    def __getstate__(self) -> dict[str, Any]:
        """In the trainer, while the keeper's process is being spawned."""
        self._trainer_fd = fd = new_file("job", 0)  # to be closed once the process has its own
        space = FileSpace(fd)
        spec = Packer(spawning=True).pack(self._job, space)
        linux.need_descriptors(STARTING)
        return {"fd": reduction.DupFd(fd), "size": space.size, "spec": spec}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the keeper."""
        fd = state["fd"].detach()
        self._size, self._spec = state["size"], state["spec"]
        self._memory = Memory(fd, self._size, private=True)
        os.close(fd)
        self._job = None

    def close_in_trainer(self) -> None:
        """The keeper has its own descriptor now."""
        fd = self.__dict__.pop("_trainer_fd", -1)
        if fd >= 0:
            os.close(fd)

    def boot(self, worker: int, life: int, context: JobContext[SlotSpace]) -> None:
        assert self._memory is not None
        view = self._memory.view
        self._job = unpack(view, *self._spec, lambda: view)
        self._job.boot(worker, life, context)
        self.run = self._job.run  # type: ignore[method-assign]  # straight on, from now on

    def run(self, payload: memoryview, saved: memoryview, count: int) -> Reply:
        raise AssertionError("boot comes first")


class Surroundings:
    """What a process inherits from its parent, as it is in the trainer now: the fork server may be older."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._processors = os.sched_getaffinity(0)
        self._limits = {kind: resource.getrlimit(kind) for kind in _LIMITS}
        self._niceness = os.getpriority(os.PRIO_PROCESS, 0)
        self._umask = linux.umask()

    def enter(self) -> None:
        """In the new process."""
        os.environ.clear()
        os.environ.update(self._environment)
        os.umask(self._umask)
        # What the system refuses stays as it is in the fork server.
        with suppress(OSError):
            os.sched_setaffinity(0, self._processors)
        with suppress(OSError):
            if self._niceness > os.getpriority(os.PRIO_PROCESS, 0):
                os.setpriority(os.PRIO_PROCESS, 0, self._niceness)
        for kind, (soft, hard) in self._limits.items():
            try:
                resource.setrlimit(kind, (soft, hard))
            except (ValueError, OSError):
                pass  # the trainer could raise it, and we may not: the older limit stands


class Cord:
    """KeeperOrders on their way into a spawned process: the descriptors are duplicated as it starts."""

    def __init__(self, orders: KeeperOrders) -> None:
        self._orders = orders

    def __getstate__(self) -> Any:
        control, results, files, pulses, *rest = self._orders
        fds = [reduction.DupFd(fd) for fd in (control.fileno(), results, files.fileno(), pulses)]
        out = [(fd, reduction.DupFd(fd)) for fd in (1, 2) if linux.is_open(fd)]
        return fds, rest, out, Surroundings()

    def __setstate__(self, state: Any) -> None:
        fds, rest, out, surroundings = state
        surroundings.enter()
        for number, fd in out:
            mine = fd.detach()
            os.dup2(mine, number)
            os.close(mine)
        control, results, files, pulses = (fd.detach() for fd in fds)
        orders = KeeperOrders(
            socket.socket(fileno=control),
            results,
            socket.socket(fileno=files),
            pulses,
            *rest,
        )
        # A new interpreter takes seconds, in which others may be killed for memory, and may live in another group.
        room = MemoryBudget(orders.workers, orders.room.need, orders.room.said.workers)
        self._orders = orders._replace(oom=OomWatch(time.monotonic()), room=room)

    def cut(self) -> KeeperOrders:
        return self._orders


def flush_output() -> None:
    """stdout and stderr. What a program puts in their places may be None, closed, or know less than a file."""
    for name in ("stdout", "stderr"):
        with suppress(AttributeError, ValueError):
            getattr(sys, name).flush()


def fork_keeper(orders: KeeperOrders, job: Job[SlotSpace]) -> int:
    """The pid of a keeper that is a fork of this process."""
    flush_output()  # or a worker would print our unwritten text again
    pid = 0
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, linux.NOTED_SIGNALS)  # inside: a handler may raise right after it
            with LoggingFree():
                pid = os.fork()
            if pid == 0:
                be(lambda: _keep(orders, job, before))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid
    except BaseException:  # of the handler of a signal that came meanwhile: nobody would know of the keeper
        if pid:
            os.kill(pid, signal.SIGKILL)
            linux.wait_for_exit(pid, 3.0)
        raise


def _keep(orders: KeeperOrders, job: Job[SlotSpace], mask: Any) -> None:
    signals = note_signals_only()
    keeper = Keeper(orders, job, signals)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    keeper.run()


def be(main: Callable[[], None]) -> NoReturn:
    """A forked process does this, and nothing of what its parent has left to do."""
    status = 1
    try:
        main()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def spawn_keeper(orders: KeeperOrders, job: Job[SlotSpace]) -> BaseProcess:
    """A keeper in an interpreter that knows nothing of the trainer but what is pickled."""
    refuse_without_guard("holdfast-")
    package = Package(job)
    context = multiprocessing.get_context("forkserver")
    preload(type(job).__module__)  # what a worker does, and with it torch
    process: BaseProcess = context.Process(target=_keep_spawned, args=(Cord(orders), package), name=NAME)
    try:
        with true_main():
            process.start()
    except (ValueError, ChildProcessError) as error:
        # The fork server takes 256 descriptors at most, and each shared tensor of the dataset is one. And a forked
        # child of the process that has started the server cannot ask whether it lives.
        if isinstance(error, ValueError) and "too many fds" not in str(error):
            raise
        package.close_in_trainer()
        fresh = multiprocessing.get_context("spawn")
        process = fresh.Process(target=_keep_spawned, args=(Cord(orders), package), name=NAME)
        with true_main():
            process.start()
    finally:
        package.close_in_trainer()
    # multiprocessing would wait for it at exit, before our own farewell; we look after it ourselves.
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    return process


def preload(module: str) -> None:
    """A fork server that is started from now on has this module, and so pays for its import once."""
    modules: list[str] = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    if module not in modules:
        forkserver.set_forkserver_preload([*modules, module])


def _keep_spawned(cord: Cord, package: Package) -> None:
    Keeper(cord.cut(), package, note_signals_only()).run()
