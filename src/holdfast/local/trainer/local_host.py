"""LocalHost: workers as processes of this machine.

It owns, in the trainer, a channel for each life and the pipe on which all workers answer (worker_channel.py), and the
keeper (process_handles.py). What they say becomes events here, in the order in which it must be
told. No thread: everything happens inside `wait` and `send`. The number of descriptors is constant per worker, whatever
is sent and kept.
"""

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import assert_never

from holdfast.core.host import Job, Room, Silence, StreamEnd
from holdfast.core.messages import Cause, Event, Exited, Leave, Place, Returned, Spared, Stage, What
from holdfast.errors import HoldfastError, WorkerLost
from holdfast.local.keeper.fork_worker import KeeperOrders
from holdfast.local.keeper.memory_budget import MemoryBudget
from holdfast.local.protocol.pulse import ASKED, FLOOR, LIFE, PAGE, WANTED, Pulse
from holdfast.local.protocol.wire import (
    EndLife,
    KeeperSignalled,
    KeeperUp,
    LifeStarted,
    Message,
    RoomLeft,
    StartLife,
    StopAll,
)
from holdfast.local.trainer.process_handles import FOUND_S, KeeperProcess, WorkerHandle, exit_code
from holdfast.local.trainer.worker_channel import BEGINNING, STAYING, Answers, Journals, WorkerChannel, begin_life
from holdfast.shm import forks
from holdfast.shm.main_module import GUARD, NO_GUARD
from holdfast.shm.memory_file import Memory, new_file
from holdfast.shm.slot_writer import SlotSpace
from holdfast.shm.slots import Gate
from holdfast.system import linux, procfs
from holdfast.system.cgroups import OomWatch
from holdfast.system.evidence import Evidence, facts_of

# What workers get to leave by themselves once there is no more work, before they are killed.
GRACE_S = 1.0
# What a keeper gets to hear of the end: it may have hundreds of workers to fork first.
HEAR_S = 10.0
_NOWHERE = Place(-1, 0, Stage.IDLE, 0.0)


class LocalHost:
    """See core/host.py for who calls what when."""

    def __init__(
        self,
        workers: int,
        busy: int,
        job: Job[SlotSpace],
        *,
        fork: bool,
        sample_timeout: float | None,
        growth_bytes: int | None,
        need: int = 0,
        take_back: bool = False,
        fixed: bool = False,
        enough: int | None = None,
        facts: str | None = None,
    ) -> None:
        """See `HostMaker`. `fork`: from the trainer, or from a fresh interpreter. `enough`: slots of a worker, see
        shm/slot_writer.py.
        """
        self._fixed = fixed
        self._enough = enough
        self._facts = facts
        self._takes_back = take_back
        self._gate: Gate | None = None
        self._busy = busy
        self._settings = (sample_timeout, growth_bytes)
        self.need = need
        # How many workers fit into memory, as far as is known. Tasks of a pool may wait for each other: all begin.
        self.room = Room(workers, False) if take_back else MemoryBudget(workers, need).said
        self._owner = os.getpid()
        self._keeper_process = KeeperProcess(job, fork=fork)
        self._channels: list[WorkerChannel | None] = [None] * workers
        self.marks = [0] * workers  # the last one of each worker, over all its lives; always this list
        self.items: dict[int, int] = {}  # worker -> items of its stream, by its own count; of those that have ended
        self.ends: dict[int, bytes | StreamEnd] = {}  # and what they say at their end, or why they do not
        self._journals = Journals(sent=not take_back)
        self._events: list[Event | Silence | Room] = []
        self.resting = False  # it waits, and nothing is half done: what a signal handler raises now does no harm
        self._closed = self._over = True
        self._parts: list[Answers | Wakeup] = []  # to be closed
        self._pulse_fd = -1
        self.pulses: list[Pulse] = []
        self.workers = [WorkerHandle(self, i) for i in range(workers)]

    # Opening and closing -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """All of it, or nothing: whatever fails half-way, or interrupts it, leaves nothing open."""
        self._thread = threading.get_ident()
        self._over = False
        try:
            self._open()
        except BaseException as error:
            if isinstance(error, OSError):
                error.add_note("; ".join(("while the workers' keeper was started", *facts_of(error).texts)))
            self.close(0.0)
            raise
        self._closed = False

    def lend_through(self, gate: Gate) -> None:
        """Where a device reads slots."""
        self._gate = gate

    def _open(self) -> None:
        workers = len(self._channels)
        self._answers = Answers(self._channels, self.marks, self.items, self.ends, self._journals)
        self._parts.append(self._answers)
        self._wakeup = Wakeup(self._answers.pipe)
        self._parts.append(self._wakeup)
        self._pulse_fd = new_file("pulse", (workers + 1) * PAGE)  # one for the keeper
        memory = Memory(self._pulse_fd, workers * PAGE)
        self.pulses = [Pulse(memory, i) for i in range(workers)]
        forks.watch(self)
        self._launch()
        others = workers - 1 if self._fixed else 0  # all of them must begin, or none can
        linux.need_descriptors(BEGINNING + others * STAYING)

    def _close_pulses(self) -> None:
        pulses, self._pulse_fd = self._pulse_fd, -1
        if pulses >= 0:
            os.close(pulses)
        self.pulses.clear()  # and with them their mapping

    def _launch(self) -> None:
        """A new keeper. What it needs of the old one's is still here: nothing is lost with a keeper."""
        self._keeper_process.launch(self._orders)
        self._wakeup.begin(self._keeper_process.control.fileno())

    def _orders(self, control: socket.socket) -> KeeperOrders:
        return KeeperOrders(
            control,
            self._answers.pipe_w,
            self._answers.files_w,
            self._pulse_fd,
            len(self._channels),
            os.getpid(),
            procfs.threads(),
            *self._settings,
            OomWatch(time.monotonic()),
            MemoryBudget(len(self._channels), self.need, self.room.workers),
            self._takes_back,
            self._fixed,
            self._enough,
            self._facts,
        )

    def close(self, grace_s: float = GRACE_S) -> None:
        """May be called again where a signal handler raised: it goes on with what is left."""
        if self._over or os.getpid() != self._owner:
            return
        self._closed = True
        forks.forget(self)
        if self._keeper_process.launched:
            if not self._keeper_process.tell(StopAll(grace_s), patience_s=HEAR_S):
                grace_s = 0.0  # the keeper is gone already
            for worker in range(len(self._channels)):
                self._end_channel(worker)
            self._keeper_process.find(FOUND_S)
            self._keeper_process.gone(grace_s + 3.0)
            self._hear_last_words()
            self._keeper_process.end(0.0)
        for part in self._parts:
            part.close()
        self._close_pulses()
        self._over = True

    def close_in_child(self) -> None:
        """In a forked child of the trainer: it has no part in this. (A new keeper keeps what `KeeperOrders` names.)"""
        self._closed = True
        for pulse in self.pulses:
            pulse.words = pulse.words.toreadonly()
        for line in self._channels:
            if line is not None:
                line.end()
        keeper = self._keeper_process.close_in_child()
        self._answers.close_in_child(keeper=keeper)
        self._wakeup.close()
        if not keeper:
            pulses, self._pulse_fd = self._pulse_fd, -1
            os.close(pulses)

    def _end_keeper(self) -> None:
        """Its workers die with it."""
        self._keeper_process.kill()
        self._wakeup.begin()
        self._keeper_process.end(3.0)

    def renew(self) -> None:
        self._events.clear()
        self._end_keeper()
        self._answers.drain(self._events)
        self._events.clear()
        self._begin_room()
        self._launch()

    @property
    def closed(self) -> bool:
        """True when all processes have ended."""
        return self._closed

    @property
    def keeper_pid(self) -> int:
        """The keeper's process; 0 when there is none."""
        return self._keeper_process.pid

    def has_life(self, worker: int) -> bool:
        """False for a worker that is not needed for now."""
        return self._channels[worker] is not None

    def pid_of(self, worker: int, patience_s: float = 0.0) -> int | None:
        """The process that plays this worker now; None while it is being made, and after the end.

        With patience, and in the thread that iterates, the keeper is listened to meanwhile.
        """
        deadline = time.monotonic() + patience_s
        while True:
            line = self._channels[worker]
            if line is None or line.pid is not None or self._closed:
                return None if line is None else line.pid
            left = deadline - time.monotonic()
            if left <= 0 or threading.get_ident() != self._thread:
                return None
            if self._keeper_process.wait_for_word(left):
                self._hear_keeper()

    # Orders --------------------------------------------------------------------------------------------------------
    # Where the keeper is gone, `wait` finds that out and says so for each life.

    def start(self, worker: int, life: int) -> None:
        if self._closed:
            return
        self._end_channel(worker)
        try:
            line, order, fds = begin_life(
                worker, life, self._busy, self._gate, self._journals, take_back=self._takes_back
            )
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            evidence = Evidence(pid=0, fork_errno=error.errno, limits=facts_of(error).texts)
            self._events.append(Exited(worker, life, time.monotonic(), Cause.UNBORN, error.errno, _NOWHERE, evidence))
            return
        self._channels[worker] = line
        try:
            self._keeper_process.tell(order, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _line_of(self, worker: int, life: int) -> WorkerChannel | None:
        line = self._channels[worker]
        return line if line is not None and line.life == life else None

    def retire(self, worker: int, life: int) -> None:
        line = self._line_of(worker, life)
        if line is not None:
            self.pulses[worker].words[ASKED] = Leave.ASKED
            self._events += [Returned(worker, life, task) for task in line.take_back(self._busy)]
            line.hang_up()  # an idle one waits there

    def release(self, worker: int, life: int, grace_s: float) -> None:
        line = self._line_of(worker, life)
        if line is not None:
            line.hang_up()
            self._keeper_process.tell(EndLife(worker, life, grace_s))

    def kill(self, worker: int, life: int, task: int) -> None:
        line = self._line_of(worker, life)
        if line is None:
            return
        self._answers.drain(self._events)  # it is not on what it has finished
        if line.tasks < 0:  # it leaves after what it is on; what it had not begun was taken back
            if task in line.boxes:
                self._keeper_process.tell(EndLife(worker, life, 0.0))
            return
        behind = line.isolate(task)
        if behind is None:
            self._events.append(Spared(worker, life))
            return
        line.hang_up()
        self._keeper_process.tell(EndLife(worker, life, 0.0))
        self._events += [Returned(worker, life, other) for other in behind]

    def take_back(self, worker: int, life: int) -> None:
        line = self._line_of(worker, life)
        if line is not None:
            self._events += [Returned(worker, life, task) for task in line.take_back()]

    def _end_channel(self, worker: int) -> None:
        line = self._channels[worker]
        if line is not None:
            line.end()
            line.slots.retire()
            self._channels[worker] = None

    def send(self, worker: int, life: int, task: int, payload: bytes) -> None:
        line = self._channels[worker]
        if line is not None and line.life == life:
            line.send(task, payload)

    def flush(self) -> None:
        """With `take_back`: workers get what was sent since, in one go."""
        for line in self._channels:
            if line is not None and line.unsent:
                line.flush()

    def abandon_below(self, task: int) -> None:
        """Workers skip every task before this one (an epoch that was left early)."""
        self._answers.abandon_below(task)
        for pulse in self.pulses:
            pulse.words[FLOOR] = task
        self._journals.clear()
        for line in self._channels:
            if line is not None:
                line.waiting.clear()

    def want(self, task: int) -> None:
        """The trainer is about to wait for this one."""
        for pulse in self.pulses:
            pulse.words[WANTED] = task

    # Facts ---------------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """From any thread: whoever waits stops waiting, with or without an event."""
        if not self._closed:
            self._wakeup.ring()

    def wait(self, timeout_s: float | None) -> Sequence[Event | Silence | Room]:
        self._thread = threading.get_ident()
        wakeup = self._wakeup
        wakeup.rung = False
        if self._takes_back:
            self.flush()
        # The keeper is listened to each time, also while other workers keep us busy.
        for fd, _ in wakeup.look():
            if fd == self._answers.pipe:
                self._answers.drain(self._events)
            elif fd == wakeup.bell:
                wakeup.answer()
            else:
                self._hear_keeper()
        if not self._events and timeout_s != 0:
            self._sleep(float("inf") if timeout_s is None else time.monotonic() + timeout_s)
        events, self._events = self._events, []
        return events

    def _sleep(self, limit: float) -> None:
        if self._closed:
            raise HoldfastError("these workers have been ended: nothing more will come from them")
        wakeup, keeper_process = self._wakeup, self._keeper_process
        while not self._events and not wakeup.rung:
            self.resting = True
            ready = wakeup.wait(min(limit, keeper_process.due))
            self.resting = False
            control = keeper_process.control.fileno()
            for fd, _ in ready:
                if fd == control:
                    self._hear_keeper()
                elif fd == wakeup.bell:
                    wakeup.answer()
            self._answers.drain(self._events)
            if not ready:
                if keeper_process.late:
                    self._lose_keeper()
                elif time.monotonic() >= limit:
                    return

    def _hear_keeper(self) -> None:
        while (message := self._keeper_process.next_word()) is not None:
            self._believe(message)
        if self._keeper_process.lost:
            self._lose_keeper()

    def _hear_last_words(self) -> None:
        """What the keeper saw at the very end: signals that workers noted. Their exits are what we asked for."""
        self._events.clear()
        while (message := self._keeper_process.next_word()) is not None:
            if isinstance(message, Silence | KeeperSignalled):
                self._believe(message)
            elif isinstance(message, Exited):
                self.workers[message.worker].exitcode = exit_code(message)

    def leftovers(self) -> list[Silence]:
        """After close(): incidents that nobody has heard of yet."""
        left = [event for event in self._events if isinstance(event, Silence)]
        self._events.clear()
        return left

    def _believe(self, message: Message) -> None:
        match message:
            case KeeperUp():
                self._keeper_process.came_up()
            case KeeperSignalled(number, evidence):
                self._events.append(Silence(-1, 0, What.SIGNALLED, number, _NOWHERE, evidence))
            case LifeStarted(worker, life, pid):
                line = self._line_of(worker, life)
                if line is not None:
                    line.pid = pid
            case Exited():
                self._bury(message)
            case Silence():
                self._events.append(message)
            case RoomLeft(workers, paused, need, evidence):
                self.need, self.room = need, Room(workers, paused)
                self._events.append(self.room)
                if evidence is not None:
                    self._events.append(Silence(-1, 0, What.ROOM, workers, _NOWHERE, evidence))
            case StartLife() | EndLife() | StopAll():
                raise AssertionError(f"not for a trainer: {message}")
            case _:
                assert_never(message)

    def _bury(self, ended: Exited) -> None:
        worker, life, on = ended.worker, ended.life, ended.on
        assert on is not None  # a keeper knows
        self._answers.drain(self._events)  # what it finished comes before its death
        line = self._line_of(worker, life)
        self._journals.keep(self.pulses[worker], None if line is None else line.slots, on)
        self.workers[worker].exitcode = exit_code(ended)
        self._events.append(ended)
        line = self._channels[worker]
        if line is not None and line.tasks < 0:
            self._end_channel(worker)  # perhaps no other life follows

    def _lose_keeper(self) -> None:
        """It died, or never came up. Its workers die with it, and nobody is to blame."""
        self._end_keeper()
        if self._keeper_process.status == NO_GUARD:
            raise WorkerLost(GUARD)  # the next one would end like this one
        self._answers.drain(self._events)
        now = time.monotonic()
        for worker, line in enumerate(self._channels):
            if line is not None:
                evidence = Evidence(pid=line.pid or 0)
                pulse = self.pulses[worker]
                begun = pulse.words[LIFE] == line.life
                on = pulse.place(now) if begun else _NOWHERE
                if begun and self._takes_back:
                    self._journals.keep(pulse, line.slots, on)
                self._events.append(Exited(worker, line.life, now, Cause.KEEPER, 0, on, evidence))
        self._begin_room()
        self._launch()

    def _begin_room(self) -> None:
        """A new keeper says nothing of memory as long as all is well: whoever is paused must not stay so."""
        self.room = Room(self.room.workers, False)
        self._events.append(self.room)

    def take_journals(self) -> dict[int, tuple[bytes, int]]:
        """By task: what workers that died had done of theirs, for whoever does not want it sent to the next life."""
        journals = dict(self._journals)
        self._journals.clear()
        return journals


# Wakeup: waits until a worker, the keeper or another thread has something to say.
#
# Small batches come close one after another, and falling asleep and being woken takes longer than waiting for them
# does: after a short wait the next one is a few looks.


# A wait is short below this, and looking takes no longer.
SPIN_S = 150e-6


class Wakeup:
    """`results`, `control`: what to wait for besides the bell, which any thread may ring."""

    def __init__(self, results: int) -> None:
        self._results = results
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.rung = False  # somebody wants whoever waits to stop waiting
        self._quick = False  # the last wait was short
        self._poll = select.poll()

    def begin(self, *control: int) -> None:
        """There is a keeper, perhaps another one; or none for now."""
        self._poll = select.poll()
        for fd in (self._results, *control, self.bell):
            self._poll.register(fd, select.POLLIN)

    def ring(self) -> None:
        """From any thread, but not while another closes this."""
        if self.bell >= 0:
            os.eventfd_write(self.bell, 1)

    def answer(self) -> None:
        """It has rung."""
        os.eventfd_read(self.bell)
        self.rung = True

    def look(self) -> list[tuple[int, int]]:
        """Who has something to say now."""
        return self._poll.poll(0)

    def wait(self, until: float) -> list[tuple[int, int]]:
        """Who has something to say, as soon as somebody has; nobody at that time."""
        now = time.monotonic()
        wait_ms = None if until == float("inf") else max(0.0, until - now) * 1000
        ready = self._look_a_while() or self._poll.poll(wait_ms)
        self._quick = time.monotonic() - now < SPIN_S
        return ready

    def _look_a_while(self) -> list[tuple[int, int]]:
        """What has come within a moment, if the last wait was as short.

        Others who want this processor get it between two looks; where that cannot be had, there is one look.
        """
        if self._quick:
            end = time.monotonic() + SPIN_S
            while time.monotonic() < end:
                ready = self._poll.poll(0)
                if ready:
                    return ready
                try:
                    os.sched_yield()
                except OSError:  # a sandbox may refuse it
                    break
        return []

    def close(self) -> None:
        """Nobody is heard any more: other files will have these numbers."""
        self._poll = select.poll()
        bell, self.bell = self.bell, -1
        if bell >= 0:
            os.close(bell)
