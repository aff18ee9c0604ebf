"""Somebody sent a signal."""

import signal

from holdfast.core.messages import Cause
from holdfast.diagnose.finding import Case, Finding
from holdfast.local.linux import signal_name


def keeper_lost(case: Case) -> Finding | None:
    """The keeper died, and its workers with it."""
    if case.cause is not Cause.KEEPER:
        return None
    return Finding(
        "keeper-lost",
        "the keeper, the process that looks after the workers, died; its workers end with it",
        ("the keeper's socket closed",),
        "look for what kills processes on this machine; nothing is lost by it",
    )


def killed(case: Case) -> Finding | None:
    """SIGKILL: cannot be caught, and does not say who sent it."""
    if case.cause is not Cause.SIGNAL or case.code != signal.SIGKILL:
        return None
    seen = ["exit by SIGKILL, which Holdfast did not send"]
    if case.evidence is not None and case.evidence.peak_bytes:
        seen.append(f"it had used up to {case.evidence.peak_bytes / 2**20:.0f} MiB")
    return Finding(
        "worker-killed",
        "something killed it: the kernel for memory, a scheduler, or a person",
        tuple(seen),
        "look at `dmesg | grep -i oom` and at the scheduler's log; fewer workers need less memory",
        "possible",
    )


def ended_by_signal(case: Case) -> Finding | None:
    """Any other signal that ended the process."""
    if case.cause is not Cause.SIGNAL:
        return None
    name = signal_name(case.code)
    return Finding(
        "worker-terminated",
        f"{name} ended it",
        (f"exit by {name}",),
        f"find who sends {name} to the processes of this job",
        "likely",
    )


def noted(case: Case) -> Finding | None:
    """A signal that the worker noted, and survived."""
    if case.what != "signal":
        return None
    name = signal_name(case.code)
    return Finding(
        "worker-signalled",
        f"worker {case.worker} was sent {name}; it noted that and went on",
        (f"{name} arrived in process {case.pid}",),
        "schedulers signal the whole process group before a time limit; the trainer decides what a stop means",
    )


RULES = (keeper_lost, killed, ended_by_signal, noted)
