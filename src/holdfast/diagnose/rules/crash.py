"""The worker ended itself: a fatal signal of its own making, or an exit."""

import signal

from holdfast.core.inquest import OWN_FAULT
from holdfast.core.messages import Cause, What
from holdfast.diagnose.finding import Case, Confidence, Finding
from holdfast.system.evidence import Evidence
from holdfast.system.linux import signal_name

# The worker never came up.


def boot_raised(case: Case) -> Finding | None:
    """Unpickling the dataset, or worker_init_fn."""
    if case.what is not What.BOOT or case.raised is None:
        return None
    return Finding(
        "worker-init-raised",
        f"worker {case.worker} could not start: {case.raised.type_name}: {case.raised.text}",
        ("the exception came before the worker was ready", *case.raised.facts),
        "look at the initializer; see the traceback"
        if case.of_pool
        else "look at worker_init_fn and at what unpickling the dataset does; see the traceback",
    )


STARTUP = (boot_raised,)


# Where native code crashed: the stack says which.
CRASH_ADVICE = (
    "the last Python line of the stack called the library that crashed; "
    'Policy(bad_sample="skip") goes on without such samples'
)
# signal -> (finding, what it means)
_CRASHES = {
    signal.SIGSEGV: ("worker-segfault", "native code touched memory that is not its own"),
    signal.SIGABRT: (
        "worker-aborted",
        "native code called abort(): a failed assertion, a corrupted heap, or an uncaught C++ exception",
    ),
    signal.SIGBUS: ("worker-bus-error", "memory behind a mapping was gone"),
    signal.SIGFPE: ("worker-arithmetic-fault", "native code divided an integer by zero"),
    signal.SIGILL: ("worker-illegal-instruction", "native code was built for another processor"),
}
_ALMOST_NONE = 1 << 20


def sent(case: Case) -> Finding | None:
    """A signal that programs raise against themselves, but somebody else sent this one."""
    sender = case.evidence.sender if case.evidence is not None else None
    if case.cause is not Cause.SIGNAL or case.code not in OWN_FAULT or sender is None or sender.pid == case.pid:
        return None
    name = signal_name(case.code)
    return Finding(
        "worker-terminated",
        f"{name} was sent to it from outside: no crash of its own",
        (f"{name} sent by {sender}",),
        "find out why that process signals the processes of this job (a watchdog, gdb, timeout -s?)",
    )


def crashed(case: Case) -> Finding | None:
    """A fatal signal that a program raises against itself."""
    if case.cause is not Cause.SIGNAL or case.code not in OWN_FAULT:
        return None
    number = signal.Signals(case.code)
    name, means = _CRASHES.get(number, ("worker-terminated", "native code crashed"))
    seen = [f"exit by {signal_name(case.code)}"]
    advice = CRASH_ADVICE
    confidence: Confidence = "certain"
    evidence = case.evidence
    if evidence is not None and evidence.stack:
        seen.append("the Python stack at the crash, below")
    if number == signal.SIGBUS:
        means, facts, advice, confidence = _bus_error(evidence or Evidence(pid=0), advice)
        seen += facts
    return Finding(name, f"{signal_name(case.code)}: {means}", tuple(seen), advice, confidence)


def _bus_error(evidence: Evidence, advice: str) -> tuple[str, list[str], str, Confidence]:
    """(what it means, what was seen, what to do, how sure): which mapping was it?"""
    fault = evidence.fault
    seen = []
    if fault is not None:
        size = f", which has {fault.size} bytes now" if fault.size >= 0 else ""
        seen.append(f"it touched byte {fault.at} of {fault.path}{size}")
        if fault.cut_short:
            return f"the mapped file was cut short: {fault.path}", seen, advice, "certain"
    in_shm = fault is None or fault.path.startswith("/dev/shm/")
    if in_shm and 0 <= evidence.shm_free < _ALMOST_NONE:
        seen.append(f"{evidence.shm_free} bytes free in /dev/shm")
        means = "memory behind a mapping was gone: /dev/shm is full (of what the dataset put there; Holdfast does not)"
        more = "give the container a larger one: docker run --shm-size=8g, or an emptyDir of medium Memory"
        return means, seen, more, "certain" if fault is not None else "likely"
    means = "memory behind a mapping was gone: the mapped file was cut short, or its disk or server failed"
    return means, seen, advice, "likely"


def exited(case: Case) -> Finding | None:
    """The process called exit by itself."""
    if case.cause is not Cause.EXIT or (case.evidence is not None and case.evidence.fork_errno):
        return None
    return Finding(
        "worker-exited",
        f"something in the worker ended the process with exit code {case.code}",
        (f"exit code {case.code}, no signal",),
        "look for os._exit, or a native library that calls exit(), in what "
        + ("this task calls" if case.of_pool else "the dataset uses"),
    )


RULES = (sent, crashed, exited)
