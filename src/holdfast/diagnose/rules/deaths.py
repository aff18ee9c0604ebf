"""A process ended, or was sent a signal: by itself, or by somebody else? Who, and why?"""

import re
import signal

from holdfast.core.inquest import OWN_FAULT
from holdfast.core.messages import Cause, Did, Suspicion, What
from holdfast.diagnose.finding import TRAINER, Case, Confidence, Finding
from holdfast.diagnose.rules.resources import machine_memory, memory_seen
from holdfast.system.evidence import Evidence
from holdfast.system.linux import signal_name
from holdfast.system.signal_origin import Sender

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


# The worker ended itself: a fatal signal of its own making, or an exit.


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


# Somebody sent a signal.


# What schedulers' programs are called: pattern of the command line, name, where to look.
_SCHEDULERS = (
    (re.compile(r"^\S*slurm(step)?d\b"), "Slurm", "sacct -j $SLURM_JOB_ID shows why; #SBATCH --time, --mem"),
    (re.compile(r"^\S*java\b.* org\.apache\.spark\.\S+"), "Spark", "the executor's log shows why"),
    (re.compile(r"^\S*java\b.*\.NodeManager\b|^\S*container-executor\b"), "YARN", "yarn logs -applicationId shows why"),
    (
        re.compile(r"^\S*(containerd-shim|kubelet|runc|dockerd|conmon)\b"),
        "the container runtime",
        "kubectl describe pod",
    ),
    (re.compile(r"^\S*/raylet\b"), "Ray", "ray logs, and `ray memory`, show why"),
    (
        re.compile(r"^\S*python\S* (\S*/torchrun\b|-m torch\.distributed\.)"),
        "torchrun",
        "its log names the first to fail",
    ),
    (re.compile(r"^\S*java\b"), "a JVM", "the log of that JVM shows why it ends its children"),
)


def keeper_lost(case: Case) -> Finding | None:
    """The keeper died, and its workers with it."""
    if case.cause is not Cause.KEEPER:
        return None
    return Finding(
        "keeper-lost",
        "the keeper, the process that looks after the workers, died; its workers end with it",
        ("the keeper's socket closed",),
        "look for what kills processes on this machine; "
        + ("submit_with(..., retries=1) runs a task once more" if case.of_pool else "nothing is lost by it"),
    )


def killed(case: Case) -> Finding | None:
    """SIGKILL does not say who sent it. Holdfast did not, and no counter shows a kill for memory."""
    evidence = case.evidence
    if evidence is None or case.cause is not Cause.SIGNAL or case.code != signal.SIGKILL:
        return None
    seen = ("exit by SIGKILL, which Holdfast did not send", *memory_seen(evidence), *_around(evidence))
    not_for_memory, counted = _by_the_counters(evidence)
    given_up = case.needed and case.strike >= case.needed and case.done is not Did.SENT_AGAIN
    if given_up or _points_at_the_sample(case.suspicion):
        return _poison(case, (*seen, *counted), not_for_memory)
    itself = "the task itself" if case.of_pool else "the sample's own code"
    if not not_for_memory:
        return Finding(
            "worker-killed",
            f"something killed it, who is unknown: the kernel for memory, a scheduler, a person, or {itself}",
            (*seen, *counted),
            "look at `dmesg | grep -i oom` and at the scheduler's log",
            "possible",
        )
    return Finding(
        "worker-killed",
        f"something killed it, and not the kernel for memory; who is unknown: a scheduler, a person, or {itself}",
        (*seen, *counted),
        "look at the scheduler's log, and for whoever runs kill -9 or pkill here",
        "likely",
    )


# So many kills at one sample, and none elsewhere, point at its own code; among others, where chance is so unlikely.
_OFTEN, _UNLIKELY = 3, 1e-2


def _points_at_the_sample(suspicion: Suspicion) -> bool:
    here, everywhere, chance, _ = suspicion
    return (here >= _OFTEN and here == everywhere) or (here > 1 and chance < _UNLIKELY)


def _poison(case: Case, seen: tuple[str, ...], not_for_memory: bool) -> Finding:
    here, everywhere, chance, _ = case.suspicion
    lives = here or case.strike
    counted = []
    if everywhere:
        counted.append(f"{here} of {everywhere} such deaths fell on this sample")
    if here and chance < _UNLIKELY:
        counted.append(f"by chance this happens once in {1 / max(chance, 1e-12):.0f} times")
    memory = "" if not_for_memory else ", or the kernel kills it for memory"
    return Finding(
        "poison-sample",
        f"this sample has ended {lives} lives by SIGKILL: likely its own code, or a program that it starts, sends "
        f"it{memory}",
        (*counted, *seen),
        'look for os.kill and kill -9 in what it runs, and load it alone; Policy(bad_sample="skip") goes on without it',
        "likely",
    )


def _by_the_counters(evidence: Evidence) -> tuple[bool, tuple[str, ...]]:
    """(whether the kernel did not kill it for memory, what its counters say)."""
    oom = evidence.oom
    if oom is not None and oom.scope == "elsewhere":
        other = f"the kernel killed another process for memory meanwhile: host oom_kill {oom.before} -> {oom.after}"
        return True, (other, "the counter of its own cgroup did not rise")
    if oom is not None:
        risen = f"host oom_kill {oom.before} -> {oom.after}, which may have been another process"
        return False, (risen, *machine_memory(evidence))
    if not evidence.counters:
        return False, ("the kernel's counters of kills for memory cannot be read here",)
    return True, ("the kernel's counters of kills for memory did not rise",)


def _around(evidence: Evidence) -> tuple[str, ...]:
    return (f"this runs under {', '.join(evidence.worlds)}",) if evidence.worlds else ()


def _from(case: Case) -> str:
    sender = case.evidence.sender if case.evidence is not None else None
    return f"sent by {sender}" if sender is not None else "sender unknown"


def _who(case: Case) -> str:
    return f"worker {case.worker}" if case.worker >= 0 else "the keeper"


def interrupted(case: Case) -> Finding | None:
    """Ctrl-C in the terminal reaches every process of the group."""
    sender = case.evidence.sender if case.evidence is not None else None
    if case.what is not What.SIGNALLED or case.code != signal.SIGINT or sender is None or not sender.from_kernel:
        return None
    return Finding(
        "interrupted",
        f"Ctrl-C was pressed; {_who(case)} noted that and went on",
        (f"SIGINT {_from(case)}",),
        "nothing: the trainer decides what a stop means",
    )


def scheduled(case: Case) -> Finding | None:
    """A scheduler's own process is the sender. (What is started under one is not: that may be anybody's shell.)"""
    sender = case.evidence.sender if case.evidence is not None else None
    if case.what is not What.SIGNALLED or sender is None:
        return None
    name, advice = _scheduler_of(sender)
    if not name:
        return None
    return Finding(
        "terminated-by-scheduler",
        f"{name} sent {signal_name(case.code)}: it may be about to end this job, or this container; "
        f"{_who(case)} noted that and went on",
        (f"{signal_name(case.code)} {_from(case)}", *_seen_around(case)),
        f"{advice}; save a checkpoint when the trainer gets the same signal",
    )


def _seen_around(case: Case) -> tuple[str, ...]:
    return _around(case.evidence) if case.evidence is not None else ()


def noted(case: Case) -> Finding | None:
    """A signal that the worker noted, and survived."""
    if case.what is not What.SIGNALLED:
        return None
    name = signal_name(case.code)
    return Finding(
        "worker-signalled",
        f"{_who(case)} was sent {name}; it noted that and went on",
        (f"{name} {_from(case)}", *_seen_around(case)),
        "schedulers signal the whole process group before a time limit; the trainer decides what a stop means",
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


# What a scheduler leaves between the signal that asks and the SIGKILL that does not, by its own defaults.
_GRACE = {
    "Slurm": "SIGKILL follows after KillWait, 30 s by default",
    "Spark": "an executor's end is 10 s away at most",
    "YARN": "SIGKILL follows after 250 ms by default",
    "the container runtime": "SIGKILL follows after the grace period, 30 s by default (docker stop: 10 s)",
    "torchrun": "SIGKILL follows after 30 s by default",
}


def trainer_signalled(case: Case) -> Finding | None:
    """Somebody sent the trainer a signal; the script decides what happens then."""
    if case.what is not What.SIGNALLED or case.worker != TRAINER:
        return None
    name = signal_name(case.code)
    sender = case.evidence.sender if case.evidence is not None else None
    seen = (f"{name} {_from(case)}", *_seen_around(case))
    if sender is not None and sender.from_kernel:
        says = "Ctrl-C was pressed" if case.code == signal.SIGINT else f"the terminal sent {name}"
        return Finding("trainer-signalled", says, seen, "nothing, if that was you")
    who, advice = _scheduler_of(sender)
    if who:
        grace = f"; {_GRACE[who]}" if who in _GRACE and case.code == signal.SIGTERM else ""
        says = f"{who} sent {name}: it is about to end this job{grace}"
        return Finding("trainer-signalled", says, seen, f"{advice}; save a checkpoint when {name} comes")
    says = f"{name} was sent to the trainer from outside"
    return Finding("trainer-signalled", says, seen, "the sender's command line, and that of its parents, say who it is")


def _scheduler_of(sender: Sender | None) -> tuple[str, str]:
    command = sender.commands[0][1] if sender is not None and sender.commands else ""
    return next(((name, advice) for pattern, name, advice in _SCHEDULERS if pattern.search(command)), ("", ""))


def trainer_ended(case: Case) -> Finding | None:
    """The trainer is gone and has not closed its workers: its keeper saw it, and noted how."""
    evidence = case.evidence
    if case.what is not What.TRAINER_ENDED or evidence is None:
        return None
    if case.cause is Cause.EXIT:
        says = f"it left with exit code {case.code} without closing its workers: by os._exit, most likely"
        return Finding("trainer-ended", says, (f"exit code {case.code}",), _ITS_OUTPUT, "likely")
    if case.cause is Cause.SIGNAL and case.code != signal.SIGKILL:
        name = signal_name(case.code)
        says = f"{name} ended it: {'a crash of its own' if case.code in OWN_FAULT else 'somebody sent it, most likely'}"
        return Finding("trainer-ended", says, (f"exit by {name}",), _ITS_OUTPUT, "likely")
    if case.cause is Cause.SIGNAL:
        seen, says = "exit by SIGKILL", "something killed it with SIGKILL; who is unknown"
    else:
        seen = "no exit code could be read (Linux keeps it from 6.15 on)"
        says = "it ended without closing its workers: killed, crashed or by os._exit; which is unknown"
    oom = evidence.oom
    ours = f"cgroup oom_kill {oom.before} -> {oom.after}" if oom is not None and oom.scope == "cgroup" else ""
    if evidence.kernel_log or ours:
        says = "the kernel killed it, because memory was used up"
        advice = "fewer workers, a smaller batch, less kept in the trainer: its memory counts with that of the workers"
        known = (seen, *filter(None, (evidence.kernel_log, ours)))
        return Finding("trainer-ended", says, known, advice, "certain" if evidence.kernel_log else "likely")
    counters = ("the kernel's counters of kills for memory did not rise",) if evidence.counters and oom is None else ()
    if oom is not None:
        counters = (f"host oom_kill {oom.before} -> {oom.after}, which may have been another process",)
    advice = "look at `dmesg | grep -i oom`, the scheduler's log, and for whoever runs kill -9 here"
    return Finding("trainer-ended", says, (seen, *counters, *_around(evidence)), advice, "possible")


_ITS_OUTPUT = "look at the last lines that the trainer printed"

# Asked before the rules of the other files, and after them.
STARTUP = (trainer_ended, boot_raised)
RULES = (sent, crashed, exited, trainer_signalled, keeper_lost, killed, interrupted, scheduled, noted, ended_by_signal)
