"""WorkerChannel: what the trainer holds of one life. Answers: what all workers say becomes events.

A channel owns the pipe through which a life gets its tasks, and the memory file with its slots and letter boxes. A task
lies in a letter box from the moment it is sent until it is answered, or taken back. `Answers` owns the pipe on which
all lives answer, and the socket through which files come that are too large for a slot, each ahead of its record.
"""

import errno
import os
import resource
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from holdfast.core.host import JOURNAL_BYTES, JOURNALLED, POSITION, SLOT, ReplyKind, Room, Silence, StreamEnd
from holdfast.core.messages import Booted, BootFailed, Event, Exhausted, Finished, Place, Stage
from holdfast.errors import HoldfastError
from holdfast.local.protocol.pulse import Pulse
from holdfast.local.protocol.wire import ELSEWHERE, MAGIC, RECORD, TASK, StartLife
from holdfast.shm import forks
from holdfast.shm.memory_file import Memory, new_file, sparse_file, strides_for
from holdfast.shm.slot_writer import FileSpace
from holdfast.shm.slots import KEEPABLE, Gate, SlotResult, Slots

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


# Answers: what workers say becomes events.


_BATCH, _ERROR = MAGIC | ReplyKind.BATCH, MAGIC | ReplyKind.ERROR
_AT_ONCE = RECORD.size * 50


class Answers:
    """`channels`, `marks`, `items`, `ends`: of each worker, as they are now; all but the first are written here.

    `pipe`, `pipe_w`, `files_w`: for whoever waits, and for the keeper.
    """

    def __init__(
        self,
        channels: Sequence[WorkerChannel | None],
        marks: list[int],
        items: dict[int, int],
        ends: dict[int, bytes | StreamEnd],
        journals: Journals,
    ) -> None:
        self._channels = channels
        self._marks = marks
        self._items = items
        self._ends = ends
        self._journals = journals
        self._floor = 0
        self._taken: dict[tuple[int, ...], int] = {}  # record -> descriptor of its file
        with ExitStack() as undo:
            self.pipe, self.pipe_w = os.pipe2(os.O_CLOEXEC)
            undo.callback(os.close, self.pipe)
            undo.callback(os.close, self.pipe_w)
            os.set_blocking(self.pipe, False)
            self._files, self.files_w = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._files.setblocking(False)
            os.set_blocking(self.pipe_w, False)  # a worker that has to wait says so in its pulse
            self.files_w.setblocking(False)
            undo.pop_all()
        self._open = [self.pipe, self.pipe_w]  # to be closed

    def abandon_below(self, task: int) -> None:
        """Marks of tasks before this one do not count any more."""
        self._floor = task
        self._marks[:] = [0] * len(self._marks)
        self._items.clear()
        self._ends.clear()

    def drain(self, events: list[Event | Silence | Room]) -> None:
        """All that workers have said so far."""
        while True:
            try:
                data = os.read(self.pipe, _AT_ONCE)
            except BlockingIOError:
                return
            for record in RECORD.iter_unpack(data):
                event = self._understand(record)
                if event is not None:
                    events.append(event)
            if len(data) < _AT_ONCE:
                return

    def _understand(self, record: tuple[int, ...]) -> Event | None:
        kind, worker, life, task, slot, where, buffers, spec_bytes, bad, mark = record
        if kind & ~0xFF != MAGIC:
            raise HoldfastError(
                "something in a worker wrote into Holdfast's own pipe: does the dataset close or reuse "
                "descriptors that it did not open (os.closerange)?"
            )
        line = self._channels[worker]
        if line is None or line.life != life:
            return None  # an earlier life; its memory went with it
        line.answered(task)
        if mark and task >= self._floor:
            self._marks[worker] = mark
        if kind in (_BATCH, _ERROR):
            if self._journals:
                self._journals.pop(task, None)
            slots = line.slots
            result = SlotResult(slots, slot, None, where, buffers, spec_bytes, kind == _ERROR, worker)
            slots.used(slot, where + 16 * buffers + spec_bytes)
            return Finished(worker, life, task, result, bad)
        return self._understand_rare(ReplyKind(kind & 0xFF), line, record)

    def _understand_rare(self, kind: ReplyKind, line: WorkerChannel, record: tuple[int, ...]) -> Event | None:
        _, worker, life, task, slot, where, buffers, spec_bytes, bad, _ = record
        match kind:
            case ReplyKind.BOOTED:
                return Booted(worker, life)
            case ReplyKind.BOOT_FAILED:
                return BootFailed(
                    worker, life, SlotResult(line.slots, slot, None, where, buffers, spec_bytes, True, worker)
                )
            case ReplyKind.EXHAUSTED:
                if task >= self._floor:
                    self._items[worker] = buffers
                    if spec_bytes:
                        end = StreamEnd(spec_bytes)
                        self._ends[worker] = line.slots.copy(slot, where) if end is StreamEnd.KNOWN else end
                if slot >= 0:
                    line.slots.used(slot, where)
                    line.slots.put_back(slot)
                return Exhausted(worker, life, task, bad)
            case ReplyKind.ABANDONED:
                return None  # its letter box is free already, and it had no slot
            case ReplyKind.BATCH_IN_FILE | ReplyKind.ERROR_IN_FILE:
                line.slots.put_back(slot)
                failed = kind is ReplyKind.ERROR_IN_FILE
                result = SlotResult(None, 0, self._file_of(record), where, buffers, spec_bytes, failed, worker)
                return Finished(worker, life, task, result, bad)
            case _:
                raise AssertionError(f"unknown record {record}")

    def _file_of(self, record: tuple[int, ...]) -> Memory | OSError:
        """The file that this worker sent just before it wrote the record; or why it cannot be had."""
        self._take_files()
        fd = self._taken.pop(record)
        if fd < 0:
            return OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: the file of a large batch could not be taken")
        try:
            return Memory(fd, os.fstat(fd).st_size)
        except OSError as error:
            return error
        finally:
            os.close(fd)

    def _take_files(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._files, RECORD.size, 1)
            except BlockingIOError:
                return
            if not data:
                return
            # The kernel drops a descriptor for which this process has no room.
            self._taken[RECORD.unpack(data)] = fds[0] if fds else -1

    def close(self) -> None:
        """What nobody has asked for goes, too. May be called again where a signal handler raised."""
        if self._files.fileno() >= 0:
            self._take_files()
        self._open += [fd for fd in self._taken.values() if fd >= 0]
        self._taken = {}
        self.pipe = self.pipe_w = -1
        while self._open:
            fd = self._open[-1]
            del self._open[-1]  # first: it must not be closed twice
            os.close(fd)
        self._files.close()
        self.files_w.close()

    def close_in_child(self, *, keeper: bool) -> None:
        """What is ours; the other ends, too, but in the keeper: they are its own."""
        pipe, self.pipe = self.pipe, -1
        os.close(pipe)
        self._files.close()
        if not keeper:
            pipe_w, self.pipe_w = self.pipe_w, -1
            os.close(pipe_w)
            self.files_w.close()
