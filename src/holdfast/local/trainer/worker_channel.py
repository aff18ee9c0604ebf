"""WorkerChannel: what the trainer holds of one life, and what it shows of it to others.

It owns the pipe through which a life gets its tasks, and the memory file with its slots and letter boxes. A task lies
in a letter box from the moment it is sent until it is answered, or taken back.
"""

import os
import resource
import signal
import time
from collections import deque
from contextlib import ExitStack
from typing import Protocol

from holdfast.core.host import JOURNAL_BYTES, JOURNALLED, POSITION, SLOT
from holdfast.core.messages import Cause, Exited, Place, Stage
from holdfast.errors import HoldfastError
from holdfast.local.protocol.pulse import Pulse
from holdfast.local.protocol.wire import ELSEWHERE, TASK, StartLife
from holdfast.shm import forks
from holdfast.shm.memory_file import Memory, new_file
from holdfast.shm.slot_writer import FileSpace
from holdfast.shm.slots import KEEPABLE, SMALLEST_STRIDE, Gate, Slots, stride_for, strides_for
from holdfast.system import linux

# Journals: what dead workers had loaded of their batches, for their next lives. In the trainer's memory.


class Journals(dict[int, tuple[bytes, int]]):
    """task -> (the bytes that its last life wrote, how many samples they hold).

    `sent`: to its next life. Otherwise somebody here reads them, and wants all that there is.
    """

    def __init__(self, *, sent: bool) -> None:
        super().__init__()
        self._sent = sent

    def keep(self, pulse: Pulse, slots: Slots | None, on: Place) -> None:
        """A life ended on this; `slots` are its own, if they are still there."""
        words = pulse.words
        count = words[JOURNALLED]
        self.pop(on.task, None)
        if slots is None or on.stage is not Stage.FETCH or not count:
            return
        if words[POSITION] != on.position and self._sent:
            return  # it went on between the verdict and its end: what it wrote reaches past the sample in question
        start = words[SLOT] * slots.stride
        saved = bytes(slots.memory.view[start : start + words[JOURNAL_BYTES]])
        if len(saved) < slots.stride // 4 or not self._sent:  # it must fit beside the payload
            self[on.task] = (saved, count)


# How long somebody who asks for a worker's pid right after the start may wait for it: a spawned keeper imports torch.
START_S = 10.0
# Descriptors that are open in the trainer while a life begins, and those that stay.
BEGINNING, STAYING = 4, 1
_NO_JOURNAL = (b"", 0)


class WorkerChannel:
    """The trainer's ends of one life."""

    def __init__(self, life: int, tasks: int, takes_back: bool, slots: Slots, journals: Journals) -> None:
        """`takes_back`: what the worker has not read of the pipe of tasks can be read there, and so be taken back."""
        self.life = life
        self.tasks = tasks
        self._journals = journals
        self._takes_back = takes_back
        self.slots = slots
        self.boxes: dict[int, int] = {}  # task -> its letter box
        self._large: dict[int, int] = {}  # task -> the file of a letter that no box can hold
        self.waiting: deque[tuple[int, bytes]] = deque()  # tasks for which there is no box yet, and their payloads
        self.unsent = b""  # TASK records
        self.pid: int | None = None

    def send(self, task: int, payload: bytes) -> None:
        """With its journal, if there is one. Where tasks may be taken back, they go out with the next `flush`."""
        if self.tasks < 0:
            return
        slots = self.slots
        box = slots.take_box()
        if box is None:  # an epoch was left, and what it had asked for is not answered yet
            self.waiting.append((task, payload))
            return
        self.boxes[task] = box
        start = box * slots.stride
        letter, size = payload, len(payload)
        if size > slots.stride:
            letter = self._put_in_file(task, payload)
            size = -len(letter)
        saved, count = self._journals.get(task, _NO_JOURNAL) if self._journals else _NO_JOURNAL
        slots.memory.view[start : start + len(letter)] = letter
        if count:
            start += len(letter)
            if start + len(saved) <= (box + 1) * slots.stride:
                slots.memory.view[start : start + len(saved)] = saved
            else:
                saved, count = _NO_JOURNAL  # there is no room beside the payload: it is a help, not a duty
        record = TASK.pack(task, box, size, len(saved), count)
        if self._takes_back:
            self.unsent += record
            return
        try:
            os.write(self.tasks, record)
        except BrokenPipeError:
            pass  # it is dying: its Exited is on the way, and the task goes out again
        except BlockingIOError:  # thousands of tasks for one worker: the rest follow when it has answered some
            self._free(task)
            self.waiting.append((task, payload))

    def _put_in_file(self, task: int, payload: bytes) -> bytes:
        """What its box says instead: where the worker finds it."""
        try:
            fd = self._large[task] = new_file("letter", 0)
            FileSpace(fd).put(memoryview(payload))
        except OSError as error:
            self._free(task)
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            limited = f"; RLIMIT_FSIZE is {limit} bytes" if limit != resource.RLIM_INFINITY else ""
            raise HoldfastError(
                f"a worker cannot be told of a batch whose indices take {len(payload)} bytes\n"
                f"    seen   {error}{limited}\n"
                "    try    smaller indices, fewer of them in a batch, or a larger limit (ulimit -f)"
            ) from error
        return ELSEWHERE.pack(os.getpid(), fd, os.fstat(fd).st_ino)

    def _free(self, task: int) -> None:
        """Its letter will not be read any more."""
        self.slots.free_box(self.boxes.pop(task))
        if self._large and (fd := self._large.pop(task, None)) is not None:
            os.close(fd)

    def answered(self, task: int) -> None:
        """Its letter box is free, for one that waits if any does."""
        if task in self.boxes:
            self._free(task)
            if self.waiting:
                self.send(*self.waiting.popleft())

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
        tasks, self.tasks = self.tasks, -1  # first: a forked child closes it, too
        if tasks >= 0:
            os.close(tasks)

    def end(self) -> None:
        """The worker is gone, or not ours."""
        self.hang_up()
        for fd in self._large.values():
            os.close(fd)
        self._large.clear()

    def take_back(self, most: int = 1) -> list[int]:
        """The next tasks that the worker has not begun, if there are any: it will not begin them."""
        self.flush()
        tasks = [task for task, *_ in self._take_unread(most)]
        for task in tasks:
            self._free(task)
        return tasks

    def isolate(self, task: int) -> set[int] | None:
        """Take back everything but this task, if the worker is at work on it: that is then all it can be at work on.

        None if it is not; then it keeps all the others.
        """
        self.flush()
        unread = self._take_unread(len(self.boxes))
        behind = {record[0] for record in unread}
        if task in self.boxes and task not in behind and len(self.boxes) == len(behind) + 1:
            return behind
        for record in unread:
            if record[0] == task:
                self._free(task)
            else:
                self.unsent += TASK.pack(*record)
        self.flush()
        return None

    def _take_unread(self, most: int) -> list[tuple[int, ...]]:
        """TASK records that the worker has not read. A read takes a record or leaves it: one of us has it."""
        try:
            data = os.read(self.tasks, TASK.size * most) if self._takes_back and self.tasks >= 0 else b""
        except BlockingIOError:
            return []
        return list(TASK.iter_unpack(data))


def begin_life(
    worker: int, life: int, busy: int, gate: Gate | None, journals: Journals, *, take_back: bool
) -> tuple[WorkerChannel, StartLife, list[int]]:
    """The trainer's ends; the order for the keeper, and the descriptors that go with it, to be closed here then."""
    # What the trainer has in hand while it sends the next tasks: one batch, or all of an epoch that was left.
    slots, boxes = 2 * busy + 1 + KEEPABLE, busy
    with ExitStack() as undo:
        tasks_r, tasks = os.pipe2(os.O_CLOEXEC)
        undo.callback(os.close, tasks_r)
        undo.callback(os.close, tasks)
        if take_back:
            # Both ends in one. A description of its own: the worker's end must go on blocking.
            both = os.open(f"/proc/self/fd/{tasks_r}", os.O_RDWR | os.O_CLOEXEC)
            os.dup2(both, tasks, inheritable=False)
            os.close(both)
        os.set_blocking(tasks, False)
        fd, memory, stride = sparse_file(strides_for(slots, boxes))
        undo.callback(os.close, fd)
        crash = new_file("crash", 0)
        undo.callback(os.close, crash)
        space = Slots(memory, stride, slots, boxes, gate)
        forks.watch_slots(space)
        line = WorkerChannel(life, tasks, take_back, space, journals)
        undo.pop_all()
    return line, StartLife(worker, life, slots, boxes, stride), [tasks_r, fd, crash]


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
            except BaseException as error:
                os.close(fd)
                if stride <= SMALLEST_STRIDE or not isinstance(error, OSError):
                    raise
        stride //= 4
        stride = max(stride, SMALLEST_STRIDE)
