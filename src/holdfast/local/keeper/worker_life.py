"""One worker process, as its keeper sees it: what it does, since when, what it has, what was seen of it."""

import os
import signal
from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple

from holdfast.core.host import POSITION, SAMPLES, SINCE, STAGE
from holdfast.core.messages import Cause, Place, Stage
from holdfast.local.protocol.pulse import FILES, SIGNALS, TASK, TASKS, Pulse
from holdfast.local.protocol.wire import StartLife
from holdfast.local.worker.thresholds import Copies
from holdfast.system import linux
from holdfast.system.evidence import Evidence, View
from holdfast.system.snapshot import GROWN, LOOK_S, SOON_S, Snapshot, look_at

# A worker that says nothing for this long is an incident, and again each time the silence has doubled.
SILENT_S = 60.0
# Readings of a worker's memory that are kept: the last three seconds.
SERIES = 30


class Scene(NamedTuple):
    """What is the same for all lives of a keeper. `counters`: those of kills for memory can be read."""

    trainer_threads: int
    worlds: tuple[str, ...]
    counters: bool


class WorkerLife:
    """See the module. `batches`, `crash`: descriptors of its memory file and of where a crash leaves its stack."""

    def __init__(
        self, order: StartLife, pid: int, pulse: Pulse, batches: int, crash: int, began: float, scene: Scene
    ) -> None:
        self.worker = order.worker
        self.life = order.life
        self.pid = pid
        self.pidfd = linux.open_pidfd(pid)
        self.pulse = pulse
        self.batches = batches
        self.crash = crash
        self.began = began
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
        self.seen_on: Place | None = None  # what it was on then, until that hang was told of
        self._scene = scene
        self._look: Snapshot | None = None
        self._looked = 0.0
        self._next_look = 0.0
        self._files = 0  # descriptors at the last look

    @property
    def slot_bytes(self) -> int:
        return os.fstat(self.batches).st_blocks * 512

    @property
    def done(self) -> tuple[int, int]:
        """Batches and samples of this life, those of the batch it is on included."""
        words = self.pulse.words
        begun = words[POSITION] if words[STAGE] == Stage.FETCH else 0
        return words[TASKS] - self.before[0], words[SAMPLES] - self.before[1] + begun

    @property
    def hang(self) -> tuple[object, ...]:
        """One silence of one life: the next one, or a later look at it, is another."""
        return (self.pid, self.next_alarm_s, *self.beat)

    def hear(self, step: float) -> bool:
        """True when it has gone on since the last time, or has nothing to do but to wait for the trainer: `quiet_s` is
        how long it had been silent. Else its silence is `step` longer.
        """
        words = self.pulse.words
        beat = (words[STAGE], words[TASK], words[POSITION], words[SINCE])
        if beat != self.beat or beat[0] in (Stage.IDLE, Stage.ANNOUNCE):
            self.beat, self.next_alarm_s = beat, SILENT_S
            return True
        self.quiet_s += step
        return False

    def look(self, now: float, files: int) -> None:
        """At what it has, now and then; earlier when its descriptors grow. `files`: how many they are."""
        if now >= self._next_look or files >= 2 * self._files + GROWN:
            self.look_closely(now)

    def look_closely(self, now: float) -> None:
        look = look_at(self.pid)
        if look is not None:
            self._look, self._looked, self._files = look, now, look.descriptors
        self._next_look = now + min(LOOK_S, max(SOON_S, now - self.began))  # a young one changes fast

    def crash_text(self) -> str:
        """What it left when it crashed: its stack; when it was refused something: what, in words."""
        return linux.written_stack(self.crash)

    def kill(self) -> None:
        """Only ever a child of ours that was not reaped yet: the pid cannot be anybody else's."""
        os.kill(self.pid, signal.SIGKILL)

    def evidence(self, now: float, **facts: Any) -> Evidence:
        tasks, samples = self.done
        look = self._look
        return Evidence(
            pid=self.pid,
            lived_s=now - self.began,
            view=self.view,
            memory=tuple((now - at, size) for at, size in self.memory),
            counters=self._scene.counters,
            worlds=self._scene.worlds,
            noted_signals=self.pulse.words[SIGNALS],
            trainer_threads=self._scene.trainer_threads,
            grown_bytes=self.grown,
            tasks=tasks,
            samples=samples,
            descriptors=self.pulse.words[FILES],
            look=None if look is None else replace(look, age_s=max(0.0, now - self._looked)),
            **facts,
        )
