"""The worker ended itself: a fatal signal of its own making, or an exit."""

import signal

from holdfast.core.ledger import OWN_FAULT
from holdfast.core.messages import Cause
from holdfast.diagnose.finding import Case, Finding
from holdfast.local.linux import signal_name

_MEANS = {
    signal.SIGSEGV: "native code touched memory that is not its own",
    signal.SIGABRT: "native code called abort(): a failed assertion, a corrupted heap, or an uncaught C++ exception",
    signal.SIGBUS: "memory behind a mapping was gone: a mapped file was truncated, or its file system is full",
    signal.SIGFPE: "native code divided an integer by zero",
    signal.SIGILL: "native code was built for another CPU",
}


def crashed(case: Case) -> Finding | None:
    """A fatal signal that a program raises against itself."""
    if case.cause is not Cause.SIGNAL or case.code not in OWN_FAULT:
        return None
    name = signal_name(case.code)
    means = _MEANS.get(signal.Signals(case.code), "native code crashed")
    seen = [f"exit by {name}"]
    if case.evidence is not None and case.evidence.stack:
        seen.append("the Python stack at the crash, below")
    return Finding(
        "worker-crashed",
        f"{name}: {means}",
        tuple(seen),
        "look at the last Python line of the stack: it called the library that crashed; "
        'Policy(bad_sample="skip") goes on without such samples',
    )


def exited(case: Case) -> Finding | None:
    """The process called exit by itself."""
    if case.cause is not Cause.EXIT:
        return None
    if case.evidence is not None and case.evidence.fork_errno:
        return None
    return Finding(
        "worker-exited",
        f"something in the worker ended the process with exit code {case.code}",
        (f"exit code {case.code}, no signal",),
        "look for os._exit, or a native library that calls exit(), in what the dataset uses",
    )


RULES = (crashed, exited)
