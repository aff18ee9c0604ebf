"""A worker's whole life: boot, ready, loop, farewell.

It reads tasks from a pipe, and does them one after another in its main thread. It announces a batch when this is
complete in shared memory; from then on the batch does not need the worker. It knows nothing of other workers and
shares no lock with any process. The `Job` knows what a task is.
"""

import faulthandler
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from holdfast import remote_exception
from holdfast.core.host import BASE, JOURNALLED, SINCE, STAGE, Job, Reply, ReplyKind, Spent
from holdfast.core.messages import Leave, Stage
from holdfast.local.protocol.pulse import (
    ASKED,
    BUSY_NS,
    BYTES,
    DUMPABLE,
    FLOOR,
    LAST_SIGNAL,
    LEAVING,
    SIGNALS,
    TASK,
    TASKS,
    WANTED,
    Pulse,
)
from holdfast.local.protocol.wire import ELSEWHERE, MAGIC, RECORD
from holdfast.local.protocol.wire import TASK as TASK_RECORD
from holdfast.local.worker.thresholds import Thresholds
from holdfast.shm.memory_file import Memory, slot_view, strides_for
from holdfast.shm.pack import Packer
from holdfast.shm.slot_writer import NO_SLOT, Full, SlotClaims, SlotSpace
from holdfast.system import linux
from holdfast.system.signal_origin import CRASH_SIGNALS, note_gil

# Looked up once: in Python 3.11 each lookup takes 100 ns.
_IDLE = Stage.IDLE


class Wiring(NamedTuple):
    """What connects a worker with trainer and keeper. The descriptors are the worker's own."""

    worker: int
    life: int
    slots: int
    boxes: int
    stride: int
    tasks: int
    results: int
    files: socket.socket
    memory: int
    crash: int
    growth_bytes: int | None
    one_by_one: bool
    enough: int | None


class WorkerContext(NamedTuple):
    """A `JobContext`: the pulse and the slots of this life."""

    words: memoryview
    enter: Callable[..., None]
    walk: Callable[..., Iterator[Any]]
    output: SlotClaims


class WorkerLoop:
    """One life."""

    def __init__(self, wiring: Wiring, job: Job[SlotSpace], pulse: Pulse) -> None:
        self._wiring = wiring
        self._job = job
        self._pulse = pulse
        self._memory: Memory
        self._claims: SlotClaims
        self._kept_waiting_ns = 0  # by the trainer: to be read
        self._hung_up = select.poll()
        self._hung_up.register(wiring.tasks, 0)

    def run(self) -> None:
        """Boot, then work until the trainer closes the pipe."""
        linux.never_preempt_when_woken()
        linux.raise_descriptor_limit()
        wiring = self._wiring
        self._memory = Memory(wiring.memory, strides_for(wiring.slots, wiring.boxes) * wiring.stride)
        os.close(wiring.memory)
        self._claims = SlotClaims(self._memory, wiring.stride, wiring.slots, wiring.enough, self._may_wait)
        if self._boot():
            try:
                self._loop()
            except Spent as spent:
                self._pulse.words[LEAVING] = spent.why
                # To the file for the stack of a crash. The pulse stays on the sample that was refused something.
                os.write(self._wiring.crash, "\n".join(spent.facts).encode(errors="replace"))

    def take_signals(self) -> None:
        """This comes first. From here on the worker notes signals, and a crash leaves its stack."""
        words = self._pulse.words

        def note(number: int, frame: object) -> None:
            words[LAST_SIGNAL] = number
            words[SIGNALS] += 1

        for number in linux.NOTED_SIGNALS:
            signal.signal(number, note)
        self._pulse.sender.install(linux.NOTED_SIGNALS)
        _mind_forks()
        crash = self._wiring.crash
        faulthandler.enable(file=crash, all_threads=True)
        faulthandler.register(linux.DUMP_SIGNAL, file=crash, all_threads=True)
        self._pulse.sender.install(CRASH_SIGNALS)
        note_gil(self._pulse.gil_address, linux.DUMP_SIGNAL)
        words[DUMPABLE] = 1

    def _boot(self) -> bool:
        wiring = self._wiring
        try:
            context = WorkerContext(self._pulse.words, self._pulse.enter, self._pulse.walk, self._claims)
            self._job.boot(wiring.worker, wiring.life, context)
        except BaseException as error:  # user code: unpickling, worker_init_fn
            captured = remote_exception.capture(error)
            self._pulse.words[LEAVING] = Leave.UNFIT  # before the reply, which may end all
            last = wiring.slots + wiring.boxes
            view, address = slot_view(self._memory, wiring.stride, last)
            space = SlotSpace(view[: -wiring.slots], address)  # behind it are the states of the slots
            packer = Packer()
            try:
                content = packer.pack(captured, space)
            except Full:
                content = packer.pack(captured.brief(), space)
            self._announce(-1, last, Reply(ReplyKind.BOOT_FAILED, *content))
            return False
        if wiring.growth_bytes is not None:
            linux.limit_growth(wiring.growth_bytes)
        self._pulse.words[BASE] = max(1, linux.memory_of()[1])
        self._pulse.enter(Stage.IDLE)
        self._announce(-1, NO_SLOT, Reply(ReplyKind.BOOTED))
        return True

    def _loop(self) -> None:
        enter, words, run = self._pulse.enter, self._pulse.words, self._job.run
        view, stride = self._memory.view, self._wiring.stride
        claims = self._claims
        os.register_at_fork(after_in_child=self._close_in_child)
        clock = time.monotonic_ns
        # One at a time if the trainer may take others back.
        most = TASK_RECORD.size * (1 if self._wiring.one_by_one else 64)
        while data := os.read(self._wiring.tasks, most):
            for task, box, size, saved, count in TASK_RECORD.iter_unpack(data):
                if task < words[FLOOR]:
                    self._announce(task, NO_SLOT, Reply(ReplyKind.ABANDONED))
                    continue
                words[TASK], words[JOURNALLED] = task, 0
                began = clock() - claims.waited_ns - self._kept_waiting_ns
                letter = box * stride
                end = letter + abs(size)
                payload = view[letter:end] if size >= 0 else _elsewhere(view[letter:end])
                reply = run(payload, view[end : end + saved], count)
                sent = reply.where + reply.spec_bytes
                words[TASKS] += 1
                words[BYTES] += sent
                self._announce(task, claims.hand_over(sent), reply)
                enter(_IDLE)
                words[BUSY_NS] += words[SINCE] - claims.waited_ns - self._kept_waiting_ns - began
                if words[ASKED] and self._must_go():
                    return
        words[LEAVING] = words[ASKED]

    def _close_in_child(self) -> None:
        """A process that user code forks is no worker: it gets no task, and its replies go nowhere."""
        self._claims.close_in_child()
        wiring = self._wiring
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in (wiring.tasks, wiring.results, wiring.files.fileno()):
            os.dup2(nowhere, fd, inheritable=False)
        os.close(nowhere)

    def _may_wait(self) -> bool:
        """Wait for a slot? Not if the trainer waits for this very task, has left its epoch or sends no other.

        The stage is SEND meanwhile, so no sample is blamed for the wait. A task that has not begun stays at IDLE.
        """
        words = self._pulse.words
        if words[STAGE] != _IDLE:
            words[STAGE] = Stage.SEND
            words[SINCE] = time.monotonic_ns()
        return max(words[WANTED], words[FLOOR] - 1) < words[TASK] and not self._hung_up.poll(0)

    def _must_go(self) -> bool:
        """It was asked to leave. Perhaps a sample has passed a threshold only for a moment, so it checks again."""
        words = self._pulse.words
        grown = linux.memory_of()[1] - words[BASE]
        still = Thresholds(self._wiring.growth_bytes).judge(os.getpid(), grown, linux.descriptors())
        words[LEAVING] = words[ASKED] if words[ASKED] == Leave.ASKED else still.leave or 0
        words[ASKED] = words[LEAVING]
        return bool(words[LEAVING])

    def _announce(self, task: int, slot: int, reply: Reply) -> None:
        wiring = self._wiring
        kind, where, buffers, spec_bytes, bad, file, mark = reply
        head = (MAGIC | kind, wiring.worker, wiring.life, task, slot)
        record = RECORD.pack(*head, where, buffers, spec_bytes, bad, mark)
        if file >= 0:
            self._say(wiring.files.fileno(), lambda: socket.send_fds(wiring.files, [record], [file]))
            os.close(file)
        try:
            os.write(wiring.results, record)
        except BlockingIOError:
            self._say(wiring.results, lambda: os.write(wiring.results, record))

    def _say(self, fd: int, say: Callable[[], int]) -> None:
        """Announce it when the pipe has room. If the trainer is stopped and reads nothing, the worker does not hang."""
        words = self._pulse.words
        stage, began = words[STAGE], time.monotonic_ns()
        room = select.poll()
        room.register(fd, select.POLLOUT)
        while True:
            try:
                say()
                break
            except BlockingIOError:
                self._pulse.enter(Stage.ANNOUNCE)
                room.poll()
        if words[STAGE] == Stage.ANNOUNCE:
            self._pulse.enter(stage)
            self._kept_waiting_ns += time.monotonic_ns() - began


def _elsewhere(letter: memoryview) -> memoryview:
    """A payload that did not fit the letter box."""
    pid, fd, inode = ELSEWHERE.unpack(letter)
    with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
        if os.fstat(file.fileno()).st_ino != inode:
            raise OSError("the trainer has closed this file meanwhile: the task is not wanted any more")
        return memoryview(file.read())


def _mind_forks() -> None:
    """A process that user code forks can be terminated as always, from its first moment on.

    It inherits our handlers. Until it has the default ones back, they would note a signal, and it would be lost. So
    such signals are blocked during the fork.
    """
    masks: list[set[signal.Signals | int]] = []

    def before() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, linux.NOTED_SIGNALS))

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def in_child() -> None:
        for number in linux.NOTED_SIGNALS:
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)
