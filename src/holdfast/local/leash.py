"""Leash: the trainer's hold on its keeper: the process, and the socket between the two.

One keeper after another: when one died (`lost`) or never came up (`late`), whoever holds the leash ends it and
launches the next.
"""

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

from holdfast.local import birth, linux
from holdfast.local.cradle import Orders
from holdfast.local.wire import Message, decode, encode
from holdfast.local.worker import Job

# A forked keeper that says nothing for this long may have inherited a held lock. (A spawned one imports torch first.)
READY_S = 10.0


class Leash:
    """`fork`: from the trainer, or from a fresh interpreter."""

    def __init__(self, job: Job, *, fork: bool) -> None:
        self._job = job
        self._fork = fork
        self._process: BaseProcess | None = None
        self.control: socket.socket
        self.pid = 0
        self.lost = False
        self.due = float("inf")  # when it must have come up

    def launch(self, orders: Callable[[socket.socket], Orders]) -> None:
        """A new keeper. `orders`: given its end of the socket. If it cannot be had, nothing of it is left."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.control.setblocking(False)
            self.lost = False
            with theirs:
                if self._fork:
                    self.pid = birth.fork_keeper(orders(theirs), self._job)
                    self.due = time.monotonic() + READY_S
                else:
                    self._process = birth.spawn_keeper(orders(theirs), self._job)
                    self.pid = self._process.pid or 0
                    self.due = float("inf")
        except BaseException:
            self.end(0.0)
            raise

    def came_up(self) -> None:
        """It has said so."""
        self.due = float("inf")

    @property
    def late(self) -> bool:
        """It should have come up by now."""
        return time.monotonic() >= self.due

    def tell(self, message: Message, fds: Sequence[int] = ()) -> bool:
        """False when it is gone: `lost` follows, and the end of each life with it."""
        try:
            if fds:
                socket.send_fds(self.control, [encode(message)], fds)
            else:
                self.control.send(encode(message))
        except OSError:
            return False
        return True

    def next_word(self) -> Message | None:
        """What it has said; None when that is all so far, or when it is `lost`."""
        try:
            data = self.control.recv(1 << 17)
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
            self._process.close()
        self._process, self.pid = None, 0
        self.control.close()
