"""What ranks print: shown live with the rank in front, kept in files, and the last lines kept for the error.

A thread of its own reads it. So a terminal that takes no more text holds up the ranks that print, as it would without
Holdfast, and never the thread that watches them. Memory is bounded: a few lines per rank.
"""

import os
import re
import select
import sys
import threading
from collections import deque
from pathlib import Path
from typing import IO

from holdfast.system.run_files import open_to_append

# How many lines of a rank an error shows, and how many letters of each.
KEPT_LINES = 20
KEPT_LETTERS = 400
# A line of more bytes than this is shown in pieces.
LONGEST = 16 << 10
CHUNK = 64 << 10
# How long the thread may take to write the last output.
FAREWELL_S = 5.0
_LINE = re.compile(rb"[^\n\r]*(?:\r\n|\n|\r)")


class _Stream:
    """One rank's stdout or stderr, the trainer's end."""

    def __init__(self, rank: int, number: int, fd: int) -> None:
        self.rank = rank
        self.number = number
        self.fd = fd
        self.pending = b""


class RankOutput:
    """What all ranks of one attempt print. `prefixed`: "[rank 3] " stands before each line. Call `open` first."""

    def __init__(self, nprocs: int, attempt: int, log_dir: str | os.PathLike[str] | None, prefixed: bool) -> None:
        self._prefixed = prefixed
        self._tails: list[deque[str]] = [deque(maxlen=KEPT_LINES) for _ in range(nprocs)]
        self.files: list[Path | None] = [None] * nprocs
        self._open: list[IO[bytes] | None] = [None] * nprocs
        if log_dir is not None:
            self.files = [Path(log_dir) / f"rank-{rank}-attempt-{attempt}.log" for rank in range(nprocs)]
        self._notes: dict[int, str] = {}
        self._streams: dict[int, _Stream] = {}
        self._wake_pipe: list[int] = []  # a pipe: a byte in it ends the thread
        self._thread = threading.Thread(target=self._run, name="holdfast-output", daemon=True)

    def open(self) -> None:
        """`close` undoes this, also if it failed half-way."""
        self._wake_pipe += os.pipe()
        for rank, path in enumerate(self.files):
            if path is not None:
                self._open[rank] = os.fdopen(open_to_append(path), "ab")

    def pipes(self, rank: int, theirs: list[int]) -> None:
        """New pipes for the rank's stdout and stderr. The rank's ends are added to `theirs`; the caller closes them."""
        for number in (1, 2):
            theirs += os.pipe()
            os.set_blocking(theirs[-2], False)
            self._streams[theirs.pop(-2)] = _Stream(rank, number, theirs[-2])

    def start(self) -> None:
        self._thread.start()

    def tail(self, rank: int) -> tuple[str, ...]:
        return tuple(self._tails[rank])

    def note(self, rank: int, text: str) -> None:
        """Add this text to the end of the rank's file, and show it nowhere: a traceback, which the error shows."""
        self._notes[rank] = text

    @property
    def fds(self) -> list[int]:
        """The trainer's descriptors: a fork of the trainer closes them."""
        files = [file.fileno() for file in self._open if file is not None and not file.closed]
        return [*self._streams, *self._wake_pipe, *files]

    def finish(self) -> None:
        """All ranks have ended: read what they printed to its end, and close everything."""
        if self._thread.ident is not None and self._wake_pipe:
            os.write(self._wake_pipe[1], b".")
            self._thread.join(FAREWELL_S)
        if not self._thread.is_alive():
            self.close()

    def close(self) -> None:
        """Close everything, and read no more."""
        while self._streams:
            os.close(self._streams.popitem()[0])
        while self._wake_pipe:
            os.close(self._wake_pipe.pop())
        for rank, file in enumerate(self._open):
            if file is not None and not file.closed:
                file.write(self._notes.get(rank, "").encode(errors="backslashreplace"))
                file.close()

    # The thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        wake = self._wake_pipe[0]
        poll.register(wake, select.POLLIN)
        for fd in self._streams:
            poll.register(fd, select.POLLIN)
        over = False
        while not over:
            for fd, _ in poll.poll():
                if fd == wake:
                    over = True
                elif not self._read(self._streams[fd]):
                    poll.unregister(fd)
        for stream in self._streams.values():
            while self._read(stream):  # only what is in the pipe: a rank's children may hold it open for ever
                pass
            self._take(stream, stream.pending)

    def _read(self, stream: _Stream) -> bool:
        """Read one piece; False when there is none."""
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
        except Exception:  # user code: the trainer has put another object in its place, or closed it
            pass  # files and errors still have the text; and if this thread ended, ranks that print would hang
