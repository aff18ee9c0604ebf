"""The worker never came up."""

import errno
import os

from holdfast.diagnose.finding import Case, Finding


def cannot_fork(case: Case) -> Finding | None:
    """fork() itself failed."""
    number = case.evidence.fork_errno if case.evidence is not None else 0
    if not number:
        return None
    what = f"{errno.errorcode.get(number, number)} ({os.strerror(number)})"
    return Finding(
        "cannot-start-process",
        f"the system refused a new process: {what}",
        (f"fork failed with {what} for several seconds",),
        "look at `ulimit -u` and the cgroup's pids.max; fewer workers need fewer processes",
    )


def boot_raised(case: Case) -> Finding | None:
    """Unpickling the dataset, or worker_init_fn."""
    if case.what != "boot" or case.raised is None:
        return None
    return Finding(
        "worker-init-raised",
        f"worker {case.worker} could not start: {case.raised.type_name}: {case.raised.text}",
        ("the exception came before the worker was ready",),
        "look at worker_init_fn and at what unpickling the dataset does; see the traceback",
    )


RULES = (cannot_fork, boot_raised)
