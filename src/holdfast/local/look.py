"""What a process has: descriptors and what they stand for, threads, children, limits, processors.

Of a process that has ended the kernel keeps limits and processors until it is reaped, and nothing else. So the keeper
looks at each worker now and then while it lives, and evidence of a death carries the last look, with its age.
"""

import errno
import itertools
import os
import resource
from collections import Counter
from dataclasses import dataclass

from holdfast.local import linux, procfs

# How often each worker is looked at. A look takes some 0.1 ms, and 20 us more for each thread.
LOOK_S = 5.0
SOON_S = 0.5
# Descriptors that make a look come early: a leak that ends a worker within seconds is then seen close to its end.
GROWN = 64
# Descriptors that are read one by one; of a leak any part shows what leaks.
_MOST_READ = 256
# Kinds of descriptors and children that are kept, and letters of a path: evidence goes over a socket as one message.
_MOST_PATHS = 32
_MOST_CHILDREN = 16
_MOST_THREADS = 64
_PATH = 200
_LIMITS = (
    "RLIMIT_AS",
    "RLIMIT_CORE",
    "RLIMIT_CPU",
    "RLIMIT_DATA",
    "RLIMIT_FSIZE",
    "RLIMIT_MEMLOCK",
    "RLIMIT_NOFILE",
    "RLIMIT_NPROC",
    "RLIMIT_STACK",
)


@dataclass(frozen=True, slots=True)
class Look:
    """What a living process had."""

    age_s: float = 0.0
    """How long before the incident that was."""
    descriptors: int = 0
    paths: tuple[tuple[str, int], ...] = ()
    """What its descriptors stand for, and how many for each; the most frequent first. Of many descriptors, a part."""
    threads: int = 0
    others: tuple[str, ...] = ()
    """Its threads but the main one: name and state."""
    children: tuple[tuple[int, str], ...] = ()
    """The processes it has started: pid, command line."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the kernel allows to one process."""

    limits: tuple[tuple[str, int | None, int | None], ...] = ()
    """Name, soft, hard; None is unlimited."""
    processors: tuple[int, ...] = ()
    """Those that it may run on."""

    def soft(self, name: str) -> int | None:
        return next((soft for limit, soft, _ in self.limits if limit == name), None)


def look_at(pid: int) -> Look | None:
    """Which process: the keeper, of a worker that lives. None when it is gone."""
    read = _descriptors(pid)
    if not read:
        return None
    return Look(
        descriptors=max(len(read), linux.descriptors(pid)),
        paths=tuple(Counter(read).most_common(_MOST_PATHS)),
        threads=procfs.threads(pid),
        others=procfs.other_threads(pid),
        children=procfs.children(pid, _MOST_THREADS)[:_MOST_CHILDREN],
    )


def _descriptors(pid: int) -> list[str]:
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            numbers = [int(entry.name) for entry in itertools.islice(entries, _MOST_READ)]
    except OSError:
        return []  # gone, or not ours to look at
    return [name[:_PATH] for number in numbers if (name := procfs.descriptor(pid, number))]


def bounds_of(pid: int) -> Bounds:
    """Which process: the keeper, of its child, which may have ended and not been reaped."""
    try:
        processors = tuple(sorted(os.sched_getaffinity(pid)))
        limits = tuple((name, *_limit(pid, name)) for name in _LIMITS)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EPERM):
            raise
        return Bounds()  # gone, or it has made itself another user's
    return Bounds(limits, processors)


def _limit(pid: int, name: str) -> tuple[int | None, int | None]:
    soft, hard = resource.prlimit(pid, getattr(resource, name))
    unlimited = resource.RLIM_INFINITY
    return None if soft == unlimited else soft, None if hard == unlimited else hard
