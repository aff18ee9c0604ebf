"""Thresholds: when a worker has taken so much that it should make room for a fresh one.

The keeper checks them on every tick. A worker that was asked to leave checks them once more before it leaves.

Memory means the growth of private pages since the worker was ready: a fork begins with all of its parent's pages, and
slots belong to the batches in them. At the soft threshold the keeper asks the worker to leave after its batch. At the
hard one it kills the worker. Usually the system refuses an allocation before that (RLIMIT_DATA, see system/linux.py),
and the worker reports that itself.
"""

import resource
from typing import NamedTuple

from holdfast.core.messages import Leave
from holdfast.system import linux, procfs
from holdfast.system.linux import MOST_DESCRIPTORS

SOFT = 0.8
# The hard threshold lies above the point where the system refuses allocations. Memory that was allocated before the
# worker was ready, and is written only later, counts as growth here, and does not count there.
HARD = 1.1
SLACK = 128 << 20
# To count copied pages in smaps takes milliseconds per 100 MB. That is worth it only if much was inherited.
COPY_LEAST = 256 << 20
COPY_LOOKS_S = (2.0, 10.0, 60.0, 300.0)


class Judgement(NamedTuple):
    """`leave`: ask it to go after its batch; `kill`: at once. `facts`: what was seen."""

    leave: Leave | None = None
    kill: bool = False
    facts: tuple[str, ...] = ()


FINE = Judgement()


class Thresholds:
    """The thresholds, the same for all workers of a keeper."""

    def __init__(self, growth_bytes: int | None) -> None:
        self._growth = growth_bytes
        # The limit that a worker has after it has raised its soft one.
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self._files = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)

    def judge(self, pid: int, grown: int, files: int) -> Judgement:
        if self._growth is not None and grown > HARD * self._growth + SLACK:
            return Judgement(kill=True, facts=(self._grown(grown),))
        if self._growth is not None and grown > SOFT * self._growth:
            return Judgement(Leave.MEMORY, facts=(self._grown(grown),))
        if files > SOFT * self._files:
            count, paths = procfs.open_files(pid)
            return Judgement(
                Leave.DESCRIPTORS,
                facts=(f"{count} descriptors open, the limit is {self._files}", f"open: {procfs.in_words(paths)}"),
            )
        return FINE

    def _grown(self, grown: int) -> str:
        assert self._growth is not None
        return f"grown by {grown >> 20} MiB since it was ready, of {self._growth >> 20} MiB"


class Copies:
    """How much inherited memory a fork has copied by writing to it. A change of a reference count is such a write.

    `inherited`: private memory of its parent; `own`: what it had beyond that when it was ready.
    """

    def __init__(self, pid: int, inherited: int, own: int, now: float) -> None:
        self._pid = pid
        self._inherited = inherited
        self._own = max(0, own)
        self._base = inherited + own
        self._looks = [now + wait for wait in COPY_LOOKS_S] if inherited >= COPY_LEAST else []

    def look(self, now: float, grown: int) -> int:
        """Bytes copied, if it is time to look and they are worth a report; else 0."""
        if not self._looks or now < self._looks[0]:
            return 0
        self._looks.pop(0)
        own = linux.own_bytes(self._pid)
        grown = max(grown, linux.memory_of(self._pid)[1] - self._base)  # it may have allocated while that was counted
        copied = own - grown - self._own
        if copied < max(COPY_LEAST, self._inherited // 4):
            return 0
        self._looks.clear()  # once is enough
        return copied
