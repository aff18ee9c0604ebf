"""SocketHost: a second host of the contract in core/host.py. Children that the trainer talks to over sockets.

No shared memory, no keeper, no pulse: what `LocalHost` does with them is done here in the plainest way, so that the
contract is seen to hold without them. Who writes a host for a cluster may begin with this file.

    trainer -> worker   (task, payload), one at a time; None: leave
    worker -> trainer   ("booted",), ("unfit", content), ("at", stage, position, allowed, kept apart),
                        ("reply", reply, content), ("spent", why)

A worker has one task in hand; the others wait in the trainer. So what it has not begun can always be taken back, and
what a dead one was on is known as far as it told.
"""

import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from holdfast.core import host, messages
from holdfast.core.host import ALLOWED, JOB_WORDS, KEPT_APART, POSITION, SINCE, STAGE, Job, Reply, ReplyKind
from holdfast.core.messages import Cause, Exited, Leave, Place, Stage
from holdfast.errors import HoldfastError
from holdfast.local.trainer.process_handles import WorkerHandle
from holdfast.remote_exception import capture, error_reply
from holdfast.shm.pack import SMALL, Packer, unpack
from holdfast.shm.slot_writer import SlotSpace
from holdfast.system.evidence import Evidence

# What fits here is packed at once; what does not goes into a file of the worker's own first.
SPACE_BYTES = 64 << 20
GRACE_S = 1.0

# In the worker ----------------------------------------------------------------------------------------------------


class ToldWords(list[int]):
    """Words of a worker. The trainer is told where it is, whenever that is complete."""

    def __init__(self, say: Callable[[object], None], kept_apart: int) -> None:
        super().__init__([0] * JOB_WORDS)
        list.__setitem__(self, KEPT_APART, kept_apart)
        self._say = say

    def __setitem__(self, at: Any, value: Any) -> None:
        changed = at in (SINCE, KEPT_APART) or (at == STAGE and value != self[STAGE])
        super().__setitem__(at, value)
        if changed:
            self._say(("at", self[STAGE], self[POSITION], self[ALLOWED], self[KEPT_APART]))


class PrivateOutput:
    """Room for one reply after another, in memory of the worker alone."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, SPACE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._space = SlotSpace(memoryview(memory), 0)
        self.asked = False  # in this task

    def space(self) -> SlotSpace:
        if not self.asked:
            self._space.clear()
            self.asked = True
        return self._space

    def take(self, reply: Reply) -> bytes:
        """What the reply says that there is."""
        if reply.file >= 0:
            with open(reply.file, "rb") as file:
                file.seek(0)
                return file.read()
        size = reply.where + 16 * reply.buffers + reply.spec_bytes
        if reply.kind is ReplyKind.EXHAUSTED:
            size = reply.where
        return bytes(self._space.view[:size])


class SocketContext:
    """A `JobContext`."""

    def __init__(self, say: Callable[[object], None], kept_apart: int) -> None:
        self.words = ToldWords(say, kept_apart)
        self.output = PrivateOutput()

    def enter(self, stage: int, position: int = 0, /) -> None:
        list.__setitem__(self.words, STAGE, stage)
        self.words[POSITION] = position
        self.words[SINCE] = time.monotonic_ns()

    def walk(self, stage: int, indices: Iterable[Any], /) -> Iterator[Any]:
        list.__setitem__(self.words, STAGE, stage)
        for self.words[POSITION], index in enumerate(indices):
            self.words[SINCE] = time.monotonic_ns()
            yield index


def serve(
    mine: Connection, others: Sequence[Connection], job: Job[SlotSpace], worker: int, life: int, kept_apart: int
) -> None:
    """A worker's whole life."""
    for connection in others:  # a fork has them, too: nobody would see the end of them
        connection.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to hear
    context = SocketContext(mine.send, kept_apart)
    try:
        try:
            job.boot(worker, life, context)
        except BaseException as error:  # user code: unpickling, worker_init_fn
            reply = error_reply(Packer(), capture(error), context.output.space())
            mine.send(("unfit", reply, context.output.take(reply)))
            return
        context.enter(Stage.IDLE)
        mine.send(("booted",))
        while (order := mine.recv()) is not None:
            context.output.asked = False
            reply = job.run(memoryview(order), memoryview(b""), 0)
            mine.send(("reply", reply, context.output.take(reply)))
            context.enter(Stage.IDLE)
    except host.Spent as spent:
        mine.send(("spent", spent.why))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the trainer is gone


# In the trainer ---------------------------------------------------------------------------------------------------


class SocketResult:
    """A `Result`: the bytes that came."""

    def __init__(self, reply: Reply, content: bytes, worker: int) -> None:
        self._reply = reply
        self._content: bytearray | None = bytearray(content)  # tensors over it may be written
        self.worker = worker
        self.failed = reply.kind not in (ReplyKind.BATCH, ReplyKind.BATCH_IN_FILE)

    def open(self, small: int = SMALL, read: Callable[..., Any] = unpack) -> Any:
        content, reply = self._content, self._reply
        assert content is not None
        self._content = None
        view = memoryview(content)
        return read(view, reply.where, reply.buffers, reply.spec_bytes, lambda: view, small)

    def discard(self) -> None:
        self._content = None


class SocketLife:
    """What the trainer knows of one life."""

    def __init__(self, life: int, process: BaseProcess, connection: Connection) -> None:
        self.life = life
        self.process = process
        self.connection = connection
        self.waiting: deque[tuple[int, bytes]] = deque()
        self.task: int | None = None  # in hand
        self.booted = False
        self.at: list[int] = [Stage.BOOT, 0, 0]  # stage, position, nanoseconds allowed
        self.since = time.monotonic()
        self.leaving = False
        self.end_at: float | None = None  # it has so long to leave by itself
        self.dying = False
        self.on: Place | None = None  # when it was killed
        self.ended: tuple[Cause, int] | None = None  # why, where we know better than its exit status

    def say(self, order: bytes | None) -> None:
        with suppress(OSError):  # it is dying: its Exited is on the way
            self.connection.send(order)

    def next(self) -> None:
        """Give it something to do, or let it go."""
        if self.booted and self.task is None:
            if self.waiting:
                self.task, payload = self.waiting.popleft()
                self.say(payload)
            elif self.leaving:
                self.booted = False  # it gets nothing more
                self.say(None)

    def end(self, cause: Cause) -> None:
        self.ended = self.ended or (cause, signal.SIGKILL)
        self.on, self.dying, self.end_at = self.place(time.monotonic()), True, None
        self.process.kill()

    def place(self, now: float) -> Place:
        begun = self.task is not None and self.at[0] >= Stage.FETCH
        task = self.task if begun and self.task is not None else -1
        return Place(task, self.at[1], Stage(self.at[0]), now - self.since)


class SocketHost:
    """See core/host.py for who calls what when."""

    def __init__(
        self, workers: int, busy: int, job: Job[SlotSpace], *, fork: bool, sample_timeout: float | None, **_: object
    ) -> None:
        self._context = multiprocessing.get_context("fork" if fork else "spawn")
        self._job = job
        self._forked = fork
        self._allowed_s = sample_timeout
        self._floor = 0
        self._owner = os.getpid()
        self._events: list[messages.Event | host.Silence | host.Room] = []
        self._bell: tuple[socket.socket, socket.socket] | None = None
        self._kept_apart = [0] * workers
        self.lives: list[SocketLife | None] = [None] * workers
        self.resting = False
        self.marks = [0] * workers
        self.items: dict[int, int] = {}
        self.ends: dict[int, bytes | host.StreamEnd] = {}
        self.workers = [WorkerHandle(self, worker) for worker in range(workers)]

    @property
    def closed(self) -> bool:
        return self._bell is None

    def open(self) -> None:
        self._bell = socket.socketpair()
        self._bell[1].setblocking(False)

    def has_life(self, worker: int) -> bool:
        return self.lives[worker] is not None

    def pid_of(self, worker: int, patience_s: float = 0.0) -> int | None:
        life = self.lives[worker]
        return None if life is None or self.closed else life.process.pid

    # Orders --------------------------------------------------------------------------------------------------------

    def start(self, worker: int, life: int) -> None:
        self._forget(worker)
        ours, theirs = self._context.Pipe()
        others = [ours, *(other.connection for other in self.lives if other is not None)] if self._forked else []
        process = self._context.Process(  # type: ignore[attr-defined]
            target=serve,
            args=(theirs, others, self._job, worker, life, self._kept_apart[worker]),
            name=f"holdfast-worker-{worker}",
            daemon=True,
        )
        try:
            process.start()
        except OSError as error:
            ours.close()
            evidence = Evidence(pid=0, fork_errno=error.errno or 0)
            now = time.monotonic()
            nowhere = Place(-1, 0, Stage.BOOT, 0.0)
            self._events.append(Exited(worker, life, now, Cause.UNBORN, error.errno or 0, nowhere, evidence))
        else:
            self.lives[worker] = SocketLife(life, process, ours)
        finally:
            theirs.close()

    def _life(self, worker: int, life: int) -> SocketLife | None:
        found = self.lives[worker]
        return found if found is not None and found.life == life else None

    def send(self, worker: int, life: int, task: int, payload: bytes) -> None:
        found = self._life(worker, life)
        if found is not None and not found.leaving:
            found.waiting.append((task, payload))
            found.next()

    def flush(self) -> None:
        """Nothing is held back."""

    def want(self, task: int) -> None:
        """Nobody waits for a slot."""

    def take_back(self, worker: int, life: int) -> None:
        found = self._life(worker, life)
        if found is not None and found.waiting:
            self._events.append(messages.Returned(worker, life, found.waiting.popleft()[0]))

    def abandon_below(self, task: int) -> None:
        self._floor = task
        self.marks[:] = [0] * len(self.marks)
        self.items.clear()
        self.ends.clear()
        for life in self.lives:
            if life is not None:
                life.waiting = deque(each for each in life.waiting if each[0] >= task)

    def _return_all(self, worker: int, life: SocketLife) -> None:
        self._events += [messages.Returned(worker, life.life, task) for task, _ in life.waiting]
        life.waiting.clear()

    def retire(self, worker: int, life: int) -> None:
        found = self._life(worker, life)
        if found is not None:
            self._return_all(worker, found)
            found.leaving = True
            found.ended = (Cause.RECYCLED, Leave.ASKED)
            found.next()

    def release(self, worker: int, life: int, grace_s: float) -> None:
        found = self._life(worker, life)
        if found is not None:
            found.leaving, found.end_at = True, time.monotonic() + grace_s
            found.ended = (Cause.ASKED, 0)
            found.next()

    def kill(self, worker: int, life: int, task: int) -> None:
        found = self._life(worker, life)
        if found is None:
            return
        self._hear(worker, found)  # it is not on what it has finished
        if found.task == task:
            self._return_all(worker, found)
            found.end(Cause.ASKED)
        else:
            found.waiting = deque(each for each in found.waiting if each[0] != task)
            self._events.append(messages.Spared(worker, life))

    def renew(self) -> None:
        self._events.clear()
        for worker in range(len(self.lives)):
            self._forget(worker)

    def _forget(self, worker: int) -> None:
        """Whatever is left of its life ends, and nothing is told of it."""
        life, self.lives[worker] = self.lives[worker], None
        if life is not None:
            life.process.kill()
            life.process.join()
            life.connection.close()

    # Facts ---------------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        bell = self._bell
        if bell is not None:
            with suppress(OSError):  # it is full: it rings
                bell[1].send(b"!")

    def wait(self, timeout_s: float | None) -> Sequence[messages.Event | host.Silence | host.Room]:
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        rung = self._look(0.0)
        while not self._events and not rung:
            now = time.monotonic()
            if limit is not None and now >= limit:
                break
            due = [at for at in (limit, *map(self._due, self.lives)) if at is not None]
            self.resting = True
            rung = self._look(max(0.0, min(due) - now) if due else None)
            self.resting = False
        events, self._events = self._events, []
        return events

    def _look(self, patience_s: float | None) -> bool:
        """True if the bell has rung."""
        if self._bell is None:
            raise HoldfastError("these workers have been ended: nothing more will come from them")
        bell = self._bell[0]
        lives = [(worker, life) for worker, life in enumerate(self.lives) if life is not None]
        heard: list[Any] = [
            bell,
            *(life.connection for _, life in lives),
            *(life.process.sentinel for _, life in lives),
        ]
        ready = wait(heard, patience_s)
        now = time.monotonic()
        for worker, life in lives:
            dead = life.process.sentinel in ready
            if dead or life.connection in ready:
                self._hear(worker, life)
            if dead or not life.process.is_alive():
                self._bury(worker, life)
            elif (due := self._due(life)) is not None and now >= due:
                life.end(Cause.DEADLINE if life.end_at is None else Cause.ASKED)
        return bell in ready and bool(bell.recv(4096))

    def _due(self, life: SocketLife | None) -> float | None:
        """When it is killed, if nothing is heard of it."""
        if life is None or life.dying:
            return None
        if life.end_at is not None:
            return life.end_at
        stage, position, allowed_ns = life.at
        allowed = allowed_ns / 1e9 if allowed_ns else self._allowed_s
        if allowed is None or allowed < 0 or life.task is None or stage < Stage.FETCH:
            return None
        return life.since + allowed * (max(1, position) if stage == Stage.FETCH_MANY else 1)

    def _hear(self, worker: int, life: SocketLife) -> None:
        """All that it has said."""
        try:
            while life.connection.poll():
                self._understand(worker, life, *life.connection.recv())
        except (EOFError, OSError, pickle.UnpicklingError):
            life.process.kill()  # it is dead, perhaps in the middle of a word; or nobody can hear it any more

    def _understand(self, worker: int, life: SocketLife, what: str, *said: Any) -> None:
        match what:
            case "at":
                *life.at, self._kept_apart[worker] = said
                life.since = time.monotonic()
            case "booted":
                life.booted = True
                self._events.append(messages.Booted(worker, life.life))
            case "unfit":
                self._events.append(messages.BootFailed(worker, life.life, SocketResult(said[0], said[1], worker)))
            case "spent":
                life.ended = (Cause.RECYCLED, said[0])
            case "reply":
                task, life.task, life.at = life.task, None, [Stage.IDLE, 0, 0]
                assert task is not None
                self._finish(worker, life, task, *said)
        life.next()

    def _finish(self, worker: int, life: SocketLife, task: int, reply: Reply, content: bytes) -> None:
        if task >= self._floor and reply.mark:
            self.marks[worker] = reply.mark
        if reply.kind is not ReplyKind.EXHAUSTED:
            result = SocketResult(reply, content, worker)
            self._events.append(messages.Finished(worker, life.life, task, result, reply.bad))
            return
        if task >= self._floor:
            self.items[worker] = reply.buffers
            if reply.spec_bytes:
                end = host.StreamEnd(reply.spec_bytes)
                self.ends[worker] = content if end is host.StreamEnd.KNOWN else end
        self._events.append(messages.Exhausted(worker, life.life, task, reply.bad))

    def _bury(self, worker: int, life: SocketLife) -> None:
        life.process.join()
        self._hear(worker, life)  # what it finished comes before its death
        life.connection.close()
        self.lives[worker] = None
        status = life.process.exitcode or 0
        self.workers[worker].exitcode = status
        cause, code = (Cause.SIGNAL, -status) if status < 0 else (Cause.EXIT, status)
        if life.ended is not None and (life.dying or status == 0):
            cause, code = life.ended
        now, pid = time.monotonic(), life.process.pid or 0
        self._events.append(Exited(worker, life.life, now, cause, code, life.on or life.place(now), Evidence(pid=pid)))

    def leftovers(self) -> list[host.Silence]:
        return []

    def close(self, grace_s: float = GRACE_S) -> None:
        if os.getpid() != self._owner:
            return
        bell, self._bell = self._bell, None
        if bell is None:
            return
        lives = [(worker, life) for worker, life in enumerate(self.lives) if life is not None]
        for _, life in lives:
            life.connection.close()  # an idle one leaves
        deadline = time.monotonic() + grace_s
        for worker, life in lives:
            life.process.join(max(0.0, deadline - time.monotonic()))
            life.process.kill()
            life.process.join()
            self.workers[worker].exitcode = life.process.exitcode
            self.lives[worker] = None
        for end in bell:
            end.close()
