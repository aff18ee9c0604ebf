"""Limits that a worker sets for itself, once it is up."""

import errno
import resource
import traceback
from contextlib import suppress

from holdfast.core.messages import Leave
from holdfast.local import linux

# More than this many open files is a leak, and a table that large costs at each fork.
MOST_DESCRIPTORS = 65_536


def raise_descriptor_limit() -> None:
    """The soft limit on open files goes up to the hard one, if the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit_growth(size: int) -> None:
    """An allocation fails, in Python with its line, once this process has `size` bytes more than now."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = linux.data_bytes() + size
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


# Room that a new thread needs for its stack, as far as RLIMIT_DATA is concerned.
_THREAD = 16 << 20
# A worker that holds on to less than this, or than this share of what it may grow by: the sample alone asks too much.
_KEPT = 64 << 20
_SHARE = 0.25


def refused(error: BaseException, growth_bytes: int | None, base: int) -> Leave | None:
    """What the system refused to this process, if a fresh one might get it. Which process: the worker, which had
    `base` private bytes when it was ready.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        return Leave.DESCRIPTORS
    thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    if isinstance(error, MemoryError) or number == errno.ENOMEM or "can't allocate memory" in str(error)[:200]:
        return Leave.MEMORY if _keeps(error, growth_bytes, base) else None
    if thread or (number == errno.EAGAIN and _was_starting(error)):
        if growth_bytes is not None and _left() < _THREAD:
            return Leave.MEMORY
        return Leave.PROCESSES
    return None


def _was_starting(error: BaseException) -> bool:
    """EAGAIN has other meanings, too: a socket or a pipe that does not block."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and any(word in f"{frames[-1].name} {frames[-1].line}" for word in ("fork", "_execute_child"))


def _left() -> int:
    """Bytes that may still be allocated."""
    return resource.getrlimit(resource.RLIMIT_DATA)[0] - linux.data_bytes()


def _keeps(error: BaseException, growth_bytes: int | None, base: int) -> bool:
    """True when much was kept from earlier samples. What this one had is let go of first."""
    traceback.clear_frames(error.__traceback__)
    return linux.memory_of()[1] - base > max(_KEPT, _SHARE * (growth_bytes or 0))
