"""Which failure is the cause? When one rank dies, the others soon report a broken connection, or are stopped by us.

Pure: ends in, verdict out. An end is told by its own time: that of the `raise`, which the rank itself noted, else that
of the death, when the process's descriptor woke us. Order alone does not do: a death is noticed a moment after it
happened, and by then a peer may already have raised. So what is plainly the echo of somebody else's end comes after
what is not, and what we stopped ourselves is never the cause.
"""

import re
import signal
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from holdfast.diagnose.report import Incident
from holdfast.errors import HoldfastError


class How(IntEnum):
    """How a rank ended; the order is that of blame."""

    FAILED = 0  # crashed, was killed, exited or raised by itself
    BROKEN = 1  # a connection of its own broke: to a peer, or to anybody
    ECHO = 2  # gloo, NCCL or the store say that it lost a peer
    STOPPED = 3  # by us, after somebody else had failed
    DONE = 4


class RankEnd(NamedTuple):
    """One rank's end. `code` as multiprocessing has it: negative for a signal."""

    rank: int
    at_ns: int
    code: int
    said: str = ""
    """Type and text of the exception that it raised."""
    output: str = ""
    """Its last lines."""
    stopped_ns: int | None = None
    """When we first sent it a signal."""


class RootCause(NamedTuple):
    """`cause`: None when no rank failed. `others`: the ranks that ended badly, in the order of their ends."""

    cause: RankEnd | None
    others: tuple[tuple[RankEnd, How], ...]


# What is said when the other side of a connection has gone, or does not answer.
_GONE = re.compile(
    r"Connection (closed by|reset by|refused|aborted|was likely closed)|Broken pipe|Socket closed|"
    r"remote process exited|ncclRemoteError|remote server shutdown or crash|got 0 bytes|[Tt]imed out waiting \d+ms|"
    r"timeout after \d+ms|collective operation timeout|pair closure|[Cc]onnect timeout|"
    r"ConnectionResetError|BrokenPipeError|^EOFError",
)
# Who says it: then the other side is a rank.
_AMONG_RANKS = re.compile(r"\bgloo\b|NCCL|\bnccl|TCPStore|c10d|ProcessGroup|Dist(Backend|Network|Store)Error")
# Signals by which a process ends itself, its last lines being the reason: an uncaught C++ exception of gloo or NCCL.
_ENDS_ITSELF = (signal.SIGABRT,)


def how(end: RankEnd) -> How:
    """Of one rank, seen alone."""
    if end.code == 0 and not end.said:
        return How.DONE
    if end.stopped_ns is not None and end.at_ns >= end.stopped_ns:
        return How.STOPPED
    if end.said:
        return _of_words(end.said)
    if end.code > 0 or -end.code in _ENDS_ITSELF:
        return How.ECHO if _of_words(end.output) is How.ECHO else How.FAILED
    return How.FAILED


def _of_words(text: str) -> How:
    if not _GONE.search(text):
        return How.FAILED
    return How.ECHO if _AMONG_RANKS.search(text) else How.BROKEN


def judge(ends: Iterable[RankEnd]) -> RootCause:
    """The cause among the ends of all ranks of one attempt."""
    bad = sorted((how(end), end.at_ns, end.rank, end) for end in ends if how(end) is not How.DONE)
    if not bad or bad[0][0] is How.STOPPED:
        return RootCause(None, tuple(_by_time(bad)))
    return RootCause(bad[0][3], tuple(_by_time(bad[1:])))


def _by_time(bad: list[tuple[How, int, int, RankEnd]]) -> list[tuple[RankEnd, How]]:
    return [(end, kind) for kind, _, _, end in sorted(bad, key=lambda b: (b[1], b[2]))]


# What spawn raises: torch's own errors, so that handlers for those fire, with the finding in the text.
#
# Here and not in holdfast/errors.py, where the rest of the tree stands, because their other base is torch's.


class RankExited(HoldfastError, ProcessExitedException):
    """A rank was killed, crashed or exited: `error_index` is the rank, `exit_code` negative for a signal."""

    def __init__(
        self,
        message: str,
        error_index: int = 0,
        error_pid: int = 0,
        exit_code: int = 0,
        signal_name: str | None = None,
        incident: Incident | None = None,
    ) -> None:
        ProcessExitedException.__init__(self, message, error_index, error_pid, exit_code, signal_name)
        self.error_pid = error_pid  # older torch calls it pid
        self.incident = incident

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.msg, self.error_index, self.error_pid, self.exit_code, self.signal_name, self.incident)
        return type(self), fields


class RankRaised(HoldfastError, ProcessRaisedException):
    """A rank raised. The text ends with its traceback; the exception itself is the `__cause__`."""

    def __init__(
        self, message: str, error_index: int = 0, error_pid: int = 0, incident: Incident | None = None
    ) -> None:
        ProcessRaisedException.__init__(self, message, error_index, error_pid)
        self.error_pid = error_pid  # older torch calls it pid
        self.incident = incident

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.msg, self.error_index, self.error_pid, self.incident)
