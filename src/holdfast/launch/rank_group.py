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
from holdfast.launch.cause import How, RootCause, how, judge
from holdfast.launch.output import Output
from holdfast.launch.phases import KILLED_S, GroupPhases, Phase
from holdfast.launch.rank_life import Rank
from holdfast.launch.rank_main import ENTERED, PAGE, Card, Ends, ShippedFunction
from holdfast.launch.rank_process import close_all
from holdfast.shm import forks
from holdfast.shm.memory import Memory, new_file
from holdfast.system import linux
from holdfast.system.cgroups import OomWatch
from holdfast.system.signals import SenderNote

log = logging.getLogger("holdfast")
# How often memory is looked at.
TICK_S = 0.5


class RankGroup:
    """`open` comes first. `watch` blocks until all ranks have ended; everything else may be called from any thread
    meanwhile. What has been begun is noted in the same line in which it is begun: an interrupt may come between two.
    """

    def __init__(self, output: Output) -> None:
        self.output = output
        self.ranks: list[Rank] = []
        self.grace_s: float | None = None
        """What `join` was told: how long others may take to end by themselves, and then after SIGTERM."""
        self._unwanted = False
        self._bell: list[int] = []  # a pipe: who writes into it wakes the watch
        self._mine: set[int] = set()  # descriptors of the trainer's; the bell's are others
        self._theirs: list[int] = []  # those of a rank that is being started
        self._starting: Any = None  # its process
        self._poll = select.poll()
        self._oom = OomWatch(time.monotonic())
        self._phases = GroupPhases()
        self._looked = 0.0
        self._closing = threading.Lock()

    # Birth ---------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """`abandon` undoes it, and all that follows."""
        self._bell += os.pipe()
        self._poll.register(self._bell[0], select.POLLIN)
        forks.watch(self)

    def start(
        self,
        method: str,
        daemon: bool,
        parcel: ShippedFunction,
        number: int,
        env: Mapping[str, str],
        threads: int | None,
        growth: int | None,
    ) -> None:
        """One more rank, see `Card`. Raises what starting a process raises."""
        theirs = self._theirs
        theirs.append(new_file("crash", 0))
        theirs.append(new_file("page", PAGE))
        words = self._pipe()
        self._pipe(lifeline=True)  # for each: whom the kernel signals is a property of the pipe's end
        self.output.pipes(number, theirs)
        crash, page, ranks_words, alive, out, err = theirs
        ends = Ends(out, err, ranks_words, alive, crash, page)
        began = time.monotonic_ns()
        memory = Memory(page, PAGE)
        card = Card(number, method, ends, env, threads, growth)
        process = rank_process.process(method, f"holdfast-rank-{number}", daemon, card, parcel, out, err, env)
        self._starting = process
        rank_process.start(process, parcel)
        os.set_blocking(words, False)
        pidfd = process._popen.pidfd
        watched = process.sentinel if pidfd is None else pidfd
        sender = SenderNote(memory, 0, ENTERED)
        self.ranks.append(Rank(number, process, words, crash, memory, began, watched, sender, growth))
        self._starting = None
        for fd in (words, watched):
            self._poll.register(fd, select.POLLIN)
        self._mine.add(theirs.pop(0))  # crash
        close_all(theirs)

    def _pipe(self, *, lifeline: bool = False) -> int:
        """The trainer's end of a new pipe, of which the other is the last of `theirs`; it writes into a lifeline."""
        self._theirs += os.pipe()[::-1] if lifeline else os.pipe()
        mine = self._theirs[-2]
        self._mine.add(self._theirs.pop(-2))
        return mine

    def close_in_child(self) -> None:
        """The trainer was forked: what is ours stays with the trainer, or a rank would outlive it by the child."""
        for fd in (*self._mine, *self._bell, *self.output.fds):
            with suppress(OSError):
                os.close(fd)
        self._mine.clear()
        self._bell.clear()
        for rank in self.ranks:  # at its end a child would wait for its own, and terminate daemons
            multiprocessing.process._children.discard(rank.process)  # type: ignore[attr-defined]

    # Orders from other threads -------------------------------------------------------------------------------------

    def stop(self, grace_s: float) -> None:
        """End all ranks: nobody has failed, the trainer does not want them any more."""
        self.grace_s = grace_s
        self._unwanted = True
        self._nudge()

    def allow(self, grace_s: float | None) -> None:
        """How long `join` lets ranks end by themselves."""
        if grace_s is not None and grace_s != self.grace_s:
            self.grace_s = grace_s
            self._nudge()

    def _nudge(self) -> None:
        with self._closing:
            if len(self._bell) == 2:
                os.write(self._bell[1], b".")

    # The watch -----------------------------------------------------------------------------------------------------

    def watch(self) -> RootCause:
        """Until all have ended; the judgement."""
        try:
            self.output.start()
            while self._advance() is not Phase.OVER:
                self._step()
            for rank in self.ranks:
                if rank.said is not None and rank.said.raised is not None:
                    self.output.note(rank.number, rank.said.raised.traceback)
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
                self._hear(0.0)  # that took a moment, and others may have died in it: each has its own time
        now = time.monotonic()
        if now - self._looked >= TICK_S:
            self._looked = now
            for rank in self.ranks:
                if rank.code is None:
                    rank.readings.append((now, linux.resident_bytes(rank.pid)))
            self._oom.look(now)

    def _hear(self, patience_s: float) -> None:
        """Deaths and last words, as they come."""
        ready = self._poll.poll(patience_s * 1000)
        now_ns = time.monotonic_ns()
        fds = {fd for fd, _ in ready}
        if self._bell[0] in fds:
            os.read(self._bell[0], 4096)
        for rank in self.ranks:
            if rank.watched in fds and rank.died_ns is None:
                rank.died_ns = now_ns
                self._poll.unregister(rank.watched)
            if rank.words in fds and not rank.listen():
                self._poll.unregister(rank.words)

    def _patience(self) -> float:
        deadline = self._phases.deadline(self.grace_s)
        return TICK_S if deadline is None else min(TICK_S, max(0.0, deadline - time.monotonic()))

    def _advance(self) -> Phase:
        """The present phase; what a phase begins with is done when it begins."""
        now, living = time.monotonic(), [rank for rank in self.ranks if rank.code is None]
        if not living:
            self._phases.move(Phase.OVER, now)
            return Phase.OVER
        failed = any(rank.failed for rank in self.ranks)
        begun = self._phases.advance(now, failed=failed, unwanted=self._unwanted, grace_s=self.grace_s)
        if begun is Phase.STOPPING:
            for rank in living:
                if rank.said is None or rank.said.what != "done":  # a rank that has returned is on its way out
                    log.warning("Terminating process %d via signal SIGTERM (rank %d)", rank.pid, rank.number)
                    rank.terminate()
        elif begun is Phase.KILLING:
            for rank in living:
                log.warning("Process %d ignored SIGTERM; sending SIGKILL (rank %d)", rank.pid, rank.number)
                rank.dump()
                rank.kill()
        return self._phases.phase

    # The end -------------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Not all could be started, or they cannot be watched: those that were are killed. May be called again."""
        if not self._bell:
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
        """Whoever is still there is killed by the kernel now: the pipe that says we live is closed."""
        forks.forget(self)
        close_all(self._mine)
        close_all(self._theirs)
        with self._closing:
            close_all(self._bell)

    def how(self, rank: Rank) -> How:
        return how(rank.end(self.output.tail(rank.number)))
