"""What the trainer holds of one rank: its process, its last words, and the evidence of its end."""

import os
import pickle
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from holdfast.launch.cause import RankEnd
from holdfast.launch.rank_main import ENTERED, HEAD, Said
from holdfast.shm.memory import Memory
from holdfast.system import linux
from holdfast.system.cgroups import OomWatch
from holdfast.system.evidence import Evidence, at_death
from holdfast.system.signals import SenderNote

# Readings of its memory that are kept.
SERIES = 8
# The fork server tells the status a moment after the death.
STATUS_S = 0.05


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
    growth: int | None
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
    def entered(self) -> bool:
        """False while it imports the main module, and what it needs."""
        return bool(self.memory.view[ENTERED])

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

    def end(self, output: tuple[str, ...]) -> RankEnd:
        """For the judge."""
        said = self.said
        text = ""
        if said is not None and said.raised is not None and said.what != "exit":
            text = f"{said.raised.type_name}: {said.raised.text}"
        at = said.at_ns if said is not None and said.what != "done" else self.died_ns
        at = time.monotonic_ns() if at is None else at
        return RankEnd(self.number, at, self.exit_code, text, "\n".join(output), self.stopped_ns)

    def listen(self) -> bool:
        """What the rank says; False when there is nobody to say more."""
        while True:
            try:
                data = os.read(self.words, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.heard += data
            size = HEAD.unpack_from(self.heard)[0] if len(self.heard) >= HEAD.size else -1
            if self.said is None and size >= 0 and len(self.heard) >= HEAD.size + size:
                self.said = pickle.loads(self.heard[HEAD.size : HEAD.size + size])

    def reap(self, oom: OomWatch) -> None:
        """It has died: its status, and the evidence. Again later if the status is not there yet."""
        self.listen()
        popen = self.process._popen
        code = popen.wait(STATUS_S)
        if code is None:
            return
        self.process.join(0)  # multiprocessing need not remember it
        if popen.status_lost and self.said is not None:
            code = self.said.code
        now = time.monotonic()
        killed = code == -signal.SIGKILL and self.stopped_ns is None
        seen = Evidence(
            pid=self.pid,
            lived_s=now - self.began_ns / 1e9,
            stack=self.stack or linux.written_stack(self.crash),
            peak_bytes=popen.peak_bytes,
            memory=tuple((now - at, size) for at, size in self.readings),
            sender=self.note.last(-code) if code < 0 else None,
        )
        self.evidence = at_death(seen, oom, now, killed=killed)
        self.code = code

    def dump(self) -> None:
        """Where it hangs, before it is killed."""
        self.stack = linux.take_stack(self.pid, self.crash)

    def terminate(self) -> None:
        self._stop(self.process.terminate)

    def kill(self) -> None:
        self._stop(self.process.kill)

    def _stop(self, send: Any) -> None:
        if self.stopped_ns is None:
            self.stopped_ns = time.monotonic_ns()
        send()
