"""RankGroup: one attempt. Its ranks start together, one thread watches them, and all stop when one has failed.

When they are stopped is decided in phases.py. The last call gathers what failed at the same time, so that the cause can
be told from its echoes. The thread waits on descriptors of the processes themselves, and notes when each wakes it. What
a rank raised comes with the rank's own time.
"""

import logging
import multiprocessing
import os
import select
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from holdfast.launch import rank_process
from holdfast.launch.cause import EndKind, RootCause, judge, kind_of
from holdfast.launch.output import RankOutput
from holdfast.launch.phases import KILLED_S, GroupPhase, GroupPhases
from holdfast.launch.rank_life import Rank
from holdfast.launch.rank_main import ENTERED, PAGE, Descriptors, RankSetup, ShippedFunction
from holdfast.launch.rank_process import close_all
from holdfast.shm import forks
from holdfast.shm.memory_file import Memory, new_file
from holdfast.system import linux
from holdfast.system.cgroups import OomWatch
from holdfast.system.signal_origin import SenderNote

log = logging.getLogger("holdfast")
# How often memory is looked at.
TICK_S = 0.5


class RankGroup:
    """All ranks of one attempt. Call `open` first. `watch` blocks until all ranks have ended.

    Meanwhile any thread may call everything else. Each start is noted in the line that makes it, because an interrupt
    may come between two lines.
    """

    def __init__(self, output: RankOutput) -> None:
        self.output = output
        self.ranks: list[Rank] = []
        self.grace_s: float | None = None
        """The grace period of `join` or `stop`: seconds to end by themselves, and again after SIGTERM."""
        self._unwanted = False
        self._wake_pipe: list[int] = []  # a pipe: a byte in it wakes the watch
        self._mine: set[int] = set()  # the trainer's descriptors, besides the wake pipe's
        self._theirs: list[int] = []  # descriptors of the rank that is being started
        self._starting: Any = None  # its process
        self._poll = select.poll()
        self._oom = OomWatch(time.monotonic())
        self._phases = GroupPhases()
        self._looked = 0.0
        self._closing = threading.Lock()

    # The start -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """`abandon` undoes this, and all that follows."""
        self._wake_pipe += os.pipe()
        self._poll.register(self._wake_pipe[0], select.POLLIN)
        forks.watch(self)

    def start(
        self,
        method: str,
        daemon: bool,
        function: ShippedFunction,
        number: int,
        env: Mapping[str, str],
        threads: int | None,
        growth_bytes: int | None,
    ) -> None:
        """Start one more rank, see `RankSetup`. Raises what starting a process raises."""
        theirs = self._theirs
        theirs.append(new_file("crash", 0))
        theirs.append(new_file("page", PAGE))
        words = self._pipe()
        self._pipe(lifeline=True)  # one for each rank: the pipe's end says which process the kernel signals
        self.output.pipes(number, theirs)
        crash, page, ranks_words, lifeline, out, err = theirs
        descriptors = Descriptors(out, err, ranks_words, lifeline, crash, page)
        began = time.monotonic_ns()
        memory = Memory(page, PAGE)
        setup = RankSetup(number, method, descriptors, env, threads, growth_bytes)
        process = rank_process.process(setup, function, daemon)
        self._starting = process
        try:
            process.start()
        finally:
            function.close()  # the rank has its own descriptor now
        os.set_blocking(words, False)
        pidfd = process._popen.pidfd
        watched = process.sentinel if pidfd is None else pidfd
        sender = SenderNote(memory, 0, ENTERED)
        self.ranks.append(Rank(number, process, words, crash, memory, began, watched, sender, growth_bytes))
        self._starting = None
        for fd in (words, watched):
            self._poll.register(fd, select.POLLIN)
        self._mine.add(theirs.pop(0))  # crash
        close_all(theirs)

    def _pipe(self, *, lifeline: bool = False) -> int:
        """The trainer's end of a new pipe; the rank's end is the last of `theirs`. Of a lifeline the rank reads."""
        self._theirs += os.pipe()[::-1] if lifeline else os.pipe()
        mine = self._theirs[-2]
        self._mine.add(self._theirs.pop(-2))
        return mine

    def close_in_child(self) -> None:
        """In a fork of the trainer: close what is the trainer's. Else a rank would outlive it as long as the child."""
        for fd in (*self._mine, *self._wake_pipe, *self.output.fds):
            with suppress(OSError):
                os.close(fd)
        self._mine.clear()
        self._wake_pipe.clear()
        for rank in self.ranks:  # at its end the child would wait for them, and terminate daemons
            multiprocessing.process._children.discard(rank.process)  # type: ignore[attr-defined]

    # Orders from other threads -------------------------------------------------------------------------------------

    def stop(self, grace_s: float) -> None:
        """End all ranks: the trainer does not want them any more."""
        self.grace_s = grace_s
        self._unwanted = True
        self._wake_up()

    def allow(self, grace_s: float | None) -> None:
        """Set the grace period that `join` was given."""
        if grace_s is not None and grace_s != self.grace_s:
            self.grace_s = grace_s
            self._wake_up()

    def _wake_up(self) -> None:
        with self._closing:
            if len(self._wake_pipe) == 2:
                os.write(self._wake_pipe[1], b".")

    # The watch -----------------------------------------------------------------------------------------------------

    def watch(self) -> RootCause:
        """Watch until all have ended; gives the cause."""
        try:
            self.output.start()
            while self._advance() is not GroupPhase.OVER:
                self._step()
            for rank in self.ranks:
                if rank.last_words is not None and rank.last_words.raised is not None:
                    self.output.note(rank.number, rank.last_words.raised.traceback)
            self.output.finish()
            return judge(rank.end(self.output.tail(rank.number)) for rank in self.ranks)
        except BaseException:
            self.abandon()
            raise
        finally:
            self.close()

    def _step(self) -> None:
        self._hear(self._patience())
        for rank in self.ranks:
            if rank.died_ns is not None and rank.code is None:
                rank.reap(self._oom)
                self._hear(0.0)  # others may have died meanwhile, and each needs the time of its own death
        now = time.monotonic()
        if now - self._looked >= TICK_S:
            self._looked = now
            for rank in self.ranks:
                if rank.code is None:
                    rank.readings.append((now, linux.resident_bytes(rank.pid)))
            self._oom.look(now)

    def _hear(self, patience_s: float) -> None:
        """Note deaths and last words as they come, for this long at most."""
        ready = self._poll.poll(patience_s * 1000)
        now_ns = time.monotonic_ns()
        fds = {fd for fd, _ in ready}
        if self._wake_pipe[0] in fds:
            os.read(self._wake_pipe[0], 4096)
        for rank in self.ranks:
            if rank.watched in fds and rank.died_ns is None:
                rank.died_ns = now_ns
                self._poll.unregister(rank.watched)
            if rank.words in fds and not rank.listen():
                self._poll.unregister(rank.words)

    def _patience(self) -> float:
        deadline = self._phases.deadline(self.grace_s)
        return TICK_S if deadline is None else min(TICK_S, max(0.0, deadline - time.monotonic()))

    def _advance(self) -> GroupPhase:
        """The present phase. If it begins now, this sends its signals."""
        now, living = time.monotonic(), [rank for rank in self.ranks if rank.code is None]
        if not living:
            self._phases.move(GroupPhase.OVER, now)
            return GroupPhase.OVER
        failed = any(rank.failed for rank in self.ranks)
        begun = self._phases.advance(now, failed=failed, unwanted=self._unwanted, grace_s=self.grace_s)
        if begun is GroupPhase.STOPPING:
            for rank in living:
                if rank.last_words is None or rank.last_words.what != "done":  # else it has returned, and is ending
                    log.warning("Terminating process %d via signal SIGTERM (rank %d)", rank.pid, rank.number)
                    rank.terminate()
        elif begun is GroupPhase.KILLING:
            for rank in living:
                log.warning("Process %d ignored SIGTERM; sending SIGKILL (rank %d)", rank.pid, rank.number)
                rank.dump()
                rank.kill()
        return self._phases.phase

    # The end -------------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Kill all that were started: the others could not start, or watching failed. May be called again."""
        if not self._wake_pipe:
            return
        try:
            processes = {self._starting, *(rank.process for rank in self.ranks)}
            begun = [process for process in processes if process is not None and process._popen is not None]
            for process in begun:
                process.kill()
            for process in begun:
                process.join(KILLED_S)
                if process.exitcode is not None:
                    process.close()
            self.ranks.clear()
        finally:
            self.close()
            self.output.finish()

    def close(self) -> None:
        """Close all descriptors. The kernel kills ranks that still live, because this closes their lifelines."""
        forks.forget(self)
        close_all(self._mine)
        close_all(self._theirs)
        with self._closing:
            close_all(self._wake_pipe)

    def kind_of(self, rank: Rank) -> EndKind:
        return kind_of(rank.end(self.output.tail(rank.number)))
