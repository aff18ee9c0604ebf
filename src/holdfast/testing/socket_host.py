"""SocketHost: a second host of the contract in core/host.py. The trainer talks to its children over sockets.

It has no shared memory, no keeper and no pulse. It does in the plainest way what `LocalHost` does with them, and so
shows that the contract holds without them. To write another host, for instance for a cluster, start from this file.

    trainer -> worker   the payload of a task; None: leave
    worker -> trainer   its words, whenever they say that it is somewhere else; (reply, content); why it must leave

A worker has one task in hand. Its other tasks wait in the trainer, so each of them can be taken back. The trainer knows
what a dead worker was on from the last words that came.
"""

import mmap
import multiprocessing
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from holdfast.core import host, messages
from holdfast.core.host import ALLOWED, KEPT_APART, POSITION, SINCE, STAGE, Job, Reply, ReplyKind
from holdfast.core.messages import Cause, Exited, Leave, Place, Stage
from holdfast.errors import HoldfastError
from holdfast.local.protocol.pulse import FIELDS, PlainRecorder
from holdfast.local.trainer.process_handles import WorkerHandle
from holdfast.remote_exception import capture, error_reply
from holdfast.shm.pack import SMALL, Packer, unpack
from holdfast.shm.slot_writer import SlotSpace
from holdfast.system.evidence import Evidence

# A job writes a batch of up to this size in place, and a larger one into a file.
SPACE_BYTES = 64 << 20
GRACE_S = 1.0

# In the worker ----------------------------------------------------------------------------------------------------


class SentWords(list[int]):
    """The words of a worker. The trainer gets all of them when one changes that the trainer goes by."""

    def __init__(self, mine: Connection, kept_apart: int) -> None:
        super().__init__([0] * FIELDS)
        super().__setitem__(KEPT_APART, kept_apart)
        self._mine = mine

    def __setitem__(self, at: Any, value: Any) -> None:
        super().__setitem__(at, value)
        if at in (STAGE, SINCE, KEPT_APART):
            self._mine.send(list(self))


class SocketContext(PlainRecorder):
    """A `JobContext`. Its output is private memory, the same for all tasks."""

    def __init__(self, mine: Connection, kept_apart: int) -> None:
        self.words = SentWords(mine, kept_apart)
        super().__init__(self.words)
        memory = mmap.mmap(-1, SPACE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._space = SlotSpace(memoryview(memory), 0)
        self.output = self

    def space(self) -> SlotSpace:
        return self._space

    def content(self, reply: Reply) -> bytes:
        """The bytes that the reply speaks of."""
        if reply.file >= 0:
            with open(reply.file, "rb") as file:
                file.seek(0)
                return file.read()
        behind = 0 if reply.kind is ReplyKind.EXHAUSTED else 16 * reply.buffers + reply.spec_bytes
        return bytes(self._space.view[: reply.where + behind])


def serve(
    mine: Connection, others: Sequence[Connection], job: Job[SlotSpace], worker: int, life: int, kept_apart: int
) -> None:
    """A worker's whole life."""
    for connection in others:  # a fork inherits the trainer's ends: with them open, no worker sees the trainer end
        connection.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to hear
    context = SocketContext(mine, kept_apart)
    try:
        job.boot(worker, life, context)
        reply = Reply(ReplyKind.BOOTED)
    except BaseException as error:  # user code: worker_init_fn
        reply = error_reply(Packer(), capture(error), context.space())._replace(kind=ReplyKind.BOOT_FAILED)
    try:
        mine.send((reply, context.content(reply)))
        while (payload := mine.recv()) is not None:
            context.space().clear()
            context.enter(Stage.IDLE)  # not where the last task ended
            reply = job.run(memoryview(payload), memoryview(b""), 0)
            mine.send((reply, context.content(reply)))
    except host.Spent as spent:
        mine.send(spent.why)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the trainer is gone


# In the trainer ---------------------------------------------------------------------------------------------------


class SocketResult:
    """A `Result`: the bytes that came."""

    def __init__(self, reply: Reply, content: bytes, worker: int) -> None:
        self._reply = reply
        self.content = bytearray(content)  # the user may write to tensors over it
        self.worker = worker
        self.failed = reply.kind not in (ReplyKind.BATCH, ReplyKind.BATCH_IN_FILE)

    def open(self, small: int = SMALL, read: Callable[..., Any] = unpack) -> Any:
        reply, view = self._reply, memoryview(self.content)
        self.discard()
        return read(view, reply.where, reply.buffers, reply.spec_bytes, lambda: view, small)

    def discard(self) -> None:
        self.content = bytearray()


@dataclass
class SocketLife:
    """What the trainer knows of one life."""

    worker: int
    life: int
    process: BaseProcess
    connection: Connection
    waiting: deque[tuple[int, bytes]] = field(default_factory=deque)
    free: bool = False  # ready for a task
    task: int = -1  # in hand
    words: list[int] = field(default_factory=lambda: [0] * FIELDS)
    heard: float = field(default_factory=time.monotonic)  # when they came
    leave_by: float = inf  # the trainer kills it then
    killed: bool = False
    ended: tuple[Cause, int] | None = None  # why, if its exit status does not say so

    def go_on(self) -> None:
        """Send it the next task, or let it go."""
        if self.free and (self.ended or self.waiting):
            self.task, payload = (-1, None) if self.ended else self.waiting.popleft()
            self.free = False
            with suppress(OSError):  # it is dying: its Exited is on the way
                self.connection.send(payload)

    def leave(self, cause: Cause, code: int, by: float = inf) -> None:
        """After the task in hand."""
        self.ended, self.leave_by = (cause, code), by
        self.go_on()

    def kill(self, cause: Cause) -> None:
        self.ended, self.killed = (cause, signal.SIGKILL), True
        self.process.kill()

    def place(self, now: float) -> Place:
        return Place(self.task, self.words[POSITION], Stage(self.words[STAGE]), now - self.heard)

    def due(self, timeout_s: float | None) -> float:
        """When the trainer kills it, if nothing more comes."""
        if self.killed:
            return inf
        stage, position, allowed_s = self.words[STAGE], self.words[POSITION], self.words[ALLOWED] / 1e9 or timeout_s
        if self.task < 0 or stage < Stage.FETCH or allowed_s is None or allowed_s < 0:
            return self.leave_by
        return min(self.leave_by, self.heard + allowed_s * (max(1, position) if stage == Stage.FETCH_MANY else 1))


class SocketHost:
    """See core/host.py for who calls what when."""

    def __init__(
        self, workers: int, busy: int, job: Job[SlotSpace], *, fork: bool, sample_timeout: float | None, **_: object
    ) -> None:
        self._context = multiprocessing.get_context("fork" if fork else "spawn")
        self._job, self._forked, self._timeout_s = job, fork, sample_timeout
        self._owner = os.getpid()
        self._floor = 0
        self._events: list[messages.Event | host.Silence | host.Room] = []
        self._bell: tuple[socket.socket, socket.socket] | None = None
        self._lives: dict[tuple[int, int], SocketLife] = {}  # by worker and life
        self._kept_apart = [0] * workers
        self.resting = False
        self.marks = [0] * workers
        self.items: dict[int, int] = {}
        self.ends: dict[int, bytes | host.StreamEnd] = {}
        self.workers = [WorkerHandle(self, worker) for worker in range(workers)]

    @property
    def closed(self) -> bool:
        return self._bell is None

    def pid_of(self, worker: int, patience_s: float = 0.0) -> int | None:
        return next((life.process.pid for life in list(self._lives.values()) if life.worker == worker), None)

    def has_life(self, worker: int) -> bool:
        return self.pid_of(worker) is not None

    def open(self) -> None:
        self._bell = socket.socketpair()
        self._bell[1].setblocking(False)

    def close(self, grace_s: float = GRACE_S) -> None:
        bell, self._bell = self._bell, None
        if bell is not None and os.getpid() == self._owner:
            self._end_all(grace_s)
            bell[0].close()
            bell[1].close()

    def renew(self) -> None:
        self._end_all(0.0)
        self._events.clear()

    def _end_all(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        for life in self._lives.values():
            life.connection.close()  # an idle one leaves
        while self._lives:
            _, life = self._lives.popitem()
            life.process.join(max(0.0, deadline - time.monotonic()))
            life.process.kill()
            life.process.join()
            self.workers[life.worker].exitcode = life.process.exitcode

    # Orders --------------------------------------------------------------------------------------------------------

    def start(self, worker: int, life: int) -> None:
        ours, theirs = self._context.Pipe()
        others = [ours, *(other.connection for other in self._lives.values())] if self._forked else []
        process = self._context.Process(  # type: ignore[attr-defined]
            target=serve, args=(theirs, others, self._job, worker, life, self._kept_apart[worker]), daemon=True
        )
        try:
            process.start()
        except OSError as error:  # the system refuses a process
            ours.close()
            code, nowhere, now = error.errno or 0, Place(-1, 0, Stage.BOOT, 0.0), time.monotonic()
            self._events.append(Exited(worker, life, now, Cause.UNBORN, code, nowhere, Evidence(0, fork_errno=code)))
        else:
            self._lives[worker, life] = SocketLife(worker, life, process, ours)
        finally:
            theirs.close()

    def send(self, worker: int, life: int, task: int, payload: bytes) -> None:
        if found := self._lives.get((worker, life)):
            found.waiting.append((task, payload))
            found.go_on()

    def flush(self) -> None:
        """Does nothing: `send` holds nothing back."""

    def want(self, task: int) -> None:
        """Does nothing: no worker waits for a slot."""

    def abandon_below(self, task: int) -> None:
        self._floor = task
        self.marks[:] = [0] * len(self.marks)
        self.items.clear()
        self.ends.clear()
        for life in self._lives.values():
            life.waiting = deque(each for each in life.waiting if each[0] >= task)

    def take_back(self, worker: int, life: int) -> None:
        found = self._lives.get((worker, life))
        if found and found.waiting:
            self._events.append(messages.Returned(worker, life, found.waiting.popleft()[0]))

    def retire(self, worker: int, life: int) -> None:
        if found := self._lives.get((worker, life)):
            found.leave(Cause.RECYCLED, Leave.ASKED)

    def release(self, worker: int, life: int, grace_s: float) -> None:
        if found := self._lives.get((worker, life)):
            found.leave(Cause.ASKED, 0, time.monotonic() + grace_s)

    def kill(self, worker: int, life: int, task: int) -> None:
        if found := self._lives.get((worker, life)):
            self._hear(found)  # perhaps it has finished that task
            if found.task == task:
                found.kill(Cause.ASKED)
                while found.waiting:
                    self.take_back(worker, life)
            else:
                found.waiting = deque(each for each in found.waiting if each[0] != task)
                self._events.append(messages.Spared(worker, life))

    # Facts ---------------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        if bell := self._bell:
            with suppress(OSError):  # it is full: it rings
                bell[1].send(b"!")

    def wait(self, timeout_s: float | None) -> Sequence[messages.Event | host.Silence | host.Room]:
        until = inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            rung = self._look(until)
            if rung or self._events or time.monotonic() >= until:
                events, self._events = self._events, []
                return events

    def _look(self, until: float) -> bool:
        """Hear all lives. Sleep before, until one of them speaks or must be killed. True if the bell has rung."""
        if self._bell is None:
            raise HoldfastError("these workers have been ended: nothing more will come from them")
        bell, lives = self._bell[0], list(self._lives.values())
        ends: list[Any] = [end for life in lives for end in (life.connection, life.process.sentinel)]
        until = 0.0 if self._events else min([until, *(life.due(self._timeout_s) for life in lives)])
        self.resting = True
        ready = wait([bell, *ends], None if until == inf else max(0.0, until - time.monotonic()))
        self.resting = False
        for life in lives:
            self._hear(life)
            if life.process.sentinel in ready:
                self._bury(life)
            elif (now := time.monotonic()) >= life.due(self._timeout_s):
                life.kill(Cause.ASKED if now >= life.leave_by else Cause.DEADLINE)
        return bell in ready and bool(bell.recv(4096))

    def _hear(self, life: SocketLife) -> None:
        """All that it has said."""
        try:
            while life.connection.poll():
                match life.connection.recv():
                    case list() as words:
                        life.words, life.heard = words, time.monotonic()
                        self._kept_apart[life.worker] = words[KEPT_APART]
                    case Leave() as why:
                        life.ended = (Cause.RECYCLED, why)
                    case (reply, content):
                        task, life.task, life.words[STAGE], life.free = life.task, -1, Stage.IDLE, True
                        self._reply(life, task, reply, SocketResult(reply, content, life.worker))
                        life.go_on()
        except (EOFError, OSError):
            life.process.kill()  # it is dead, or has closed its end: nobody can talk to it any more

    def _reply(self, life: SocketLife, task: int, reply: Reply, result: SocketResult) -> None:
        worker, wanted = life.worker, task >= self._floor
        if reply.mark and wanted:
            self.marks[worker] = reply.mark
        if reply.kind is ReplyKind.BOOTED:
            self._events.append(messages.Booted(worker, life.life))
        elif reply.kind is ReplyKind.BOOT_FAILED:
            self._events.append(messages.BootFailed(worker, life.life, result))
            life.leave(Cause.RECYCLED, Leave.UNFIT)
        elif reply.kind is ReplyKind.EXHAUSTED:
            if wanted:
                self.items[worker] = reply.buffers
                if end := reply.spec_bytes:
                    self.ends[worker] = bytes(result.content) if end == host.StreamEnd.KNOWN else host.StreamEnd(end)
            self._events.append(messages.Exhausted(worker, life.life, task, reply.bad))
        else:
            self._events.append(messages.Finished(worker, life.life, task, result, reply.bad))

    def _bury(self, life: SocketLife) -> None:
        life.process.join()
        life.connection.close()
        self._lives.pop((life.worker, life.life), None)  # None: another thread has closed this host
        status = life.process.exitcode or 0
        self.workers[life.worker].exitcode = status
        cause, code = (Cause.SIGNAL, -status) if status < 0 else (Cause.EXIT, status)
        if life.ended is not None and (life.killed or status == 0):
            cause, code = life.ended
        now, seen = time.monotonic(), Evidence(life.process.pid or 0)
        self._events.append(Exited(life.worker, life.life, now, cause, code, life.place(now), seen))

    def leftovers(self) -> list[host.Silence]:
        return []
