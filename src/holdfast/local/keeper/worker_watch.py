"""The watch over workers: several times a second, what each does and what it uses. Which process: the keeper.

It asks workers to leave before they run into a limit, kills those that are past a deadline or a limit, and says what it
sees: a silence, a signal that was noted, pages that were copied, memory that is short.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.core.host import ALLOWED, BASE, Silence
from holdfast.core.messages import Cause, Stage, What
from holdfast.local.keeper.fact_log import FactLog
from holdfast.local.keeper.fork_worker import KeeperOrders
from holdfast.local.keeper.worker_life import WorkerLife
from holdfast.local.protocol.pulse import ASKED, DUMPABLE, FILES, GIL, LAST_SIGNAL, MEMORY, PEAK, SIGNALS
from holdfast.local.protocol.wire import MOST_BYTES, Message, RoomLeft, encode
from holdfast.local.worker.thresholds import Copies, Thresholds
from holdfast.system import linux, procfs
from holdfast.system.cgroups import group_of
from holdfast.system.evidence import Evidence, view_of
from holdfast.system.snapshot import PySpy

# A closer look at a worker that hangs or is about to be killed. Which process: the keeper.
#
# The keeper first looks from outside at what the worker waits for, before it does anything that may wake it. Then
# py-spy, where it is installed, gives its opinion. Then the keeper asks the worker for its Python stack.


# A silent worker is looked at for this long, to see whether it computes; a clock tick is 10 ms.
BUSY_S = 0.06


class HangProbe:
    def __init__(self, pyspy: PySpy) -> None:
        self._pyspy = pyspy

    def second_opinion_awaited(self, life: WorkerLife) -> bool:
        """True while py-spy still looks at this hang. (A worker that goes on meanwhile was only slow, and lives.)"""
        if self._pyspy.path is None:
            return False
        self._see(life)
        stopped = life.view is not None and life.view.state in ("T", "t")  # py-spy cannot look at such a one
        return not stopped and self._pyspy.awaited(life.pid, life.hang)

    def _see(self, life: WorkerLife) -> None:
        """What it waits for and what it has; once per hang."""
        if life.seen == life.hang:
            return
        life.seen = life.hang
        life.seen_on = life.pulse.place(time.monotonic())
        before, began = procfs.processor_s(life.pid), time.monotonic()
        time.sleep(BUSY_S)
        busy = (procfs.processor_s(life.pid) - before) / (time.monotonic() - began)
        life.view = view_of(life.pid, busy)
        life.look_closely(time.monotonic())

    def dump(self, life: WorkerLife) -> None:
        """Ask the worker for its stack."""
        self._see(life)
        if not life.pulse.words[DUMPABLE] or life.view is None or life.view.state in ("T", "t", "Z", ""):
            return
        life.pulse.words[GIL] = 0
        life.stack = linux.take_stack(life.pid, life.crash)
        seen = self._pyspy.answer(life.hang)
        gil = {1: False, 2: True}.get(life.pulse.words[GIL], seen.gil)
        life.view = replace(life.view, line=procfs.source_line(life.stack), gil=gil, native=seen.frames)


# What the keeper says to the trainer. Which process: the keeper, which must never wait for a busy trainer.


class Outbox:
    def __init__(self, control: socket.socket, facts: FactLog) -> None:
        """`control` does not block."""
        self._facts = facts
        self._control = control
        # The socket takes no message that is longer than its buffer, now or later.
        self._most = min(MOST_BYTES, control.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2)
        self._unsaid: deque[bytes] = deque()

    def say(self, message: Message | None = None) -> None:
        """Never blocks: what the socket does not take now is said at the next tick."""
        if message is not None:
            self._unsaid.append(encode(message, self._most))
            self._facts.tell(message)
        while self._unsaid:
            try:
                self._control.send(self._unsaid[0])
            except OSError:  # it is full; or the trainer is gone, and the keeper will notice
                return
            self._unsaid.popleft()


# How often workers are looked at. A tick costs some 20 us per worker.
TICK_S = 0.1


class WorkerWatch:
    """`lives`: the keeper's, by pid."""

    def __init__(self, orders: KeeperOrders, lives: Mapping[int, WorkerLife], outbox: Outbox, pyspy: PySpy) -> None:
        self._orders = orders
        self._lives = lives
        self._outbox = outbox
        self._hang_probe = HangProbe(pyspy)
        self._last_tick = time.monotonic()
        self._marks = Thresholds(orders.growth_bytes)
        self._room = orders.room
        self._own = linux.memory_of()[1]  # what workers inherit
        self._fewest = orders.workers  # workers that ever fitted, as far as the trainer was told
        self.tick_s = self._tick(orders.sample_timeout)

    def look(self, now: float) -> bool:
        """At all workers, if it is time; False if not."""
        gap = now - self._last_tick
        if gap < self.tick_s * 0.8:
            return False
        self._last_tick = now
        # A stopped keeper or a paused machine is nobody's hang: a gap counts as two ticks at most.
        step = min(gap, 2 * self.tick_s)
        deadlines = [allowed for life in self._lives.values() if (allowed := self._allowed(life)) is not None]
        self.tick_s = self._tick(min(deadlines, default=None))
        for life in list(self._lives.values()):
            self._look_at(life, step, now)
        self._look_around(now)
        return True

    @staticmethod
    def _tick(deadline_s: float | None) -> float:
        """The shorter the deadline, the oftener somebody must look."""
        return TICK_S if deadline_s is None else max(0.01, min(TICK_S, deadline_s / 5))

    def _look_at(self, life: WorkerLife, step: float, now: float) -> None:
        self._weigh(life, now)
        life.look(now, life.pulse.words[FILES])
        if not life.hear(step):
            self._judge_silence(life, now)
        else:
            self._went_on(life, now)
        self.look_for_signals(life, now)
        if life.end_at is not None and now >= life.end_at:
            life.kill()

    def _weigh(self, life: WorkerLife, now: float) -> None:
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
            self._say_quiet(life, What.COPIED, copied >> 20, now)

    def _end(self, life: WorkerLife, cause: Cause, now: float) -> None:
        """Kill it. What it is on is noted before the dump: that may wake it, and it would go on to another sample."""
        life.killed_for, life.killed_on = cause, life.pulse.place(now)
        self._hang_probe.dump(life)
        life.kill()

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
            self._outbox.say(RoomLeft(*changed, room.need, evidence))
        if room.critical and len(lives) > 1 and not self._orders.fixed and not any(life.killed_for for life in lives):
            neediest = max(lives, key=lambda life: life.grown)
            neediest.facts = room.facts()
            self._end(neediest, Cause.PRESSURE, now)

    def look_for_signals(self, life: WorkerLife, now: float) -> None:
        """One that it noted since the last time is told."""
        words = life.pulse.words
        if words[SIGNALS] != life.signals:
            life.signals = words[SIGNALS]
            number = words[LAST_SIGNAL]
            self._say_quiet(life, What.SIGNALLED, number, now, sender=life.pulse.sender.last(number))

    def _judge_silence(self, life: WorkerLife, now: float) -> None:
        allowed = self._allowed(life)
        stage, position = life.beat[0], life.beat[2]
        if allowed is not None and stage >= Stage.FETCH and life.killed_for is None:
            if stage == Stage.FETCH_MANY:
                allowed *= max(1, position)  # there it is the number of samples
            if life.quiet_s > allowed:
                if self._hang_probe.second_opinion_awaited(life):
                    return
                self._end(life, Cause.DEADLINE, now)
                return
        if life.quiet_s >= life.next_alarm_s:
            if self._hang_probe.second_opinion_awaited(life):
                return
            self._hang_probe.dump(life)
            life.next_alarm_s *= 2
            self._say_silent(life, now)

    def _went_on(self, life: WorkerLife, now: float) -> None:
        """It does something else now. If it was looked at for its silence, and that was not told, it is told now: the
        look itself may have ended the wait.
        """
        if life.seen_on is not None and life.killed_for is None:
            self._say_silent(
                life,
                now,
                f"it went on after {life.seen_on.seconds:.1f} s, when Holdfast looked closer: a "
                "signal ends sleep(), poll() and the like in native code early",
            )
        life.quiet_s = 0.0

    def _say_silent(self, life: WorkerLife, now: float, *facts: str) -> None:
        """With what it was on before it was looked at."""
        on, life.seen_on = life.seen_on or life.pulse.place(now), None
        evidence = life.evidence(now, stack=life.stack, facts=facts)
        self._outbox.say(Silence(life.worker, life.life, What.SILENT, max(1, int(life.quiet_s)), on, evidence))
        life.stack = ""

    def _allowed(self, life: WorkerLife) -> float | None:
        """Seconds that it may take for what it does."""
        own: int = life.pulse.words[ALLOWED]
        if own == 0:
            return self._orders.sample_timeout
        return own / 1e9 if own > 0 else None

    def _say_quiet(self, life: WorkerLife, what: What, code: int, now: float, **facts: Any) -> None:
        on = life.pulse.place(now)
        self._outbox.say(Silence(life.worker, life.life, what, code, on, life.evidence(now, **facts)))
