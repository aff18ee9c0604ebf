"""Rank: what the trainer holds of one rank: its process, its last words, and the evidence of its end."""

import os
import pickle
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from holdfast.launch.cause import RankEnd
from holdfast.launch.rank_main import ENTERED, HEAD, LastWords
from holdfast.shm.memory_file import Memory
from holdfast.system import linux
from holdfast.system.cgroups import OomWatch
from holdfast.system.evidence import Evidence, at_death
from holdfast.system.signal_origin import SenderNote

# How many readings of its memory are kept.
SERIES = 8
# The fork server sends the exit status a moment after the death.
STATUS_S = 0.05


@dataclass(eq=False)
class Rank:
    """One rank. `words`, `crash`: the trainer's descriptors of the pipe of its last words, and of its crash file."""

    number: int
    process: Any
    words: int
    crash: int
    memory: Memory
    began_ns: int
    watched: int
    """The descriptor that is readable at its end: a pidfd, or multiprocessing's sentinel on kernels without one."""
    sender_note: SenderNote
    growth_bytes: int | None
    _heard: bytearray = field(default_factory=bytearray)
    last_words: LastWords | None = None
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
        """False while the rank imports the main module and what that needs."""
        return bool(self.memory.view[ENTERED])

    @property
    def failed(self) -> bool:
        """It has said so, or its process has ended so."""
        told = self.last_words is not None and self.last_words.what != "done"
        return told or (self.code is not None and self.code != 0)

    @property
    def exit_code(self) -> int:
        """The exit code; if Holdfast stopped the rank on its way out, the code that it would have had."""
        stopped = self.code is None or (self.code < 0 and self.stopped_ns is not None)
        if self.last_words is not None and stopped:
            return self.last_words.code
        return -signal.SIGKILL if self.code is None else self.code

    def end(self, output: tuple[str, ...]) -> RankEnd:
        """How it ended, for `judge`. `output`: the last lines that it printed."""
        last_words = self.last_words
        text = ""
        if last_words is not None and last_words.raised is not None and last_words.what != "exit":
            text = f"{last_words.raised.type_name}: {last_words.raised.text}"
        at = last_words.at_ns if last_words is not None and last_words.what != "done" else self.died_ns
        at = time.monotonic_ns() if at is None else at
        return RankEnd(self.number, at, self.exit_code, text, "\n".join(output), self.stopped_ns)

    def listen(self) -> bool:
        """Read the rank's last words; False at the end of the pipe."""
        while True:
            try:
                data = os.read(self.words, 1 << 16)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._heard += data
            size = HEAD.unpack_from(self._heard)[0] if len(self._heard) >= HEAD.size else -1
            if self.last_words is None and size >= 0 and len(self._heard) >= HEAD.size + size:
                self.last_words = pickle.loads(self._heard[HEAD.size : HEAD.size + size])

    def reap(self, oom: OomWatch) -> None:
        """It has died: take its exit status and the evidence. Call it again if the status is not there yet."""
        self.listen()
        popen = self.process._popen
        code = popen.wait(STATUS_S)
        if code is None:
            return
        self.process.join(0)  # multiprocessing forgets it
        if popen.status_lost and self.last_words is not None:
            code = self.last_words.code
        now = time.monotonic()
        killed = code == -signal.SIGKILL and self.stopped_ns is None
        seen = Evidence(
            pid=self.pid,
            lived_s=now - self.began_ns / 1e9,
            stack=self.stack or linux.written_stack(self.crash),
            peak_bytes=popen.peak_bytes,
            memory=tuple((now - at, size) for at, size in self.readings),
            sender=self.sender_note.last(-code) if code < 0 else None,
        )
        self.evidence = at_death(seen, oom, now, killed=killed)
        self.code = code

    def dump(self) -> None:
        """Take its stack, which shows where it hangs, before it is killed."""
        self.stack = linux.take_stack(self.pid, self.crash)

    def terminate(self) -> None:
        self._stop(self.process.terminate)

    def kill(self) -> None:
        self._stop(self.process.kill)

    def _stop(self, send: Any) -> None:
        if self.stopped_ns is None:
            self.stopped_ns = time.monotonic_ns()
        send()
