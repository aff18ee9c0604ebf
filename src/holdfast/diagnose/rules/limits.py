"""Something ran out that has a limit: descriptors, processes, threads, space."""

import errno
import os
import re

from holdfast.core.messages import Cause, Leave, What
from holdfast.diagnose.finding import Case, Finding
from holdfast.system.evidence import Sign


def cannot_fork(case: Case) -> Finding | None:
    """The process could not be made: fork() itself failed, for seconds; or its descriptors did not arrive."""
    evidence = case.evidence
    if evidence is None or not evidence.fork_errno:
        return None
    what = f"{errno.errorcode.get(evidence.fork_errno, evidence.fork_errno)} ({os.strerror(evidence.fork_errno)})"
    if evidence.fork_errno in (errno.EMFILE, errno.ENFILE):
        return Finding(
            "descriptors-exhausted",
            f"a worker could not have its descriptors: {what}",
            evidence.limits,
            "a higher limit (`ulimit -n`, docker run --ulimit nofile=65536:65536), or fewer workers and open files",
        )
    return Finding(
        "cannot-start-process",
        f"the system refused a new process: {what}",
        (f"fork failed with {what}", *evidence.limits),
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
    if case.worker_memory is not None and Sign.STACK_REFUSED in raised.signs:
        return Finding(
            "allocation-refused",
            "a thread could not be started: its stack does not fit into Policy(worker_memory=...)",
            raised.facts,
            "raise worker_memory, or start fewer threads in a sample",
        )
    return Finding(
        "cannot-start-process",
        f"the system refused a new process or thread: {raised.type_name}: {raised.text}",
        raised.facts,
        "fewer workers or threads (OMP_NUM_THREADS=1), or a higher limit: `ulimit -u`, the cgroup's pids.max",
        "likely",
    )


def processes_refused(case: Case) -> Finding | None:
    """A sample was refused a thread or a process, and its worker made room."""
    if case.evidence is None or case.cause is not Cause.RECYCLED or case.code != Leave.PROCESSES:
        return None
    return Finding(
        "cannot-start-process",
        "the system refused a new process or thread to a sample",
        case.evidence.facts,
        "fewer workers or threads (OMP_NUM_THREADS=1), or a higher limit: `ulimit -u`, the cgroup's pids.max",
        "likely",
    )


def descriptors_grown(case: Case) -> Finding | None:
    """It made room for a fresh one before the limit, or when it was refused a file."""
    if case.evidence is None or case.cause is not Cause.RECYCLED or case.code != Leave.DESCRIPTORS:
        return None
    return Finding(
        "descriptors-exhausted",
        "the dataset opens more files than it closes; with a fresh worker nothing is lost",
        (*case.evidence.facts, f"{case.evidence.samples} samples loaded since the worker was ready"),
        "close them (`with open(...)`; PIL: Image.open(...).load()); holdfast.FileCache keeps a bounded number open",
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
    if Sign.SHM_FULL in case.raised.signs:
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


def over_quota(case: Case) -> Finding | None:
    """EDQUOT: the disk has room, but not for this user, group or project."""
    if case.raised is None or case.raised.errno != errno.EDQUOT:
        return None
    return Finding(
        "quota-exceeded",
        f"the quota of this user, group or project is used up: {case.raised.text}",
        case.raised.facts,
        "`quota -s` (Lustre: lfs quota -u $USER PATH) shows it; remove files, or let TMPDIR point elsewhere",
    )


def memory_not_locked(case: Case) -> Finding | None:
    """CUDA would not register shared memory."""
    raised = case.raised
    if case.what is not What.UNPINNED or raised is None:
        return None
    return Finding(
        "memory-not-locked",
        f"CUDA refused to lock memory: {raised.text}",
        raised.facts,
        "more memory for the job or fewer workers; a higher limit on locked memory (`ulimit -l unlimited`, docker run "
        "--ulimit memlock=-1)",
        "likely",
    )


RULES = (
    memory_not_locked,
    cannot_fork,
    processes_refused,
    descriptors_grown,
    descriptors,
    no_space,
    over_quota,
    cannot_start_thread,
)
