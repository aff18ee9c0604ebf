"""LocalHost: workers as processes of this machine.

It owns, in the trainer: the pipe on which all workers answer, the socket to the keeper, and for each life a pipe for
its tasks and a memory file for its batches. No thread: everything happens inside `wait` and `send`. The number of
descriptors is constant per worker, whatever is sent and kept.
"""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import Any, assert_never

from holdfast.core.host import Room, Silence
from holdfast.core.messages import (
    Booted,
    BootFailed,
    Cause,
    Event,
    Exhausted,
    Exited,
    Finished,
    Leave,
    Place,
    Returned,
    Spared,
    Stage,
)
from holdfast.errors import HoldfastError
from holdfast.local import birth, forks, linux, procfs
from holdfast.local.cradle import Orders
from holdfast.local.evidence import Evidence
from holdfast.local.lifeline import Lifeline, Parcel, WorkerHandle, exit_code, sparse_file
from holdfast.local.pulse import ASKED, FLOOR, JOURNAL_BYTES, JOURNALLED, LIFE, PAGE, POSITION, SLOT, Pulse
from holdfast.local.room import RoomWatch
from holdfast.local.wire import (
    MAGIC,
    RECORD,
    TASK,
    EndLife,
    KeeperSignalled,
    KeeperUp,
    Kind,
    LifeEnded,
    LifeQuiet,
    LifeStarted,
    Message,
    RoomLeft,
    StartLife,
    StopAll,
    decode,
    encode,
)
from holdfast.local.worker import Job
from holdfast.shm.memory import Memory, new_file
from holdfast.shm.pack import SMALL, unpack
from holdfast.shm.slots import KEEPABLE, Gate, Slots, strides_for

# A forked keeper that says nothing for this long may have inherited a held lock. (A spawned one imports torch first.)
KEEPER_READY_S = 10.0
# What workers get to leave by themselves once there is no more work, before they are killed.
GRACE_S = 1.0
# Small batches come this close one after another; a wait for them is a few looks, see `_look_a_while`.
SPIN_S = 150e-6
_BATCH, _ERROR = MAGIC | Kind.BATCH, MAGIC | Kind.ERROR
_NO_JOURNAL = (b"", 0)


class LocalHost:
    """See core/host.py for who calls what when."""

    def __init__(
        self,
        workers: int,
        busy: int,
        job: Job,
        *,
        fork: bool,
        sample_timeout: float | None,
        growth_bytes: int | None,
        need: int = 0,
        gate: Gate | None = None,
        take_back: bool = False,
        fixed: bool = False,
    ) -> None:
        """`busy`: how many tasks may be out at once. `fork`: from the trainer, or from a fresh interpreter. `need`:
        bytes that a worker needed in an earlier epoch. `gate`: where a device reads slots. `take_back`: tasks that were
        sent and not begun may be wanted back; that is one descriptor more per worker. `fixed`: no worker can do the
        work of another.
        """
        self._fixed = fixed
        self._takes_back = take_back
        self._job = job
        self._gate = gate
        self._fork = fork
        self._busy = busy
        self._settings = (sample_timeout, growth_bytes)
        self.need = need
        # How many workers fit into memory, as far as is known. Tasks of a pool may wait for each other: all begin.
        self.room = Room(workers, False) if take_back else RoomWatch(workers, need).said
        self._owner = os.getpid()
        self._lifelines: list[Lifeline | None] = [None] * workers
        self._events: list[Event | Silence | Room] = []
        self._rung = False
        self._quick = False  # the last wait was short
        self._files: dict[tuple[int, ...], int] = {}
        self._journals: dict[int, tuple[bytes, int]] = {}  # task -> what its last life had done of it
        self.marks = [0] * workers  # the last one of each worker, over all its lives
        self._floor = 0
        self._keeper_pid = 0
        self._keeper: BaseProcess | None = None
        self._keeper_up = False
        self._keeper_due = 0.0
        self._control: socket.socket
        self._fds: list[int] = []  # plain descriptors, all of ours but the task pipes
        self._closed = False
        self.workers = [WorkerHandle(self, i) for i in range(workers)]

    # Opening and closing -------------------------------------------------------------------------------------------

    def open(self) -> None:
        self._thread = threading.get_ident()
        workers = len(self._lifelines)
        self._results, self._results_w = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._results, False)
        self._parcels, self._parcels_w = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._parcels.setblocking(False)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pulse_fd = new_file("pulse", (workers + 1) * PAGE)  # one for the keeper
        memory = Memory(self._pulse_fd, workers * PAGE)
        self.pulses = [Pulse(memory, i) for i in range(workers)]
        forks.watch(self)
        self._launch()

    def _launch(self) -> None:
        """A new keeper. What it needs of the old one's is still here: nothing is lost with a keeper."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        orders = Orders(
            theirs,
            self._results_w,
            self._parcels_w,
            self._pulse_fd,
            len(self._lifelines),
            os.getpid(),
            procfs.threads(),
            *self._settings,
            self.need,
            self.room.workers,
            self._takes_back,
            self._fixed,
        )
        self._keeper_up = False
        with theirs:
            if self._fork:
                self._keeper_pid = birth.fork_keeper(orders, self._job)
                self._keeper_due = time.monotonic() + KEEPER_READY_S
            else:
                self._keeper = birth.spawn_keeper(orders, self._job)
                self._keeper_pid = self._keeper.pid or 0
                self._keeper_due = float("inf")
        self._poll = select.poll()
        self._poll.register(self._results, select.POLLIN)
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._bell, select.POLLIN)

    def close(self, grace_s: float = GRACE_S) -> None:
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        forks.forget(self)
        try:
            self._control.send(encode(StopAll(grace_s)))
        except OSError:
            grace_s = 0.0  # the keeper is gone already
        for worker in range(len(self._lifelines)):
            self._end_lifeline(worker)
        self._keeper_gone(grace_s + 3.0)
        self._hear_last_words()
        self._end_keeper(0.0)
        self._close_descriptors()

    def _end_keeper(self, patience_s: float) -> None:
        if not self._keeper_gone(patience_s):
            try:
                os.kill(self._keeper_pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it went in between
            self._keeper_gone(3.0)
        if self._keeper is not None and not self._keeper.is_alive():
            self._keeper.close()
        self._keeper = None
        self._control.close()

    def _keeper_gone(self, patience_s: float) -> bool:
        """Reap it within that time."""
        if self._keeper is None:
            return linux.wait_for_exit(self._keeper_pid, patience_s)
        self._keeper.join(patience_s)
        return not self._keeper.is_alive()

    def _close_descriptors(self) -> None:
        self._take_files()
        for fd in (
            self._results,
            self._results_w,
            self._pulse_fd,
            self._bell,
            *self._files.values(),
        ):
            os.close(fd)
        self._files.clear()
        self.pulses.clear()  # and with them their mapping
        self._parcels.close()
        self._parcels_w.close()

    def close_in_child(self) -> None:
        """In a forked child of the trainer: it has no part in this. (A new keeper keeps what `Orders` names.)"""
        self._closed = True
        os.close(self._results)
        os.close(self._bell)
        self._parcels.close()
        self._control.close()
        for line in self._lifelines:
            if line is not None:
                line.hang_up()

    def renew(self) -> None:
        self._events.clear()
        os.kill(self._keeper_pid, signal.SIGKILL)  # its workers die with it
        self._end_keeper(3.0)
        self._drain()
        self._events.clear()
        self._begin_room()
        self._launch()

    @property
    def closed(self) -> bool:
        """True when all processes have ended."""
        return self._closed

    def is_started(self, worker: int) -> bool:
        """True from its first life on, until the end."""
        return self._lifelines[worker] is not None

    def has_life(self, worker: int) -> bool:
        """False for a worker that is not needed for now."""
        return self._lifelines[worker] is not None

    def pid_of(self, worker: int, patience_s: float = 0.0) -> int | None:
        """The process that plays this worker now; None while it is being made, and after the end.

        With patience, and in the thread that iterates, the keeper is listened to meanwhile.
        """
        deadline = time.monotonic() + patience_s
        while True:
            line = self._lifelines[worker]
            if line is None or line.pid is not None or self._closed:
                return None if line is None else line.pid
            left = deadline - time.monotonic()
            if left <= 0 or threading.get_ident() != self._thread:
                return None
            control = select.poll()
            control.register(self._control, select.POLLIN)
            if control.poll(left * 1000):
                self._hear_keeper()

    # Orders --------------------------------------------------------------------------------------------------------

    def start(self, worker: int, life: int) -> None:
        self._end_lifeline(worker)
        slots, boxes = self._busy + KEEPABLE, self._busy
        tasks_r, tasks_w = os.pipe2(os.O_CLOEXEC)
        fd, memory, stride = sparse_file(strides_for(slots, boxes))
        crash = new_file("crash", 0)
        space = Slots(memory, stride, slots, boxes, self._gate)
        forks.watch_slots(space)
        unread = -1
        if self._takes_back:
            # A description of its own: the worker's end must go on blocking.
            unread = os.open(f"/proc/self/fd/{tasks_r}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        line = self._lifelines[worker] = Lifeline(life, tasks_w, unread, space)
        os.set_blocking(line.tasks, False)
        order = encode(StartLife(worker, life, slots, boxes, stride))
        try:
            socket.send_fds(self._control, [order], [tasks_r, fd, crash])
        except OSError:
            pass  # the keeper is gone: `wait` finds that out and says so for each life
        finally:
            for mine in (tasks_r, fd, crash):
                os.close(mine)

    def retire(self, worker: int, life: int) -> None:
        line = self._lifelines[worker]
        if line is not None and line.life == life:
            self.pulses[worker].words[ASKED] = Leave.ASKED
            line.hang_up()  # an idle one waits there

    def release(self, worker: int, life: int, grace_s: float) -> None:
        line = self._lifelines[worker]
        if line is not None and line.life == life:
            line.hang_up()
            self._end(worker, life, grace_s)

    def kill(self, worker: int, life: int, task: int) -> None:
        line = self._lifelines[worker]
        if line is None or line.life != life or line.tasks < 0:
            return  # it ends already
        line.flush()
        unread = line.take_back(self._busy)
        behind = {record[0] for record in unread}
        if task in line.boxes and task not in behind and len(line.boxes) == len(behind) + 1:
            # All else was taken back: if it is still at work, then on this.
            line.hang_up()
            self._end(worker, life, 0.0)
            self._events += [Returned(worker, life, other) for other in behind]
            return
        for record in unread:
            if record[0] == task:
                line.slots.free_box(line.boxes.pop(task))
            else:
                line.unsent += TASK.pack(*record)
        line.flush()
        self._events.append(Spared(worker, life))

    def take_back(self, worker: int, life: int) -> None:
        line = self._lifelines[worker]
        if line is None or line.life != life:
            return
        line.flush()
        for task, *_ in line.take_back(1):
            line.slots.free_box(line.boxes.pop(task))
            self._events.append(Returned(worker, life, task))

    def _end(self, worker: int, life: int, grace_s: float) -> None:
        try:
            self._control.send(encode(EndLife(worker, life, grace_s)))
        except OSError:
            pass  # the keeper is gone: `wait` finds that out and says so for each life

    def _end_lifeline(self, worker: int) -> None:
        line = self._lifelines[worker]
        if line is not None:
            line.hang_up()
            line.slots.retire()
            self._lifelines[worker] = None

    def send(self, worker: int, life: int, task: int, payload: bytes) -> None:
        line = self._lifelines[worker]
        if line is None or line.life != life or line.tasks < 0:
            return
        slots = line.slots
        box = slots.take_box()
        if box is None:  # an epoch was left, and what it had asked for is not answered yet
            line.waiting.append((task, payload))
            return
        line.boxes[task] = box
        start = box * slots.stride
        size = len(payload)
        saved, count = self._journals.get(task, _NO_JOURNAL) if self._journals else _NO_JOURNAL
        slots.memory.view[start : start + size] = payload
        if count:
            slots.memory.view[start + size : start + size + len(saved)] = saved
        record = TASK.pack(task, box, size, len(saved), count)
        if self._takes_back:
            line.unsent += record
            return
        try:
            os.write(line.tasks, record)
        except BrokenPipeError:
            pass  # it is dying: its Exited is on the way, and the task goes out again
        except BlockingIOError:  # thousands of tasks for one worker: the rest follow when it has answered some
            slots.free_box(line.boxes.pop(task))
            line.waiting.append((task, payload))

    def flush(self) -> None:
        """With `take_back`: workers get what was sent since, in one go."""
        for line in self._lifelines:
            if line is not None and line.unsent:
                line.flush()

    def abandon_below(self, task: int) -> None:
        """Workers skip every task before this one (an epoch that was left early)."""
        self._floor = task
        self.marks = [0] * len(self.marks)
        for pulse in self.pulses:
            pulse.words[FLOOR] = task
        self._journals.clear()
        for line in self._lifelines:
            if line is not None:
                line.waiting.clear()

    # Facts ---------------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """From any thread: whoever waits stops waiting, with or without an event."""
        os.eventfd_write(self._bell, 1)

    def _answer_bell(self) -> None:
        os.eventfd_read(self._bell)
        self._rung = True

    def wait(self, timeout_s: float | None) -> Sequence[Event | Silence | Room]:
        self._thread = threading.get_ident()
        self._rung = False
        if self._takes_back:
            self.flush()
        # The keeper is listened to each time, also while other workers keep us busy.
        for fd, _ in self._poll.poll(0):
            if fd == self._results:
                self._drain()
            elif fd == self._bell:
                self._answer_bell()
            else:
                self._hear_keeper()
        if not self._events and timeout_s != 0:
            self._sleep(timeout_s)
        events, self._events = self._events, []
        return events

    def _sleep(self, timeout_s: float | None) -> None:
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._events and not self._rung:
            now = time.monotonic()
            until = min(
                limit or float("inf"),
                float("inf") if self._keeper_up else self._keeper_due,
            )
            wait_ms = None if until == float("inf") else max(0.0, until - now) * 1000
            ready = self._look_a_while() or self._poll.poll(wait_ms)
            self._quick = time.monotonic() - now < SPIN_S
            control = self._control.fileno()
            for fd, _ in ready:
                if fd == control:
                    self._hear_keeper()
                elif fd == self._bell:
                    self._answer_bell()
            self._drain()
            if not ready:
                if not self._keeper_up and time.monotonic() >= self._keeper_due:
                    self._lose_keeper()
                elif limit is not None and time.monotonic() >= limit:
                    return

    def _look_a_while(self) -> list[tuple[int, int]]:
        """What has come within a moment, if the last wait was as short: falling asleep and being woken takes longer.

        Others who want this processor get it between two looks.
        """
        if self._quick:
            end = time.monotonic() + SPIN_S
            while time.monotonic() < end:
                ready = self._poll.poll(0)
                if ready:
                    return ready
                os.sched_yield()
        return []

    def _drain(self) -> None:
        """All that workers have said so far."""
        while True:
            try:
                data = os.read(self._results, RECORD.size * 50)
            except BlockingIOError:
                return
            for record in RECORD.iter_unpack(data):
                self._understand(record)
            if len(data) < RECORD.size * 50:
                return

    def _understand(self, record: tuple[int, ...]) -> None:
        kind, worker, life, task, slot, where, buffers, spec_bytes, bad, mark = record
        if kind & ~0xFF != MAGIC:
            raise HoldfastError(
                "something in a worker wrote into Holdfast's own pipe: does the dataset close or reuse "
                "descriptors that it did not open (os.closerange)?"
            )
        line = self._lifelines[worker]
        if line is None or line.life != life:
            return  # an earlier life; its memory went with it
        box = line.boxes.pop(task, None)
        if box is not None:
            line.slots.free_box(box)
            if line.waiting:
                self.send(worker, life, *line.waiting.popleft())
        if mark and task >= self._floor:
            self.marks[worker] = mark
        if kind in (_BATCH, _ERROR):
            if self._journals:
                self._journals.pop(task, None)
            slots = line.slots
            parcel = Parcel(slots, slot, None, where, buffers, spec_bytes, kind == _ERROR, worker)
            slots.used(slot, parcel.size)
            self._events.append(Finished(worker, life, task, parcel, bad))
        else:
            self._understand_rare(Kind(kind & 0xFF), line, record)

    def _understand_rare(self, kind: Kind, line: Lifeline, record: tuple[int, ...]) -> None:
        _, worker, life, task, slot, where, buffers, spec_bytes, bad, _ = record
        match kind:
            case Kind.BOOTED:
                self._events.append(Booted(worker, life))
            case Kind.BOOT_FAILED:
                parcel = Parcel(line.slots, slot, None, where, buffers, spec_bytes, True, worker)
                self._events.append(BootFailed(worker, life, parcel))
            case Kind.EXHAUSTED:
                line.slots.put_back(slot)
                self._events.append(Exhausted(worker, life, task))
            case Kind.ABANDONED:
                pass  # its letter box is free already, and it had no slot
            case Kind.BATCH_IN_FILE:
                line.slots.put_back(slot)
                memory = self._file_of(record)
                parcel = Parcel(None, 0, memory, where, buffers, spec_bytes, False, worker)
                self._events.append(Finished(worker, life, task, parcel, bad))
            case _:
                raise AssertionError(f"unknown record {record}")

    def _file_of(self, record: tuple[int, ...]) -> Memory:
        """The file that this worker sent just before it wrote the record."""
        self._take_files()
        fd = self._files.pop(record)
        try:
            return Memory(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def _take_files(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._parcels, RECORD.size, 1)
            except BlockingIOError:
                return
            if not data:
                return
            record = RECORD.unpack(data)
            self._files[record] = fds[0]

    def _hear_keeper(self) -> None:
        while True:
            try:
                data = self._control.recv(1 << 17)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose_keeper()
                return
            self._believe(decode(data))

    def _hear_last_words(self) -> None:
        """What the keeper saw at the very end: signals that workers noted. Their exits are what we asked for."""
        self._events.clear()
        while True:
            try:
                data = self._control.recv(1 << 17)
            except OSError:
                return
            if not data:
                return
            message = decode(data)
            if isinstance(message, LifeQuiet | KeeperSignalled):
                self._believe(message)
            elif isinstance(message, LifeEnded):
                self.workers[message.worker].exitcode = exit_code(message)

    def leftovers(self) -> list[Silence]:
        """After close(): incidents that nobody has heard of yet."""
        left = [event for event in self._events if isinstance(event, Silence)]
        self._events.clear()
        return left

    def _believe(self, message: Message) -> None:
        match message:
            case KeeperUp():
                self._keeper_up = True
            case KeeperSignalled(number, evidence):
                self._events.append(Silence(-1, 0, "signal", number, Place(-1, 0, Stage.IDLE, 0.0), evidence))
            case LifeStarted(worker, life, pid):
                line = self._lifelines[worker]
                if line is not None and line.life == life:
                    line.pid = pid
            case LifeEnded(worker, life, at, cause, code, on, evidence):
                self._drain()  # what it finished comes before its death
                self._take_journal(worker, life, on)
                self.workers[worker].exitcode = exit_code(message)
                self._events.append(Exited(worker, life, at, cause, code, on, evidence))
                line = self._lifelines[worker]
                if line is not None and line.tasks < 0:
                    self._end_lifeline(worker)  # perhaps no other life follows
            case LifeQuiet(worker, life, what, code, on, evidence):
                self._events.append(Silence(worker, life, what, code, on, evidence))
            case RoomLeft(workers, paused, need, evidence):
                self.need, self.room = need, Room(workers, paused)
                self._events.append(self.room)
                if evidence is not None:
                    on = Place(-1, 0, Stage.IDLE, 0.0)
                    self._events.append(Silence(-1, 0, "room", workers, on, evidence))
            case StartLife() | EndLife() | StopAll():
                raise AssertionError(f"not for a trainer: {message}")
            case _:
                assert_never(message)

    def _take_journal(self, worker: int, life: int, on: Place) -> None:
        """What the dead worker had loaded of its batch, for its next life."""
        line = self._lifelines[worker]
        words = self.pulses[worker].words
        count = words[JOURNALLED]
        self._journals.pop(on.task, None)
        if line is None or line.life != life or on.stage is not Stage.FETCH or not count:
            return
        if words[POSITION] != on.position:
            return  # it went on between the verdict and its end: what it wrote reaches past the sample in question
        start = words[SLOT] * line.slots.stride
        saved = bytes(line.slots.memory.view[start : start + words[JOURNAL_BYTES]])
        if len(saved) < line.slots.stride // 4:  # it must fit beside the payload
            self._journals[on.task] = (saved, count)

    def _lose_keeper(self) -> None:
        """It died, or never came up. Its workers die with it, and nobody is to blame."""
        try:
            os.kill(self._keeper_pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # dead already, and reaped by somebody else
        self._end_keeper(3.0)
        self._drain()
        now = time.monotonic()
        for worker, line in enumerate(self._lifelines):
            if line is not None:
                evidence = Evidence(pid=line.pid or 0)
                pulse = self.pulses[worker]
                on = pulse.place(now) if pulse.words[LIFE] == line.life else None  # or it was never begun
                self._events.append(Exited(worker, line.life, now, Cause.KEEPER, 0, on, evidence))
        self._begin_room()
        self._launch()

    def _begin_room(self) -> None:
        """A new keeper says nothing of memory as long as all is well: whoever is paused must not stay so."""
        self.room = Room(self.room.workers, False)
        self._events.append(self.room)

    # Parcels -------------------------------------------------------------------------------------------------------

    def take_out(self, parcel: object, small: int = SMALL) -> Any:
        """What a parcel holds. Its slot is free when the last view of it is gone.

        Leaves below `small` bytes are copied out of it.
        """
        assert isinstance(parcel, Parcel)
        slots = parcel.slots
        if slots is None:
            assert parcel.file is not None
            whole = parcel.file.export
            return unpack(parcel.file.view, parcel.where, parcel.buffers, parcel.spec_bytes, whole, small)
        slot = parcel.slot
        start = slot * slots.stride
        view = slots.memory.view[start : start + slots.stride]
        lent: list[bool] = []  # not `slots.lent`: it may have come back already, and been claimed again

        def lend() -> memoryview | None:
            view = slots.lend(slot)
            lent.append(view is not None)
            if view is not None and self._gate is not None:
                self._gate.register(slots, slot, parcel.size)
            return view

        try:
            return unpack(view, parcel.where, parcel.buffers, parcel.spec_bytes, lend, small)
        finally:
            if not any(lent):
                slots.put_back(slot)

    def discard(self, result: object) -> None:
        if isinstance(result, Parcel) and result.slots is not None:
            result.slots.put_back(result.slot)
