"""The few system calls and files of Linux that the standard library does not wrap."""

import ctypes
import errno
import os
import resource
import select
import signal
import time
import traceback
from contextlib import suppress
from pathlib import Path

from holdfast.core.messages import Leave

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_PAGE = os.sysconf("SC_PAGE_SIZE")

# Schedulers and terminals send these; a worker notes them and goes on.
NOTED_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
# Asks a worker for its Python stack. A real-time signal that neither glibc nor a common library uses.
DUMP_SIGNAL = signal.SIGRTMIN + 17
# How long that may take. faulthandler writes a stack in well under a millisecond, unless the process is stopped.
DUMP_S = 0.2
# How many bytes of faulthandler's output are read: some hundred frames.
_STACK_BYTES = 32 << 10


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when its parent ends; at once if that has happened already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent_pid:
        os._exit(1)


def let_trace(pid: int) -> None:
    """That process and its children may look at this one, also where Yama lets only parents (ptrace_scope 1)."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, pid)  # fails without Yama, where nobody needs to be let


def give_back_free_memory() -> None:
    """What this process has freed, and its allocator keeps, goes back to the kernel: 0.2 ms, or 40 us per MB.

    A forked child would take such pages first when it allocates. They are in its resident memory from the beginning,
    so it could leak that much before it seems to grow.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's alone
        libc.malloc_trim(0)


def never_preempt_when_woken() -> None:
    """A task that arrives must not push the trainer, who has just sent it, off its processor: small batches come half
    as often then. The share of processor time stays as it was. Processes that user code starts are not concerned.
    """
    with suppress(OSError):  # a sandbox may refuse it: that costs speed alone
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))


def take_stack(pid: int, file: int) -> str:
    """The Python stack of a process that registered DUMP_SIGNAL with faulthandler on this file.

    The process writes the stack also while native code holds the GIL. "" when it is stopped or gone.
    """
    if process_state(pid) in ("T", "t", "Z", ""):
        return ""
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    with suppress(ProcessLookupError):
        os.kill(pid, DUMP_SIGNAL)
    deadline, size = time.monotonic() + DUMP_S, 0
    while time.monotonic() < deadline:
        time.sleep(0.002)
        before, size = size, os.fstat(file).st_size
        if size and size == before:
            break
    return written_stack(file)


def written_stack(file: int) -> str:
    """What faulthandler has written into this file: at a crash, or when it was asked for a stack."""
    return os.pread(file, _STACK_BYTES, 0).decode(errors="replace").rstrip()


def open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None on kernels without it (before 5.3)."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def memory_of(pid: int | str = "self") -> tuple[int, int]:
    """(resident, private) bytes of a process; zeros when it is gone. Private is what lies in no file and in no shared
    memory. A fork has all of its parent's: so only differences say anything.
    """
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except (OSError, ValueError):
        return 0, 0
    return int(resident) * _PAGE, max(0, int(resident) - int(shared)) * _PAGE


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, shared pages included; 0 when it is gone."""
    return memory_of(pid)[0]


def peak_bytes(pid: int) -> int:
    """The most that was ever resident, shared pages included; 0 when it is gone."""
    return _status(pid, "VmHWM:")


def own_bytes(pid: int) -> int:
    """Memory that is this process's alone, at least: what it still shares with its parent is not. Takes milliseconds.

    Slots that only the worker has touched so far, and files that only it has mapped, are private pages, too, and no
    memory of its own. How many of them are private is not said: at most its part of them.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith("kB")}
    resident, private = memory_of(pid)
    elsewhere = sizes.get("Pss_File", resident - private) + sizes.get("Pss_Shmem", 0)  # (told since Linux 5.9)
    return max(0, sizes.get("Private_Clean", 0) + sizes.get("Private_Dirty", 0) - elsewhere)


def descriptors(pid: int | str = "self") -> int:
    """How many a process has open; 0 when it is gone."""
    path = f"/proc/{pid}/fd"
    try:
        # Since Linux 6.2 the size of that folder is their number; before, they must be counted.
        return os.stat(path).st_size or len(os.listdir(path))
    except OSError:
        return 0


def _status(pid: int | str, name: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), 0)


def data_bytes() -> int:
    """What RLIMIT_DATA counts for this process right now."""
    return _status("self", "VmData:")


def umask() -> int:
    """The mask of this process; read from /proc, because os.umask would change it for all threads meanwhile."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022


def need_descriptors(count: int) -> None:
    """Raises EMFILE unless this process can open so many more. Ask before code that would leak some if it failed."""
    len([select.epoll() for _ in range(count)])  # each closes itself, also where a signal handler raises meanwhile


def is_open(fd: int) -> bool:
    """True for a descriptor of this process."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def process_state(pid: int) -> str:
    """One letter as in ps: R running, S sleeping, D uninterruptible, T stopped, Z zombie; "" when it is gone."""
    fields = stat_fields(pid)
    return fields[0] if fields else ""


def stat_fields(pid: int) -> list[str]:
    """/proc/PID/stat from the state on, which proc(5) counts as field 3; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def wait_for_exit(pid: int, seconds: float) -> bool:
    """Reap our child `pid` within `seconds`; True when it is gone, also if somebody else reaped it."""
    deadline = time.monotonic() + seconds
    pause = 0.0005
    while True:
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                return True
        except ChildProcessError:
            if not process_state(pid):
                return True
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * 2, 0.02)


def signal_name(number: int) -> str:
    """SIGKILL for 9; "signal 40" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# Limits that a worker sets for itself, once it is up.


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
    wanted = data_bytes() + size
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
    return resource.getrlimit(resource.RLIMIT_DATA)[0] - data_bytes()


def _keeps(error: BaseException, growth_bytes: int | None, base: int) -> bool:
    """True when much was kept from earlier samples. What this one had is let go of first."""
    traceback.clear_frames(error.__traceback__)
    return memory_of()[1] - base > max(_KEPT, _SHARE * (growth_bytes or 0))
