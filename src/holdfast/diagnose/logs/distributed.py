"""What the launchers of ranks say: torch.multiprocessing.spawn, torchrun (elastic), gloo and NCCL."""

from holdfast.diagnose.logs.clue import Clue, Family

_NOTEBOOK = (
    "a rank that dies while it starts leaves no traceback: in a notebook the function lives in __main__ and cannot be "
    "imported; put it into a module. Also look for exit() or sys.exit() at the end of the function"
)
_FIRST = (
    "find the first death by time: the launcher's 'root cause' is the first it looked at. The others only report "
    "broken connections or were stopped by the launcher"
)
_CRASH = "run with PYTHONFAULTHANDLER=1 to see the Python line of the rank that crashed"
_OOM = "dmesg -T | grep -i oom, the scheduler's log; fewer ranks or workers per machine if it was memory"

# How a launcher says that signal N ended a rank: spawn, torchrun (twice), subprocess, deepspeed.
_ENDED = (
    r"process (?P<rank>\d+) terminated with signal {name}\b|exitcode\s*: -{number}\b|"
    r"Signal {number} \({name}\) received by PID|died with <Signals\.{name}\b|exits with return code = -{number}\b"
)


def _ended(name: str, signal: str, number: int, says: str, advice: str) -> Clue:
    return Clue(name=name, pattern=_ENDED.format(name=signal, number=number), says=says, advice=advice)


DISTRIBUTED = Family(
    "torchrun, torch.multiprocessing.spawn, gloo and NCCL",
    (
        _ended(
            "worker-killed", "SIGKILL", 9, "a rank was ended by SIGKILL; the kernel for memory is the usual one", _OOM
        ),
        _ended("worker-segfault", "SIGSEGV", 11, "a rank crashed in native code (SIGSEGV)", _CRASH),
        _ended("worker-aborted", "SIGABRT", 6, "a native library in a rank gave up (SIGABRT)", _CRASH),
        _ended("worker-bus-error", "SIGBUS", 7, "a rank died of SIGBUS, most often a full /dev/shm", "df -h /dev/shm"),
        _ended("worker-illegal-instruction", "SIGILL", 4, "a rank met an instruction this processor lacks", _CRASH),
        _ended("worker-terminated", "SIGTERM", 15, "a rank was sent SIGTERM: by the launcher or a scheduler", _FIRST),
        Clue(
            name="interrupted",
            pattern=r"SignalException: Process \d+ got signal: 1\b|Received 1 death signal",
            says="torchrun got SIGHUP: the terminal it belonged to was closed (nohup does not help: torchrun listens)",
            advice="start it in tmux or screen, with setsid, or from a scheduler",
        ),
        Clue(
            name="interrupted",
            pattern=r"SignalException: Process \d+ got signal: 2\b|Received 2 death signal",
            says="torchrun got SIGINT: somebody pressed Ctrl-C",
            advice="nothing, if that was you",
        ),
        Clue(
            name="terminated-by-scheduler",
            pattern=r"SignalException: Process \d+ got signal: (?P<signal>\d+)|Received \d+ death signal",
            says="torchrun itself was told to stop by a signal (15 is SIGTERM): a scheduler, or a person",
            advice="look at the scheduler's log: time limit, pre-emption, cancellation",
        ),
        Clue(
            name="rank-failed-first",
            pattern=r"process (?P<rank>\d+) terminated with exit code (?P<code>\d+)",
            says="rank {rank} ended with status {code} without a traceback",
            advice=_NOTEBOOK,
        ),
        Clue(
            name="rank-failed-first",
            pattern=r"-- Process (?P<rank>\d+) terminated with the following error:",
            says="rank {rank} raised; its own traceback follows",
            advice="read the traceback below that line; " + _FIRST,
        ),
        Clue(
            name="rank-failed-first",
            pattern=r"Root Cause \(first observed failure\)|\bexitcode\s*: [1-9]\d*\b",
            says="torchrun saw one rank fail first and stopped the rest",
            advice=_FIRST,
            confidence="likely",
        ),
        Clue(
            name="rank-failed-first",
            pattern=r"gloo\S*\] Connection closed by peer|gloo\S*\] Read error .*Connection reset by peer"
            r"|NCCL WARN .*Connection closed by remote peer|\bncclRemoteError: "
            r"|Did the remote server shutdown or crash\?",
            says="this rank lost the connection to another one, which had died or left",
            advice=_FIRST,
            confidence="likely",
        ),
        Clue(
            name="rank-failed-first",
            pattern=r"Watchdog caught collective operation timeout",
            says="this rank waited in a collective for one that never came: dead, or far behind in its data",
            advice="look at what the missing rank did at that time; " + _FIRST,
            confidence="possible",
        ),
        Clue(
            name="rank-failed-first",
            pattern=r"Sending process \d+ closing signal SIG\w+|Closing process \d+ via signal SIG\w+",
            says="the launcher stopped the other ranks",
            advice=_FIRST,
            supports=True,
        ),
    ),
)
