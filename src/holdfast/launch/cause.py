"""Which failure is the cause? When one rank dies, the others soon report a broken connection, or Holdfast stops them.

Pure: the ends of all ranks come in, a verdict comes out. Each end has a time of its own. If the rank raised, it is the
time of the `raise`, which the rank noted. Else it is the time of the death, when the process's descriptor woke the
trainer. The order of these times is not enough: the trainer notices a death a moment after it happened, and a peer may
have raised by then. So an end that is plainly the echo of another one comes after all ends that are not. A rank that
Holdfast stopped is never the cause.
"""

import re
import signal
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from holdfast.diagnose.incident import Incident
from holdfast.errors import HoldfastError


class EndKind(IntEnum):
    """How a rank ended. Of two kinds the lower one is to blame."""

    FAILED = 0  # it crashed, was killed, exited or raised by itself
    BROKEN = 1  # one of its connections broke: to a peer, or to something else
    ECHO = 2  # gloo, NCCL or the store say that it lost a peer
    STOPPED = 3  # Holdfast stopped it, after another rank had failed
    DONE = 4


class RankEnd(NamedTuple):
    """One rank's end. `code` is multiprocessing's: negative for a signal."""

    rank: int
    at_ns: int
    code: int
    raised: str = ""
    """Type and text of the exception that it raised."""
    output: str = ""
    """The last lines that it printed."""
    stopped_ns: int | None = None
    """When Holdfast first sent it a signal."""


class RootCause(NamedTuple):
    """`cause`: None when no rank failed. `others`: the other ranks that ended badly, in the order of their ends."""

    cause: RankEnd | None
    others: tuple[tuple[RankEnd, EndKind], ...]


# What an error says when the other side of a connection has gone, or does not answer.
_GONE = re.compile(
    r"Connection (closed by|reset by|refused|aborted|was likely closed)|Broken pipe|Socket closed|"
    r"remote process exited|ncclRemoteError|remote server shutdown or crash|got 0 bytes|[Tt]imed out waiting \d+ms|"
    r"timeout after \d+ms|collective operation timeout|pair closure|[Cc]onnect timeout|"
    r"ConnectionResetError|BrokenPipeError|^EOFError",
)
# Which libraries say it when the other side is a rank.
_AMONG_RANKS = re.compile(r"\bgloo\b|NCCL|\bnccl|TCPStore|c10d|ProcessGroup|Dist(Backend|Network|Store)Error")
# Signals by which a process ends itself. Its last lines give the reason: an uncaught C++ exception of gloo or NCCL.
_ENDS_ITSELF = (signal.SIGABRT,)


def kind_of(end: RankEnd) -> EndKind:
    """The kind of one rank's end, seen without the others."""
    if end.code == 0 and not end.raised:
        return EndKind.DONE
    if end.stopped_ns is not None and end.at_ns >= end.stopped_ns:
        return EndKind.STOPPED
    if end.raised:
        return _kind_of_text(end.raised)
    if end.code > 0 or -end.code in _ENDS_ITSELF:
        return EndKind.ECHO if _kind_of_text(end.output) is EndKind.ECHO else EndKind.FAILED
    return EndKind.FAILED


def _kind_of_text(text: str) -> EndKind:
    if not _GONE.search(text):
        return EndKind.FAILED
    return EndKind.ECHO if _AMONG_RANKS.search(text) else EndKind.BROKEN


def judge(ends: Iterable[RankEnd]) -> RootCause:
    """The cause among the ends of all ranks of one attempt."""
    bad = sorted((kind_of(end), end.at_ns, end.rank, end) for end in ends if kind_of(end) is not EndKind.DONE)
    if not bad or bad[0][0] is EndKind.STOPPED:
        return RootCause(None, tuple(_by_time(bad)))
    return RootCause(bad[0][3], tuple(_by_time(bad[1:])))


def _by_time(bad: list[tuple[EndKind, int, int, RankEnd]]) -> list[tuple[RankEnd, EndKind]]:
    return [(end, kind) for kind, _, _, end in sorted(bad, key=lambda b: (b[1], b[2]))]


# What spawn raises: subclasses of torch's errors, so that handlers for those fire, with the finding in the text.
#
# The other errors stand in holdfast/errors.py. These do not, because that module does not import torch.


class RankExited(HoldfastError, ProcessExitedException):
    """A rank was killed, crashed or exited. `error_index` is the rank; `exit_code` is negative for a signal."""

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
