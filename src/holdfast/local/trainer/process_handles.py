"""What the trainer holds of processes: its keeper, and a handle of each worker for third parties.

KeeperProcess is one keeper after another, and the socket to it. If one died (`lost`) or never came up (`late`), the
host ends it and launches the next.
"""

import errno
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Protocol

from holdfast.core.host import Job
from holdfast.core.messages import Cause, Exited
from holdfast.local.keeper.fork_worker import KeeperOrders
from holdfast.local.protocol.wire import MOST_BYTES, KeeperUp, Message, decode, encode
from holdfast.local.trainer import keeper_birth
from holdfast.shm.slot_writer import SlotSpace
from holdfast.system import linux

# A forked keeper that says nothing for this long may have inherited a held lock. (A spawned one imports torch first.)
READY_S = 10.0
# What a socket says to an order that it cannot take now: it is full, or more descriptors are on their way than one user
# may send. The keeper reads on, so this passes.
_FULL = frozenset((errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS))
# How often a full socket is tried again. The keeper takes an order in a few milliseconds: it forks a worker for it.
AGAIN_S = 0.005
# A keeper whose pid nobody noted says it within that time.
FOUND_S = 3.0
# A keeper that takes no order for so long hangs. (A spawned one may import for minutes first.)
DEAF_S = 300.0
# How long somebody who asks for a worker's pid right after the start may wait for it: a spawned keeper imports torch.
START_S = 10.0


class KeeperProcess:
    """`fork`: from the trainer, or from a fresh interpreter."""

    def __init__(self, job: Job[SlotSpace], *, fork: bool) -> None:
        self._job = job
        self._fork = fork
        self._process: BaseProcess | None = None
        self.control: socket.socket
        self._ends: tuple[socket.socket, ...] = ()
        self._forking = 0  # the thread that forks the keeper now
        self.pid = 0
        self.lost = False
        self.status: int | None = None  # exit status of the last one, where that is known
        self.due = float("inf")  # when it must have come up

    def launch(self, orders: Callable[[socket.socket], KeeperOrders]) -> None:
        """A new keeper. `orders`: given its end of the socket. If it cannot be had, nothing of it is left."""
        self._ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control, theirs = self._ends
        try:
            self.control.setblocking(False)
            self.lost = False
            with theirs:
                if self._fork:
                    self._forking = threading.get_ident()
                    try:
                        self.pid = keeper_birth.fork_keeper(orders(theirs), self._job)
                    finally:
                        self._forking = 0
                    self.due = time.monotonic() + READY_S
                else:
                    self._process = keeper_birth.spawn_keeper(orders(theirs), self._job)
                    self.pid = self._process.pid or 0
                    self.due = float("inf")
        except BaseException:
            self.find(FOUND_S)
            self.end(0.0)
            raise

    @property
    def launched(self) -> bool:
        """There has been a keeper, or nearly."""
        return bool(self._ends)

    def close_in_child(self) -> bool:
        """In a forked child: it has no keeper. True in the keeper itself, which has its end of the socket."""
        keeper = self._forking == threading.get_ident()
        for end in self._ends[: 1 if keeper else 2]:
            end.close()
        self._process, self.pid = None, 0
        return keeper

    def came_up(self) -> None:
        """It has said so."""
        self.due = float("inf")

    def find(self, patience_s: float) -> None:
        """A signal handler raised right after a fork: the keeper is there, and nobody noted its pid. It says that."""
        while not self.pid and self.control.fileno() >= 0 and self.wait_for_word(patience_s):
            word = self.next_word()
            if isinstance(word, KeeperUp):
                self.pid = word.pid
            elif word is None:
                return  # nobody is there

    @property
    def late(self) -> bool:
        """It should have come up by now."""
        return time.monotonic() >= self.due

    def tell(self, message: Message, fds: Sequence[int] = (), patience_s: float = DEAF_S) -> bool:
        """False when it is gone: `lost` follows, and the end of each life with it.

        While the socket is full, this waits: the keeper never waits for the trainer, so it comes to read. One that
        reads nothing within that time is ended.
        """
        data, until = encode(message), time.monotonic() + patience_s
        while True:
            try:
                socket.send_fds(self.control, [data], fds)
                return True
            except OSError as error:
                if error.errno not in _FULL:
                    return False
            if time.monotonic() >= until or (self.late and not self.wait_for_word(0.0)):
                self.kill()
                return False
            time.sleep(AGAIN_S)

    def next_word(self) -> Message | None:
        """What it has said; None when that is all so far, or when it is `lost`."""
        try:
            data = self.control.recv(MOST_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        self.lost = not data
        return decode(data) if data else None

    def wait_for_word(self, patience_s: float) -> bool:
        """True when there is something to hear within that time."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        return bool(poll.poll(patience_s * 1000))

    def kill(self) -> None:
        """Its workers die with it."""
        if not self.pid:
            return  # that would be our own process group
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # dead already, and reaped by somebody else

    def gone(self, patience_s: float) -> bool:
        """Reap it within that time."""
        if self._process is None:
            return not self.pid or linux.wait_for_exit(self.pid, patience_s)
        self._process.join(patience_s)
        return not self._process.is_alive()

    def end(self, patience_s: float) -> None:
        """It goes within that time, or is killed."""
        if not self.gone(patience_s):
            self.kill()
            self.gone(3.0)
        if self._process is not None and not self._process.is_alive():
            self.status = self._process.exitcode
            self._process.close()
        self._process, self.pid = None, 0
        self.due = 0.0  # if no other can be launched now, it is late
        self.control.close()


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

    @property
    def has_life(self) -> bool:
        """False for a worker that is not needed for now."""
        return self._host.has_life(self._worker)

    def is_alive(self) -> bool:
        if self._host.closed or not self.has_life:
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


def exit_code(ended: Exited) -> int:
    """As multiprocessing has it: negative for a signal."""
    if ended.cause in (Cause.RECYCLED, Cause.UNBORN):
        return 0 if ended.cause is Cause.RECYCLED else 1
    return ended.code if ended.cause is Cause.EXIT else -ended.code
