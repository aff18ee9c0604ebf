"""What the trainer holds of one life, and what it shows of it to others."""

import os
import signal
import time
from collections import deque
from typing import NamedTuple, Protocol

from holdfast.core.messages import Cause
from holdfast.local import linux
from holdfast.local.wire import TASK, LifeEnded
from holdfast.shm.memory import Memory, new_file
from holdfast.shm.slots import SMALLEST_STRIDE, Slots, stride_for

# How long somebody who asks for a worker's pid right after the start may wait for it: a spawned keeper imports torch.
START_S = 10.0


class Parcel(NamedTuple):
    """A finished batch that lies in a slot, or in a file of its own."""

    slots: Slots | None
    slot: int
    file: Memory | None
    where: int
    buffers: int
    spec_bytes: int
    failed: bool
    worker: int

    @property
    def size(self) -> int:
        """Bytes from the start of the slot to the end of the spec, which comes last."""
        return self.where + 16 * self.buffers + self.spec_bytes


class Lifeline:
    """The trainer's ends of one life."""

    def __init__(self, life: int, tasks: int, unread: int, slots: Slots) -> None:
        """`unread`: the other end of the pipe of tasks, or -1; what the worker has not read can be taken back there."""
        self.life = life
        self.tasks = tasks
        self._unread = unread
        self.slots = slots
        self.boxes: dict[int, int] = {}  # task -> its letter box
        self.waiting: deque[tuple[int, bytes]] = deque()  # tasks for which there is no box yet, and their payloads
        self.unsent = b""  # TASK records
        self.pid: int | None = None

    def flush(self) -> None:
        """Give the worker what is unsent. One that is dying gets nothing: its Exited is on the way."""
        records, self.unsent = self.unsent, b""
        if self.tasks < 0:
            return
        try:
            os.write(self.tasks, records)
        except BrokenPipeError:
            pass  # the tasks go out again, to its next life

    def hang_up(self) -> None:
        """No more tasks: the worker leaves when it has done what it was sent."""
        if self.tasks >= 0:
            os.close(self.tasks)
            self.tasks = -1
        if self._unread >= 0:
            os.close(self._unread)
            self._unread = -1

    def take_back(self, most: int) -> list[tuple[int, ...]]:
        """TASK records that the worker has not read. A read takes a record or leaves it: one of us has it."""
        try:
            data = os.read(self._unread, TASK.size * most) if self._unread >= 0 else b""
        except BlockingIOError:
            return []
        return list(TASK.iter_unpack(data))


class Asked(Protocol):
    """The host, as far as a handle needs it."""

    @property
    def closed(self) -> bool: ...
    def has_life(self, worker: int) -> bool: ...
    def pid_of(self, worker: int, patience_s: float = 0.0) -> int | None: ...


class WorkerHandle:
    """What third parties expect of a worker process: pid, is_alive(), exitcode, join()."""

    def __init__(self, host: "Asked", worker: int) -> None:
        self._host = host
        self._worker = worker
        self.name = f"holdfast-worker-{worker}"
        self.daemon = True
        self.exitcode: int | None = None

    @property
    def pid(self) -> int | None:
        return self._host.pid_of(self._worker, START_S)

    def is_alive(self) -> bool:
        if self._host.closed or not self._host.has_life(self._worker):
            return False
        pid = self.pid
        return pid is None or linux.process_state(pid) not in ("", "Z")

    def terminate(self) -> None:
        """End this process; a new one takes its place if there is work left."""
        if self.is_alive() and self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)

    kill = terminate

    def join(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (deadline is None or time.monotonic() < deadline):
            time.sleep(0.005)


def exit_code(ended: LifeEnded) -> int:
    """As multiprocessing has it: negative for a signal."""
    if ended.cause in (Cause.RECYCLED, Cause.UNBORN):
        return 0 if ended.cause is Cause.RECYCLED else 1
    return ended.code if ended.cause is Cause.EXIT else -ended.code


def sparse_file(slots: int) -> tuple[int, Memory, int]:
    """(descriptor, mapping, stride) of a file with that many slots: as wide as the limits on size allow."""
    stride = stride_for(slots)
    while True:
        try:
            fd = new_file("batches", slots * stride)
        except OSError:
            if stride <= SMALLEST_STRIDE:
                raise
        else:
            try:
                return fd, Memory(fd, slots * stride), stride
            except OSError:
                os.close(fd)
                if stride <= SMALLEST_STRIDE:
                    raise
        stride //= 4
        stride = max(stride, SMALLEST_STRIDE)
