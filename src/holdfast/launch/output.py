"""What ranks print: shown live with the rank in front, kept in files, and the last lines kept for the error.

A thread of its own reads, so that a terminal which does not take more holds up the printing ranks, as it would without
us, and never the watch over them. Memory is bounded: a few lines per rank.
"""

import os
import re
import select
import sys
import threading
from collections import deque
from pathlib import Path
from typing import IO

from holdfast.local.private import open_to_append

# Lines of a rank that an error shows, and letters of each.
KEPT_LINES = 20
KEPT_LETTERS = 400
# A line that goes on longer than this is shown in pieces.
LONGEST = 16 << 10
CHUNK = 64 << 10
# How long the last output may take to be written somewhere.
FAREWELL_S = 5.0
_LINE = re.compile(rb"[^\n\r]*(?:\r\n|\n|\r)")


class _Stream:
    """One rank's stdout or stderr, the trainer's end."""

    def __init__(self, rank: int, number: int, fd: int) -> None:
        self.rank = rank
        self.number = number
        self.fd = fd
        self.pending = b""


class Output:
    """That of all ranks of one attempt. `prefixed`: with "[rank 3] " before each line."""

    def __init__(self, nprocs: int, attempt: int, log_dir: str | os.PathLike[str] | None, prefixed: bool) -> None:
        self._prefixed = prefixed
        self._tails: list[deque[str]] = [deque(maxlen=KEPT_LINES) for _ in range(nprocs)]
        self.files: list[Path | None] = [None] * nprocs
        self._open: list[IO[bytes] | None] = [None] * nprocs
        if log_dir is not None:
            self.files = [Path(log_dir) / f"rank-{rank}-attempt-{attempt}.log" for rank in range(nprocs)]
            self._open = [os.fdopen(open_to_append(path), "ab") for path in self.files if path is not None]
        self._notes: dict[int, str] = {}
        self._streams: dict[int, _Stream] = {}
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="holdfast-output", daemon=True)

    def pipes(self, rank: int) -> tuple[int, int]:
        """The rank's ends of new pipes for its stdout and stderr: the caller closes them once it has started."""
        ends = []
        for number in (1, 2):
            mine, ranks = os.pipe()
            os.set_blocking(mine, False)
            self._streams[mine] = _Stream(rank, number, mine)
            ends.append(ranks)
        return ends[0], ends[1]

    def start(self) -> None:
        self._thread.start()

    def tail(self, rank: int) -> tuple[str, ...]:
        return tuple(self._tails[rank])

    def note(self, rank: int, text: str) -> None:
        """At the end of the rank's file alone: a traceback that the error shows anyway."""
        self._notes[rank] = text

    @property
    def fds(self) -> list[int]:
        """The trainer's: a fork of it closes them."""
        files = [file.fileno() for file in self._open if file is not None and not file.closed]
        return [*self._streams, self._wake, self._waker, *files] if self._wake >= 0 else []

    def finish(self) -> None:
        """All ranks have ended: what they printed is read to its end, and everything closed."""
        if self._thread.ident is not None:
            os.write(self._waker, b".")
            self._thread.join(FAREWELL_S)
        if not self._thread.is_alive():
            self.close()

    def close(self) -> None:
        """Nothing more is read."""
        fds = [*self._streams, self._wake, self._waker]
        self._wake = self._waker = -1  # first: a forked child closes what it finds here
        self._streams.clear()
        for fd in fds:
            os.close(fd)
        for rank, file in enumerate(self._open):
            if file is not None:
                file.write(self._notes.get(rank, "").encode(errors="backslashreplace"))
                file.close()

    # The thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for fd in self._streams:
            poll.register(fd, select.POLLIN)
        over = False
        while not over:
            for fd, _ in poll.poll():
                if fd == self._wake:
                    over = True
                elif not self._read(self._streams[fd]):
                    poll.unregister(fd)
        for stream in self._streams.values():
            while self._read(stream):  # what is in the pipe; children of a rank may hold it open for ever
                pass
            self._take(stream, stream.pending)

    def _read(self, stream: _Stream) -> bool:
        """One piece; False when there is none."""
        try:
            data = os.read(stream.fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            return False
        file = self._open[stream.rank]
        if file is not None:
            file.write(data)
            file.flush()
        text = stream.pending + data
        whole = text if len(text) > LONGEST else text[: max(text.rfind(b"\n"), text.rfind(b"\r")) + 1]
        stream.pending = text[len(whole) :]
        self._take(stream, whole)
        return True

    def _take(self, stream: _Stream, text: bytes) -> None:
        if not text:
            return
        lines = _LINE.findall(text if text.endswith((b"\n", b"\r")) else text + b"\n")
        shown = []
        for line in lines:
            words = line.decode(errors="replace")
            if words.strip():
                self._tails[stream.rank].append(words.rstrip()[:KEPT_LETTERS])
            shown.append(f"[rank {stream.rank}] {words}" if self._prefixed else words)
        self._show(getattr(sys, "stdout" if stream.number == 1 else "stderr", None), "".join(shown))

    def _show(self, to: IO[str] | None, text: str) -> None:
        if to is None:
            return
        try:
            to.write(text)
            to.flush()
        except Exception:  # user code: what the trainer has put in its place, or it is closed
            pass  # files and errors still have it; the ranks would wait for ever for a thread that is gone
