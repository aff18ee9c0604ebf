"""The birth of workers: the keeper forks them, and waits a while where the system has no process to give."""

import errno
import gc
import multiprocessing
import os
import resource
import signal
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from holdfast.core.host import Job
from holdfast.core.messages import Cause, Exited, Place, Stage
from holdfast.local.keeper.memory_budget import MemoryBudget
from holdfast.local.keeper.worker_life import Scene, WorkerLife
from holdfast.local.protocol.pulse import Pulse
from holdfast.local.protocol.wire import DESCRIPTORS, StartLife
from holdfast.local.worker.worker_loop import Wiring, WorkerLoop
from holdfast.shm.slot_writer import SlotSpace
from holdfast.system import linux
from holdfast.system.cgroups import OomWatch
from holdfast.system.evidence import Evidence, descriptor_limits, process_limits
from holdfast.system.snapshot import PySpy

# EAGAIN from fork passes when other processes end; this long it is tried again.
FORK_PATIENCE_S = 5.0
# Descriptors that the keeper keeps free for itself: for a worker's pidfd, and for what it reads of those who live.
SPARE = 8


class KeeperOrders(NamedTuple):
    """What a keeper is told at its start; descriptors are its own.

    `oom`, `room`: begun in the trainer. A process that was just forked takes ten times as long for whatever it does
    first: each page that it touches is copied.
    """

    control: socket.socket
    results: int
    files: socket.socket
    pulses: int
    workers: int
    trainer_pid: int
    trainer_threads: int
    sample_timeout: float | None
    growth_bytes: int | None
    oom: OomWatch
    room: MemoryBudget
    one_by_one: bool
    fixed: bool
    enough: int | None
    facts: str | None = None


class Unforked(NamedTuple):
    """A worker that could not be forked yet. `since`: when that was tried first."""

    order: StartLife
    fds: list[int]
    since: float


class WorkerForker:
    """`lives`: the keeper's, by pid. `trainer`: its pidfd, where there is such a thing."""

    def __init__(
        self,
        orders: KeeperOrders,
        job: Job[SlotSpace],
        pulses: list[Pulse],
        lives: Mapping[int, WorkerLife],
        trainer: int | None,
        pyspy: PySpy,
        scene: Scene,
    ) -> None:
        self._orders = orders
        self._job = job
        self._pulses = pulses
        self._lives = lives
        self._trainer = trainer
        self._pyspy = pyspy
        self._scene = scene
        self.unforked: deque[Unforked] = deque()

    def bear(self, order: StartLife, fds: list[int], since: float | None = None) -> WorkerLife | Exited | None:
        """A new life; or word that there is none; or neither, when it is to be tried again."""
        now = time.monotonic()
        pulse = self._pulses[order.worker]
        pulse.begin_life(order.life)
        refused = self._refused_descriptors(fds)
        if refused:
            close_all(fds)
            return _never_born(order, now, refused)
        keeper_pid = os.getpid()
        # Signals wait until the child has its own handlers: it inherits ours.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, linux.NOTED_SIGNALS)
        try:
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            since = now if since is None else since
            # Where others can go on with its work, they do; where its number says what it gives, it is waited for.
            if now - since < FORK_PATIENCE_S and (self._orders.fixed or not self._lives):
                self.unforked.append(Unforked(order, fds, since))
                return None
            close_all(fds)
            return _never_born(order, now, error.errno or 0)
        if pid == 0:
            self._be_worker(order, fds, before, keeper_pid)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        tasks, memory, crash = fds
        os.close(tasks)
        return WorkerLife(order, pid, pulse, memory, crash, now, self._scene)

    def forget(self, worker: int, number: int) -> Exited | None:
        """A life that waits to be forked is not wanted any more: word of its end."""
        for waiting in list(self.unforked):
            order, fds, _ = waiting
            if (order.worker, order.life) == (worker, number):
                self.unforked.remove(waiting)
                close_all(fds)
                return _never_born(order, time.monotonic(), 0)._replace(cause=Cause.ASKED)
        return None

    def _refused_descriptors(self, fds: list[int]) -> int:
        """0 where all is well. Else the errno: the kernel drops what the keeper has no room for, and says nothing."""
        if len(fds) == DESCRIPTORS and max(fds) + SPARE < resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            return 0  # (the kernel gives the lowest numbers that are free)
        try:
            os.close(os.dup(self._orders.results))
        except OSError as error:
            return error.errno or errno.EMFILE
        return errno.EMFILE

    def _be_worker(self, order: StartLife, fds: list[int], mask: Any, keeper_pid: int) -> None:
        """Never returns. The bootstrap of multiprocessing gives user code the process it knows from torch."""
        status = 1
        try:
            linux.die_with_parent(keeper_pid)
            self._close_keepers()
            if self._pyspy.path is not None:
                self._pyspy.close_in_child()
                linux.let_trace(keeper_pid)
            gc.enable()
            tasks, memory, crash = fds
            wiring = Wiring(
                *order,
                tasks,
                self._orders.results,
                self._orders.files,
                memory,
                crash,
                self._orders.growth_bytes,
                self._orders.one_by_one,
                self._orders.enough,
            )
            worker = WorkerLoop(wiring, self._job, self._pulses[order.worker])

            def live() -> None:
                worker.take_signals()
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                worker.run()

            process: Any = multiprocessing.get_context("fork").Process(
                target=live, name=f"holdfast-worker-{order.worker}"
            )
            status = process._bootstrap(parent_sentinel=None)
        finally:
            os._exit(status)

    def _close_keepers(self) -> None:
        """In the child: what is the keeper's, and other lives'."""
        self._orders.control.close()
        for life in self._lives.values():
            close_all((life.batches, life.crash))
            if life.pidfd is not None:
                os.close(life.pidfd)
        self._lives = {}
        for waiting in self.unforked:
            close_all(waiting.fds)
        self.unforked.clear()
        if self._trainer is not None:
            os.close(self._trainer)
            self._trainer = None


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _never_born(order: StartLife, now: float, number: int) -> Exited:
    place = Place(-1, 0, Stage.BOOT, 0.0)
    limits = descriptor_limits() if number in (errno.EMFILE, errno.ENFILE) else process_limits()
    evidence = Evidence(pid=0, fork_errno=number, limits=limits)
    return Exited(order.worker, order.life, now, Cause.UNBORN, number, place, evidence)
