"""The worker says nothing any more."""

from holdfast.core.messages import Cause, Stage
from holdfast.diagnose.finding import Case, Finding


def _seen(case: Case) -> tuple[str, ...]:
    seen = [f"no sign of life for {case.seconds:.1f} s in stage {_stage(case)}"]
    if case.evidence is not None:
        if case.evidence.state == "T":
            seen.append("the process is stopped (SIGSTOP, Ctrl-Z, a debugger)")
        elif case.evidence.state == "D":
            seen.append("the kernel has it in an uninterruptible wait: disk or network file system")
        if case.evidence.stack:
            seen.append("its Python stack at that moment, below")
    return tuple(seen)


def _stage(case: Case) -> str:
    return (case.stage or Stage.IDLE).name.lower()


def past_deadline(case: Case) -> Finding | None:
    """We killed it for `sample_timeout`."""
    if case.cause is not Cause.DEADLINE:
        return None
    stopped = case.evidence is not None and case.evidence.state == "T"
    if stopped:
        return Finding(
            "worker-stopped",
            "the worker had been stopped from outside and did not go on",
            _seen(case),
            "find who sent SIGSTOP; a stopped worker holds its sample for ever",
        )
    return Finding(
        "sample-hung",
        f"it took longer than sample_timeout={case.sample_timeout:g} s, and was killed for it",
        _seen(case),
        "the last line of the stack is where it waits: give that call a timeout of its own, "
        "or raise Policy(sample_timeout=...) if it is only slow",
    )


def silent(case: Case) -> Finding | None:
    """No deadline is set, and nothing has been heard for long."""
    if case.what != "silent":
        return None
    return Finding(
        "worker-silent",
        f"worker {case.worker} has said nothing for {case.code} s; it was left alone",
        _seen(case),
        "set Policy(sample_timeout=seconds) to have such a worker killed and its sample tried again",
        "possible",
    )


RULES = (past_deadline, silent)
