"""Answers: what workers say becomes events.

It owns the pipe on which all of them answer, and the socket through which files come that are too large for a slot,
each ahead of its record.
"""

import errno
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack

from holdfast.core.host import ReplyKind, Room, Silence, StreamEnd
from holdfast.core.messages import Booted, BootFailed, Event, Exhausted, Finished
from holdfast.errors import HoldfastError
from holdfast.local.protocol.wire import MAGIC, RECORD
from holdfast.local.trainer.worker_channel import Journals, WorkerChannel
from holdfast.shm.memory_file import Memory
from holdfast.shm.slots import SlotResult

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
