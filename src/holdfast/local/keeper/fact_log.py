"""FactLog: the keeper appends what happens to the run folder, whatever the trainer does.

Everything that the keeper tells the trainer goes into the log as well, with the index that the worker had at hand.
Besides, each worker stands there once a second, and at last the end of the trainer. Nothing here is an opinion:
diagnose/run_reader.py joins these facts with the verdicts of the trainer, and diagnoses those that have none.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

from holdfast.core.host import Silence
from holdfast.core.messages import Exited, Place
from holdfast.local.keeper.worker_life import WorkerLife
from holdfast.local.protocol.pulse import Pulse
from holdfast.local.protocol.wire import KeeperSignalled, KeeperUp, LifeStarted, Message, RoomLeft
from holdfast.system import procfs
from holdfast.system.cgroups import OomWatch
from holdfast.system.evidence import Evidence, at_death
from holdfast.system.run_files import AppendLog

# How often the workers are noted.
NOTE_S = 1.0
# How long the keeper waits for the end of a trainer that has closed its socket.
END_S = 1.0
WORKERS = "workers"


class FactLog:
    """`path`: None where nobody wants it. `pulses`: of all workers. `settings`: what a diagnosis has to know."""

    def __init__(self, path: str | None, pulses: Sequence[Pulse], **settings: Any) -> None:
        self._settings = settings
        self._log = None if path is None else AppendLog(Path(path), (WORKERS,), _plain)
        self._pulses = pulses
        self._next_note = 0.0
        self._stopping = False

    def tell(self, message: Message) -> None:
        """What the trainer is told, too."""
        match message:
            case _ if self._log is None:
                return
            case KeeperUp(pid):
                self._append("keeper", pid=pid, **self._settings)
            case LifeStarted(worker, life, pid):
                self._append("started", worker=worker, life=life, pid=pid)
            case Exited() if not self._stopping:
                self._append_event("exited", message, cause=message.cause.name)
            case Silence():
                self._append_event("noticed", message, what=message.what.name)
            case KeeperSignalled(number, evidence):
                self._append("signalled", code=number, evidence=asdict(evidence))
            case RoomLeft(workers, paused, need, _):
                self._append("room", workers=workers, paused=paused, need=need)

    def _append_event(self, record: str, event: Exited | Silence, **kind: str) -> None:
        index = self._pulses[event.worker].index if event.worker >= 0 else None
        evidence = asdict(event.evidence) if isinstance(event.evidence, Evidence) else None
        ids = {"worker": event.worker, "life": event.life, **kind, "code": event.code}
        self._append(record, **ids, index=index, on=_place(event.on), evidence=evidence)

    def note(self, lives: Iterable[WorkerLife], now: float) -> None:
        """What each worker does and has, once a second."""
        if self._log is not None and not self._stopping and now >= self._next_note:
            self._next_note = now + NOTE_S
            self._append(WORKERS, workers=[self._of(life, now) for life in lives])

    def note_last(self, lives: Iterable[WorkerLife], now: float) -> None:
        """What each did when the trainer ended."""
        self._next_note = 0.0
        self.note(lives, now)

    def _of(self, life: WorkerLife, now: float) -> dict[str, Any]:
        ids = {"worker": life.worker, "life": life.life, "pid": life.pid}
        on = {"on": _place(life.pulse.place(now)), "index": life.pulse.index}
        resident = life.memory[-1][1] if life.memory else 0
        return {**ids, **on, "resident_bytes": resident, **life.pulse.figures()}

    def stopping(self) -> None:
        """The trainer wants no more: from now on ends are as they should be."""
        self._stopping = True
        if self._log is not None:
            self._append("stopped")

    def trainer_ended(self, pid: int, pidfd: int | None, oom: OomWatch, since: float, now: float) -> None:
        """It closed its socket, or is gone, and has not said stop. The last record."""
        if self._log is None:
            return
        ended, code = procfs.end_of(pid, pidfd, END_S)
        killed = code is None or code < 0
        evidence = at_death(Evidence(pid=pid, lived_s=now - since), oom, now, killed=killed)
        self._append("trainer", pid=pid, ended=ended, exit_code=code, evidence=asdict(evidence))

    def _append(self, record: str, **fields: Any) -> None:
        if self._log is None:
            return
        try:
            self._log.append(record, **fields)
        except OSError as error:  # no room on the disk, say: a help, not a duty
            os.write(2, f"holdfast: facts cannot be kept in {self._log.path}: {error}\n".encode())
            self._log = None


def _place(on: Place | None) -> dict[str, Any] | None:
    return None if on is None else {**on._asdict(), "stage": on.stage.name}


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else str(value)
