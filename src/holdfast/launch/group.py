"""One attempt: ranks started together, watched by one thread, and stopped together when one has failed.

    running -> (a failure) last call -> SIGTERM -> stack dump, SIGKILL -> ended

The last call is short and ends early when all have ended: it gathers what failed at the same time, so that the cause
can be told from its echoes. The thread waits on descriptors of the processes themselves and notes the time at which
each wakes it; what a rank raised comes with the rank's own time.
"""

import logging
import os
import pickle
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from holdfast.launch import birth
from holdfast.launch.cause import End, How, Verdict, how, judge
from holdfast.launch.output import Output
from holdfast.launch.parcel import Parcel
from holdfast.launch.rank import HEAD, PAGE, Card, Ends, Said
from holdfast.local import forks, linux, procfs
from holdfast.local.cgroups import group_of
from holdfast.local.evidence import Evidence, shm_free, worlds
from holdfast.local.oom import OomWatch
from holdfast.local.sender import SenderNote
from holdfast.shm.memory import Memory, new_file

log = logging.getLogger("holdfast")
# Connections of a dead rank break within milliseconds; ranks that have heard of it raise within some more.
LAST_CALL_S = 1.0
# Between SIGTERM and SIGKILL: a handler that saves a checkpoint has as long as with torch, torchrun and Kubernetes.
STOP_S = 30.0
# After SIGKILL a process is gone at once, unless the kernel itself waits (a dead network file system).
KILLED_S = 5.0
# How often memory is looked at, and how many readings are kept.
TICK_S = 0.5
SERIES = 8
# faulthandler writes a stack in well under a millisecond, unless the process is stopped.
DUMP_S = 0.2
STACK_BYTES = 32 << 10


@dataclass(eq=False)
class Rank:
    """One rank's process, and the trainer's ends."""

    number: int
    process: Any
    words: int
    crash: int
    memory: Memory
    began_ns: int
    watched: int
    """What wakes us at its end: a pidfd, or multiprocessing's sentinel where there is none."""
    note: SenderNote
    heard: bytearray = field(default_factory=bytearray)
    said: Said | None = None
    readings: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=SERIES))
    stopped_ns: int | None = None
    stack: str = ""
    died_ns: int | None = None
    code: int | None = None
    evidence: Evidence | None = None

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    @property
    def failed(self) -> bool:
        """It has told us so, or its process has ended so."""
        told = self.said is not None and self.said.what != "done"
        return told or (self.code is not None and self.code != 0)

    @property
    def exit_code(self) -> int:
        """As it would have been had we not stopped it on its way out."""
        stopped = self.code is None or (self.code < 0 and self.stopped_ns is not None)
        if self.said is not None and stopped:
            return self.said.code
        return -signal.SIGKILL if self.code is None else self.code

    def end(self, output: tuple[str, ...]) -> End:
        """For the judge."""
        said = self.said
        text = ""
        if said is not None and said.raised is not None and said.what != "exit":
            text = f"{said.raised.type_name}: {said.raised.text}"
        at = said.at_ns if said is not None and said.what != "done" else self.died_ns
        at = time.monotonic_ns() if at is None else at
        return End(self.number, at, self.exit_code, text, "\n".join(output), self.stopped_ns)


class Group:
    """`watch` blocks until all ranks have ended; everything else may be called from any thread meanwhile."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self.ranks: list[Rank] = []
        self.grace_s: float | None = None
        """What `join` was told: how long others may take to end by themselves, and then after SIGTERM."""
        self.interrupted = False
        self._wake, self._waker = os.pipe()
        self._mine = {self._wake, self._waker}  # the trainer's descriptors
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._oom = OomWatch(time.monotonic())
        self._worlds = worlds()
        self._failed_at: float | None = None
        self._stopped_at: float | None = None
        self._killed_at: float | None = None
        self._looked = 0.0
        self._open = True
        forks.watch(self)

    # Birth ---------------------------------------------------------------------------------------------------------

    def start(
        self, method: str, daemon: bool, parcel: Parcel, number: int, env: Mapping[str, str], threads: int | None
    ) -> None:
        """One more rank. Raises what starting a process raises."""
        words, ranks_words = os.pipe()
        lifeline, alive = os.pipe()[::-1]  # a pipe for each: whom the kernel signals is a property of the pipe's end
        self._mine |= {words, lifeline}
        crash, page = new_file("crash", 0), new_file("page", PAGE)
        out, err = self.output.pipes(number)
        began = time.monotonic_ns()
        ends = Ends(out, err, ranks_words, alive, crash, page)
        try:
            memory = Memory(page, PAGE)
            card = Card(number, method, ends, env, threads)
            process = birth.start(method, f"holdfast-rank-{number}", daemon, card, parcel, out, err, env)
        except BaseException:
            os.close(crash)
            raise
        finally:
            for fd in (out, err, ranks_words, alive, page):
                os.close(fd)
        os.set_blocking(words, False)
        pidfd = linux.open_pidfd(process.pid)
        self._mine |= {crash} if pidfd is None else {crash, pidfd}
        watched = process.sentinel if pidfd is None else pidfd
        self.ranks.append(Rank(number, process, words, crash, memory, began, watched, SenderNote(memory, 0, PAGE)))
        for fd in (words, watched):
            self._poll.register(fd, select.POLLIN)

    def close_in_child(self) -> None:
        """The trainer was forked: what is ours stays with the trainer, or a rank would outlive it by the child."""
        if self._open:
            for fd in (*self._mine, *self.output.fds):
                with suppress(OSError):
                    os.close(fd)
            self._open = False

    # Orders from other threads -------------------------------------------------------------------------------------

    def stop(self, grace_s: float) -> None:
        """End all ranks: nobody has failed, the trainer does not want them any more."""
        self.grace_s, self.interrupted = grace_s, True
        self._nudge()

    def allow(self, grace_s: float | None) -> None:
        """How long `join` lets ranks end by themselves."""
        if grace_s is not None and grace_s != self.grace_s:
            self.grace_s = grace_s
            self._nudge()

    def _nudge(self) -> None:
        with suppress(OSError, ValueError):
            os.write(self._waker, b".")

    # The watch -----------------------------------------------------------------------------------------------------

    def watch(self) -> Verdict:
        """Until all have ended; the judgement."""
        try:
            while any(rank.code is None for rank in self.ranks):
                self._step()
                if not self._go_on():
                    break
            self.output.finish()
            return judge(rank.end(self.output.tail(rank.number)) for rank in self.ranks)
        finally:
            self.close()

    def _step(self) -> None:
        ready = self._poll.poll(self._patience() * 1000)
        now_ns = time.monotonic_ns()
        fds = {fd for fd, _ in ready}
        if self._wake in fds:
            os.read(self._wake, 4096)
        for rank in self.ranks:
            if rank.words in fds and not self._listen(rank):
                self._poll.unregister(rank.words)
        for rank in self.ranks:
            if rank.watched in fds and rank.died_ns is None:
                rank.died_ns = now_ns
                self._poll.unregister(rank.watched)
        for rank in self.ranks:
            if rank.died_ns is not None and rank.code is None:
                self._ended(rank)
        self._look(now_ns / 1e9)

    def _patience(self) -> float:
        deadline = self._deadline()
        return TICK_S if deadline is None else min(TICK_S, max(0.0, deadline - time.monotonic()))

    def _deadline(self) -> float | None:
        if self._killed_at is not None:
            return self._killed_at + KILLED_S
        if self._stopped_at is not None:
            return self._stopped_at + (STOP_S if self.grace_s is None else self.grace_s)
        if self.interrupted:
            return 0.0
        if self._failed_at is not None:
            return self._failed_at + (LAST_CALL_S if self.grace_s is None else self.grace_s)
        return None

    def _go_on(self) -> bool:
        """The next stage when its time has come; False when even SIGKILL has not helped."""
        now = time.monotonic()
        if self._failed_at is None and any(rank.failed for rank in self.ranks):
            self._failed_at = now
        deadline = self._deadline()
        if deadline is None or now < deadline:
            return True
        living = [rank for rank in self.ranks if rank.code is None]
        if self._killed_at is not None:
            return False
        if self._stopped_at is not None:
            self._killed_at = now
            for rank in living:
                log.warning("process %d minds no SIGTERM: SIGKILL (rank %d)", rank.pid, rank.number)
                self._dump(rank)
                self._signal(rank, rank.process.kill)
        else:
            self._stopped_at = now
            for rank in living:
                if rank.said is None or rank.said.what != "done":  # who has returned is on its way out
                    log.warning("Terminating process %d via signal SIGTERM (rank %d)", rank.pid, rank.number)
                    self._signal(rank, rank.process.terminate)
        return True

    def _signal(self, rank: Rank, send: Callable[[], None]) -> None:
        if rank.stopped_ns is None:
            rank.stopped_ns = time.monotonic_ns()
        send()

    def _listen(self, rank: Rank) -> bool:
        """What the rank says; False when there is nobody to say more."""
        while True:
            try:
                data = os.read(rank.words, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            rank.heard += data
            size = HEAD.unpack_from(rank.heard)[0] if len(rank.heard) >= HEAD.size else -1
            if rank.said is None and size >= 0 and len(rank.heard) >= HEAD.size + size:
                rank.said = pickle.loads(rank.heard[HEAD.size : HEAD.size + size])
                if rank.said.raised is not None:
                    self.output.note(rank.number, rank.said.raised.traceback)

    def _ended(self, rank: Rank) -> None:
        self._listen(rank)
        popen = rank.process._popen
        code = popen.wait(DUMP_S)  # the fork server tells the status a moment after the death
        if code is None:
            return
        rank.process.join(0)  # multiprocessing need not remember it
        if popen.status_lost and rank.said is not None and rank.said.what == "done":
            code = 0
        now = time.monotonic()
        killed = code == -signal.SIGKILL and rank.stopped_ns is None
        rank.evidence = Evidence(
            pid=rank.pid,
            lived_s=now - rank.began_ns / 1e9,
            stack=rank.stack or _read_stack(rank.crash),
            peak_bytes=popen.peak_bytes,
            memory=tuple((now - at, size) for at, size in rank.readings),
            oom=self._oom.claim(now) if killed else None,
            counters=self._oom.readable,
            kernel_log=procfs.kernel_says(rank.pid, rank.began_ns / 1e9) if killed else "",
            group=group_of(),
            shm_free=shm_free(),
            pressure=procfs.memory_pressure(),
            sender=rank.note.last(-code) if code < 0 else None,
            worlds=self._worlds,
        )
        rank.code = code

    def _look(self, now: float) -> None:
        if now - self._looked < TICK_S:
            return
        self._looked = now
        for rank in self.ranks:
            if rank.code is None:
                rank.readings.append((now, linux.resident_bytes(rank.pid)))
        self._oom.look(now)

    def _dump(self, rank: Rank) -> None:
        """Where it hangs, before it is killed; faulthandler answers even while native code holds the GIL."""
        if linux.process_state(rank.pid) in ("T", "t", "Z", ""):
            return
        with suppress(ProcessLookupError):
            os.kill(rank.pid, linux.DUMP_SIGNAL)
        deadline, size = time.monotonic() + DUMP_S, 0
        while time.monotonic() < deadline:
            time.sleep(0.002)
            before, size = size, os.fstat(rank.crash).st_size
            if size and size == before:
                break
        rank.stack = _read_stack(rank.crash)

    # The end -------------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Not all could be started: those that were are killed."""
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.process.join(KILLED_S)
        self.output.close()
        self.close()

    def close(self) -> None:
        """Whoever is still there is killed by the kernel now: the pipe that says we live is closed."""
        if not self._open:
            return
        self._open = False
        forks.forget(self)
        for fd in self._mine:
            os.close(fd)

    def how(self, rank: Rank) -> How:
        return how(rank.end(self.output.tail(rank.number)))


def _read_stack(crash: int) -> str:
    return os.pread(crash, STACK_BYTES, 0).decode(errors="replace").rstrip()
