"""The keeper: the process that forks, reaps, watches, limits and dumps.

One small single-threaded process between the trainer and its workers, their direct parent. So a replacement starts
in milliseconds and never forks the trainer's threads, CUDA context or held locks again; exits are reaped and hangs
are seen while the trainer is busy, without its GIL. It runs no user code.

It must not outlive the trainer. PDEATHSIG would fire on the death of the parent *thread*, so it watches a pidfd of
the trainer and the end of the control socket instead (and `getppid` where there is no pidfd). Its workers die with
it: for them it is the only thread of their parent.
"""

import gc
import multiprocessing
import os
import select
import signal
import socket
import time
from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple

from holdfast.core.messages import Cause, Place, Stage
from holdfast.local import linux, procfs
from holdfast.local.cgroups import group_of
from holdfast.local.evidence import (
    Evidence,
    View,
    process_limits,
    shm_free,
    view_of,
    worlds,
)
from holdfast.local.marks import Copies, Marks
from holdfast.local.oom import OomWatch
from holdfast.local.pulse import (
    ALLOWED,
    ASKED,
    BASE,
    DUMPABLE,
    FILES,
    GIL,
    LAST_SIGNAL,
    LEAVING,
    MEMORY,
    PAGE,
    PEAK,
    POSITION,
    SAMPLES,
    SIGNALS,
    SINCE,
    STAGE,
    TASK,
    TASKS,
    Pulse,
)
from holdfast.local.room import RoomWatch
from holdfast.local.sender import CRASH_SIGNALS, SenderNote
from holdfast.local.spy import Spy
from holdfast.local.wire import (
    EndLife,
    KeeperSignalled,
    KeeperUp,
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
from holdfast.local.worker import Job, Wiring, Worker
from holdfast.shm.memory import Memory

# How often workers are looked at. A tick costs some 20 us per worker.
TICK_S = 0.1
# A worker that says nothing for this long is an incident, and again each time the silence has doubled.
SILENT_S = 60.0
# How long a stack dump may take. faulthandler writes it in well under a millisecond, unless the process is stopped.
DUMP_S = 0.2
STACK_BYTES = 32 << 10
# A silent worker is looked at for this long, to see whether it computes; a clock tick is 10 ms.
BUSY_S = 0.06
# Readings of a worker's memory that are kept: the last three seconds.
SERIES = 30
# EAGAIN from fork passes when other processes end; this long it is tried again.
FORK_PATIENCE_S = 5.0


class Orders(NamedTuple):
    """What a keeper is told at its start; descriptors are its own."""

    control: socket.socket
    results: int
    files: socket.socket
    pulses: int
    workers: int
    trainer_pid: int
    trainer_threads: int
    sample_timeout: float | None
    growth_bytes: int | None
    need: int
    first: int
    one_by_one: bool
    fixed: bool


class Life:
    """One worker process, as its keeper sees it."""

    def __init__(self, order: StartLife, pid: int, pulse: Pulse, batches: int, crash: int, now: float) -> None:
        self.worker = order.worker
        self.life = order.life
        self.pid = pid
        self.pidfd = linux.open_pidfd(pid)
        self.pulse = pulse
        self.batches = batches
        self.crash = crash
        self.began = now
        self.before = (pulse.words[TASKS], pulse.words[SAMPLES])  # done by earlier lives
        self.grown = 0
        self.most = 0  # at its peak, its slots included
        self.copies: Copies | None = None
        self.facts: tuple[str, ...] = ()
        self.beat: tuple[int, ...] = ()
        self.quiet_s = 0.0
        self.next_alarm_s = SILENT_S
        self.signals = pulse.words[SIGNALS]
        self.memory: deque[tuple[float, int]] = deque(maxlen=SERIES)
        self.end_at: float | None = None
        self.killed_for: Cause | None = None
        self.killed_on: Place | None = None
        self.stack = ""
        self.view: View | None = None
        self.seen: tuple[object, ...] = ()  # which hang `view` is of

    @property
    def slot_bytes(self) -> int:
        return os.fstat(self.batches).st_blocks * 512

    @property
    def done(self) -> tuple[int, int]:
        """Batches and samples of this life, those of the batch it is on included."""
        words = self.pulse.words
        begun = words[POSITION] if words[STAGE] == Stage.FETCH else 0
        return words[TASKS] - self.before[0], words[SAMPLES] - self.before[1] + begun


class Keeper:
    """See the module. `run` returns when there is nobody left to keep."""

    def __init__(self, orders: Orders, job: Job, signals: list[int]) -> None:
        """`signals`: those that this process was sent, see note_signals_only."""
        self._orders = orders
        self._job = job
        self._signals = signals
        self._pulse_memory = Memory(orders.pulses, (orders.workers + 1) * PAGE)
        self._pulses = [Pulse(self._pulse_memory, i) for i in range(orders.workers)]
        self._sender = SenderNote(self._pulse_memory, orders.workers * PAGE, PAGE)  # the last page is the keeper's own
        self._sender.install(linux.NOTED_SIGNALS)
        self._lives: dict[int, Life] = {}  # by pid
        self._unforked: deque[tuple[StartLife, list[int], float]] = deque()
        self._unsaid: deque[bytes] = deque()
        self._trainer = linux.open_pidfd(orders.trainer_pid)
        self._parent = os.getppid()
        self._poll = select.poll()
        self._stop_at: float | None = None
        self._last_tick = time.monotonic()
        self._worlds = worlds()
        self._oom = OomWatch(time.monotonic())
        self._marks = Marks(orders.growth_bytes)
        self._room = RoomWatch(orders.workers, orders.need, orders.first)
        self._own = linux.memory_of()[1]  # what workers inherit
        self._fewest = orders.workers  # workers that ever fitted, as far as the trainer was told
        self._spy = Spy()
        self._tick_s = self._tick(orders.sample_timeout)

    def run(self) -> None:
        """Until the trainer says stop, closes the socket, or is gone."""
        self._orders.control.setblocking(False)
        self._poll.register(self._orders.control, select.POLLIN)
        if self._trainer is not None:
            self._poll.register(self._trainer, select.POLLIN)
        gc.disable()
        gc.freeze()  # what is there now stays shared with the workers, untouched by the collector
        self._say(KeeperUp(os.getpid()))
        while not self._over():
            timeout = self._tick_s if self._lives or self._unforked else 1.0
            for fd, _ in self._poll.poll(timeout * 1000):
                if fd == self._trainer:
                    self._kill_all()
                    return
                if fd == self._orders.control.fileno():
                    self._listen()
            self._reap()
            self._watch()
            while self._signals:
                number = self._signals.pop(0)
                evidence = Evidence(pid=os.getpid(), sender=self._sender.last(number), worlds=self._worlds)
                self._say(KeeperSignalled(number, evidence))
        self._kill_all()

    def _over(self) -> bool:
        if self._trainer is None and os.getppid() != self._parent:
            return True
        if self._stop_at is None:
            return False
        return not self._lives or time.monotonic() >= self._stop_at

    # Words with the trainer ----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._orders.control, 1 << 16, 8)
            except BlockingIOError:
                break
            except OSError:
                data, fds = b"", []
            if not data:
                self._stop_at = self._stop_at or time.monotonic()
                self._poll.unregister(self._orders.control)
                return
            match decode(data):
                case StartLife() as order:
                    self._start(order, fds)
                case EndLife(worker, number, grace_s):
                    self._release(worker, number, grace_s)
                case StopAll(grace_s):
                    self._stop_at = time.monotonic() + grace_s
                case other:
                    raise AssertionError(f"not for a keeper: {other}")
        self._say()

    def _say(self, message: Message | None = None) -> None:
        """Never blocks: what the socket does not take now is said at the next tick."""
        if message is not None:
            self._unsaid.append(encode(message))
        while self._unsaid:
            try:
                self._orders.control.send(self._unsaid[0])
            except (BlockingIOError, OSError):
                return
            self._unsaid.popleft()

    # Birth ---------------------------------------------------------------------------------------------------------

    def _start(self, order: StartLife, fds: list[int], since: float | None = None) -> None:
        now = time.monotonic()
        pulse = self._pulses[order.worker]
        pulse.begin_life(order.life)
        # Signals wait until the child has its own handlers: it inherits ours.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, linux.NOTED_SIGNALS)
        try:
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            since = now if since is None else since
            # Where others can go on with its work, they do; where its number says what it gives, it is waited for.
            if now - since < FORK_PATIENCE_S and (self._orders.fixed or not self._lives):
                self._unforked.append((order, fds, since))
            else:
                for fd in fds:
                    os.close(fd)
                self._say(_never_born(order, now, error.errno or 0))
            return
        if pid == 0:
            self._be_worker(order, fds, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        tasks, memory, crash = fds
        os.close(tasks)
        life = Life(order, pid, pulse, memory, crash, now)
        self._lives[pid] = life
        if life.pidfd is not None:
            self._poll.register(life.pidfd, select.POLLIN)
        self._say(LifeStarted(order.worker, order.life, pid))

    def _be_worker(self, order: StartLife, fds: list[int], mask: Any) -> None:
        """Never returns. The bootstrap of multiprocessing gives user code the process it knows from torch."""
        keeper_pid = os.getppid()
        status = 1
        try:
            self._orders.control.close()
            for life in self._lives.values():
                os.close(life.batches)
                os.close(life.crash)
                if life.pidfd is not None:
                    os.close(life.pidfd)
            for _, others, _ in self._unforked:
                for fd in others:
                    os.close(fd)
            if self._trainer is not None:
                os.close(self._trainer)
            if self._spy.path is not None:
                self._spy.close_in_child()
                linux.let_trace(keeper_pid)
            gc.enable()
            tasks, memory, crash = fds
            wiring = Wiring(
                *order,
                tasks,
                self._orders.results,
                self._orders.files,
                memory,
                crash,
                keeper_pid,
                self._orders.growth_bytes,
                self._orders.one_by_one,
            )
            worker = Worker(wiring, self._job, self._pulses[order.worker])

            def live() -> None:
                worker.take_signals()
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                worker.run()

            process: Any = multiprocessing.get_context("fork").Process(
                target=live, name=f"holdfast-worker-{order.worker}"
            )
            status = process._bootstrap(parent_sentinel=None)
        finally:
            os._exit(status)

    # Death ---------------------------------------------------------------------------------------------------------

    def _release(self, worker: int, number: int, grace_s: float) -> None:
        """The trainer does not want this life any more. One that was never born ends, too."""
        for life in self._lives.values():
            if (life.worker, life.life) == (worker, number):
                life.killed_for = life.killed_for if life.killed_for is not None else Cause.ASKED
                if grace_s:
                    life.end_at = time.monotonic() + grace_s
                else:
                    _kill(life.pid)
                return
        for waiting in list(self._unforked):
            order, fds, _ = waiting
            if (order.worker, order.life) == (worker, number):
                self._unforked.remove(waiting)
                for fd in fds:
                    os.close(fd)
                self._say(_never_born(order, time.monotonic(), 0)._replace(cause=Cause.ASKED))

    def _reap(self) -> None:
        while self._lives:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._spy.reaped(pid)
            life = self._lives.pop(pid, None)
            if life is not None:
                self._report(life, status, usage.ru_maxrss * 1024)

    def _report(self, life: Life, status: int, peak: int) -> None:
        now = time.monotonic()
        self._look_for_signals(life, now)
        if life.pidfd is not None:
            self._poll.unregister(life.pidfd)
            os.close(life.pidfd)
        code = os.waitstatus_to_exitcode(status)
        cause = Cause.SIGNAL if code < 0 else Cause.EXIT
        on = life.killed_on or life.pulse.place(now)
        leaving = life.pulse.words[LEAVING]
        if life.killed_for is not None:
            cause = life.killed_for
        elif cause is Cause.EXIT and leaving and code == 0:
            cause, code = Cause.RECYCLED, leaving
            on = on if on.stage >= Stage.FETCH else Place(-1, 0, Stage.IDLE, 0.0)
        killed = cause is Cause.SIGNAL and -code == signal.SIGKILL
        fault = life.pulse.sender.fault(-code)
        evidence = self._evidence(
            life,
            now,
            stack="" if cause is Cause.RECYCLED else life.stack or _read_stack(life.crash),
            facts=life.facts or (tuple(_read_stack(life.crash).splitlines()) if cause is Cause.RECYCLED else ()),
            peak_bytes=peak,
            oom=self._oom.claim(now) if killed else None,
            kernel_log=procfs.kernel_says(life.pid, life.began) if killed else "",
            group=group_of(),
            shm_free=shm_free(),
            pressure=procfs.memory_pressure(),
            fault=fault,
            sender=life.pulse.sender.last(-code) if -code in CRASH_SIGNALS else None,
        )
        os.close(life.crash)
        os.close(life.batches)
        self._say(LifeEnded(life.worker, life.life, now, cause, abs(code), on, evidence))

    def _evidence(self, life: Life, now: float, **facts: Any) -> Evidence:
        tasks, samples = life.done
        return Evidence(
            pid=life.pid,
            lived_s=now - life.began,
            view=life.view,
            memory=tuple((now - at, size) for at, size in life.memory),
            counters=self._oom.readable,
            worlds=self._worlds,
            noted_signals=life.pulse.words[SIGNALS],
            trainer_threads=self._orders.trainer_threads,
            grown_bytes=life.grown,
            tasks=tasks,
            samples=samples,
            descriptors=life.pulse.words[FILES],
            **facts,
        )

    def _kill_all(self) -> None:
        for pid in self._lives:
            _kill(pid)
        self._spy.stop()
        for pid in self._lives:
            linux.wait_for_exit(pid, 2.0)
        self._lives.clear()

    # The watch -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        now = time.monotonic()
        gap = now - self._last_tick
        if gap < self._tick_s * 0.8:
            return
        self._last_tick = now
        # A stopped keeper or a paused machine is nobody's hang: a gap counts as two ticks at most.
        step = min(gap, 2 * self._tick_s)
        deadlines = [allowed for life in self._lives.values() if (allowed := self._allowed(life)) is not None]
        self._tick_s = self._tick(min(deadlines, default=None))
        for life in list(self._lives.values()):
            self._look_at(life, step, now)
        self._look_around(now)
        self._oom.look(now)
        for _ in range(len(self._unforked)):
            self._start(*self._unforked.popleft())
        self._say()

    @staticmethod
    def _tick(deadline_s: float | None) -> float:
        """The shorter the deadline, the oftener somebody must look."""
        return TICK_S if deadline_s is None else max(0.01, min(TICK_S, deadline_s / 5))

    def _look_at(self, life: Life, step: float, now: float) -> None:
        words = life.pulse.words
        self._weigh(life, now)
        beat = (words[STAGE], words[TASK], words[POSITION], words[SINCE])
        if beat != life.beat or beat[0] == Stage.IDLE:
            life.beat, life.quiet_s, life.next_alarm_s = beat, 0.0, SILENT_S
        else:
            life.quiet_s += step
            self._judge_silence(life, now)
        self._look_for_signals(life, now)
        if life.end_at is not None and now >= life.end_at:
            _kill(life.pid)

    def _weigh(self, life: Life, now: float) -> None:
        """Its memory and its descriptors; over a mark, it is asked to make room for a fresh one, or has to."""
        words = life.pulse.words
        resident, private = linux.memory_of(life.pid)
        life.memory.append((now, resident))
        if not words[BASE] or not resident:
            return  # not ready yet, or gone
        life.grown = words[MEMORY] = max(0, private - words[BASE])
        words[PEAK] = max(words[PEAK], life.grown)
        words[FILES] = linux.descriptors(life.pid)
        slots = life.slot_bytes
        life.most = max(life.most, life.grown + slots)
        if self._room.tight:
            # A peak between two looks; of what it began with, and of slots, it is none.
            life.most = max(life.most, linux.peak_bytes(life.pid) - (resident - life.grown - slots))
        verdict = self._marks.judge(life.pid, life.grown, words[FILES])
        if verdict.kill and life.killed_for is None:
            life.facts = verdict.facts
            self._end(life, Cause.MEMORY, now)
        elif verdict.leave is not None and not words[ASKED]:
            life.facts = verdict.facts
            words[ASKED] = verdict.leave
        if life.copies is None:
            life.copies = Copies(life.pid, self._own, words[BASE] - self._own, now)
        if copied := life.copies.look(now, life.grown):
            self._say_quiet(life, "copied", copied >> 20, now)

    def _end(self, life: Life, cause: Cause, now: float) -> None:
        """Kill it. What it is on is noted before the dump: that may wake it, and it would go on to another sample."""
        life.killed_for, life.killed_on = cause, life.pulse.place(now)
        self._dump(life)
        _kill(life.pid)

    def _look_around(self, now: float) -> None:
        """The memory of all."""
        room, lives = self._room, list(self._lives.values())
        grown = [(life.grown + life.slot_bytes, life.most) for life in lives]
        changed = room.look(now, grown, any(life.done[0] for life in lives))
        if changed is not None:
            fewer = changed.workers < self._fewest
            self._fewest = min(self._fewest, changed.workers)
            told = fewer and not self._orders.fixed  # nobody goes there
            evidence = Evidence(pid=os.getpid(), facts=room.facts(), group=group_of()) if told else None
            self._say(RoomLeft(*changed, room.need, evidence))
        if room.critical and len(lives) > 1 and not self._orders.fixed and not any(life.killed_for for life in lives):
            neediest = max(lives, key=lambda life: life.grown)
            neediest.facts = room.facts()
            self._end(neediest, Cause.PRESSURE, now)

    def _look_for_signals(self, life: Life, now: float) -> None:
        words = life.pulse.words
        if words[SIGNALS] != life.signals:
            life.signals = words[SIGNALS]
            number = words[LAST_SIGNAL]
            self._say_quiet(life, "signal", number, now, sender=life.pulse.sender.last(number))

    def _judge_silence(self, life: Life, now: float) -> None:
        allowed = self._allowed(life)
        stage, position = life.beat[0], life.beat[2]
        if allowed is not None and stage >= Stage.FETCH and life.killed_for is None:
            if stage == Stage.FETCH_MANY:
                allowed *= max(1, position)  # there it is the number of samples
            if life.quiet_s > allowed:
                if self._second_opinion_awaited(life):
                    return
                self._end(life, Cause.DEADLINE, now)
                return
        if life.quiet_s >= life.next_alarm_s:
            if self._second_opinion_awaited(life):
                return
            self._dump(life)
            life.next_alarm_s *= 2
            self._say_quiet(life, "silent", int(life.quiet_s), now, stack=life.stack)
            life.stack = ""

    def _second_opinion_awaited(self, life: Life) -> bool:
        """True while py-spy still looks at this hang. (A worker that goes on meanwhile was only slow, and lives.)"""
        if self._spy.path is None:
            return False
        self._see(life)
        stopped = life.view is not None and life.view.state in ("T", "t")  # py-spy cannot look at such a one
        return not stopped and self._spy.awaited(life.pid, _hang_of(life))

    def _allowed(self, life: Life) -> float | None:
        """Seconds that it may take for what it does."""
        own: int = life.pulse.words[ALLOWED]
        if own == 0:
            return self._orders.sample_timeout
        return own / 1e9 if own > 0 else None

    def _say_quiet(self, life: Life, what: str, code: int, now: float, **facts: Any) -> None:
        on = life.pulse.place(now)
        self._say(LifeQuiet(life.worker, life.life, what, code, on, self._evidence(life, now, **facts)))

    def _see(self, life: Life) -> None:
        """What it waits for, seen from outside; once per hang, and before anything is done that may wake it."""
        if life.seen == _hang_of(life):
            return
        life.seen = _hang_of(life)
        before, began = procfs.processor_s(life.pid), time.monotonic()
        time.sleep(BUSY_S)
        busy = (procfs.processor_s(life.pid) - before) / (time.monotonic() - began)
        life.view = view_of(life.pid, busy)

    def _dump(self, life: Life) -> None:
        """Ask the worker for its stack. faulthandler answers even while native code holds the GIL."""
        self._see(life)
        if not life.pulse.words[DUMPABLE] or life.view is None or life.view.state in ("T", "t", "Z", ""):
            return
        life.pulse.words[GIL] = 0
        os.ftruncate(life.crash, 0)
        os.lseek(life.crash, 0, os.SEEK_SET)
        os.kill(life.pid, linux.DUMP_SIGNAL)
        deadline = time.monotonic() + DUMP_S
        size = 0
        while time.monotonic() < deadline:
            time.sleep(0.002)
            before, size = size, os.fstat(life.crash).st_size
            if size and size == before:
                break
        life.stack = _read_stack(life.crash)
        seen = self._spy.answer(_hang_of(life))
        gil = {1: False, 2: True}.get(life.pulse.words[GIL], seen.gil)
        life.view = replace(life.view, line=procfs.source_line(life.stack), gil=gil, native=seen.frames)


def _hang_of(life: Life) -> tuple[object, ...]:
    """One silence of one life: the next one, or a later look at it, is another."""
    return (life.pid, life.next_alarm_s, *life.beat)


def _read_stack(crash: int) -> str:
    return os.pread(crash, STACK_BYTES, 0).decode(errors="replace").rstrip()


def _kill(pid: int) -> None:
    """Only ever a child of ours that was not reaped yet: the pid cannot be anybody else's."""
    os.kill(pid, signal.SIGKILL)


def _never_born(order: StartLife, now: float, number: int) -> LifeEnded:
    place = Place(-1, 0, Stage.BOOT, 0.0)
    evidence = Evidence(pid=0, fork_errno=number, limits=process_limits())
    return LifeEnded(order.worker, order.life, now, Cause.UNBORN, number, place, evidence)


def note_signals_only() -> list[int]:
    """The keeper outlives a scheduler's SIGTERM: the trainer decides what a stop means. Gives where they are noted."""
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        noted.append(number)

    for number in linux.NOTED_SIGNALS:
        signal.signal(number, note)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    return noted
