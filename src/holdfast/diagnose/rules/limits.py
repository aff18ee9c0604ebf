"""Something ran out that has a limit: descriptors, processes, threads, space."""

import errno
import os
import re

from holdfast.diagnose.finding import Case, Finding


def cannot_fork(case: Case) -> Finding | None:
    """fork() itself failed, for seconds."""
    evidence = case.evidence
    if evidence is None or not evidence.fork_errno:
        return None
    what = f"{errno.errorcode.get(evidence.fork_errno, evidence.fork_errno)} ({os.strerror(evidence.fork_errno)})"
    return Finding(
        "cannot-start-process",
        f"the system refused a new process: {what}",
        (f"fork failed with {what} for several seconds", *evidence.limits),
        "fewer workers, or a higher limit: `ulimit -u`, the cgroup's pids.max",
    )


def cannot_start_thread(case: Case) -> Finding | None:
    """EAGAIN: a limit on processes and threads, not on descriptors."""
    raised = case.raised
    if raised is None:
        return None
    starting = raised.errno == errno.EAGAIN and re.search(r"fork|start_new_thread|_execute_child", raised.traceback)
    if not starting and "can't start new thread" not in raised.text:
        return None
    return Finding(
        "cannot-start-process",
        f"the system refused a new process or thread: {raised.type_name}: {raised.text}",
        raised.facts,
        "fewer workers or threads (OMP_NUM_THREADS=1), or a higher limit: `ulimit -u`, the cgroup's pids.max",
        "likely",
    )


def descriptors(case: Case) -> Finding | None:
    """EMFILE, ENFILE: too many open files in the worker."""
    if case.raised is None or case.raised.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    return Finding(
        "descriptors-exhausted",
        "the dataset has opened more files than it closed, up to the limit",
        case.raised.facts,
        "close them (`with open(...)`; PIL: Image.open(...).load()), or raise `ulimit -n`",
    )


def no_space(case: Case) -> Finding | None:
    """ENOSPC: on which file system?"""
    if case.raised is None or case.raised.errno != errno.ENOSPC:
        return None
    full = case.raised.facts
    if full and full[0].startswith("/dev/shm"):
        return Finding(
            "shm-too-small",
            "/dev/shm is full of what the dataset put there (Holdfast does not use it)",
            full,
            "docker run --shm-size=8g, or a cache elsewhere than in shared memory",
        )
    return Finding(
        "disk-full",
        f"no space left where the dataset writes: {case.raised.text}",
        full,
        "free some space there, or let TMPDIR point elsewhere",
        "certain" if full else "likely",
    )


def memory_not_locked(case: Case) -> Finding | None:
    """CUDA would not register shared memory."""
    raised = case.raised
    if case.what != "unpinned" or raised is None:
        return None
    return Finding(
        "memory-not-locked",
        f"CUDA refused to lock memory: {raised.text}",
        raised.facts,
        "more memory for the job or fewer workers; a higher limit on locked memory (`ulimit -l unlimited`, docker run "
        "--ulimit memlock=-1)",
        "likely",
    )


RULES = (memory_not_locked, cannot_fork, descriptors, no_space, cannot_start_thread)
