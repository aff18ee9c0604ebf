"""The worker says nothing any more: what does it wait for?"""

import re
from typing import NamedTuple

from holdfast.core.messages import Cause, Did, Stage, What
from holdfast.diagnose.finding import Case, Confidence, Finding
from holdfast.system.evidence import View
from holdfast.system.procfs import On, name_of

# Native frames tell which library a worker hangs in: who is known by which file, and what helps there.


class Library(NamedTuple):
    """`threads`: it has threads of its own, which a fork does not copy."""

    name: str
    pattern: re.Pattern[str]
    threads: bool
    advice: str


GRPC = Library(
    "gRPC",
    re.compile(r"\((cygrpc|libgrpc)|^grpc_"),
    True,
    "GRPC_ENABLE_FORK_SUPPORT=1; or make the channel in the worker, at its first sample",
)
_KNOWN = (
    Library(
        "OpenMP",
        re.compile(r"\(lib(gomp|iomp5|omp)\b"),
        True,
        "one thread in workers: OMP_NUM_THREADS=1, torch.set_num_threads(1)",
    ),
    Library("OpenCV", re.compile(r"\((cv2|libopencv)"), True, "cv2.setNumThreads(0) before the loader"),
    Library(
        "HDF5", re.compile(r"\((libhdf5|h5py|_?h5)|^H5"), False, "open the file in the worker, at its first sample"
    ),
    GRPC,
    Library("MKL", re.compile(r"\(libmkl"), True, "MKL_NUM_THREADS=1"),
    Library("NCCL", re.compile(r"\(libnccl"), True, "no collective calls in the dataset"),
    Library("CUDA", re.compile(r"\(libcu(da|dart)?\b"), True, "keep samples on the CPU"),
    Library("SQLite", re.compile(r"\((libsqlite3|_sqlite3)"), False, "open the database in the worker"),
    Library("Arrow", re.compile(r"\((libarrow|libparquet)"), True, "pyarrow.set_cpu_count(1) in workers"),
    Library("torch", re.compile(r"\(lib(torch|c10)"), False, "torch.set_num_threads(1) in workers"),
)
# The call itself, and Python on the way to it: they say nothing of who waits.
_PLUMBING = re.compile(
    r"\((libc|libm|libpthread|ld-linux[^)]*|libffi|libpython[^)]*|linux-vdso|python[\d.]*|_ctypes)\b|\.c\)$"
)


def library_of(view: View) -> tuple[str, Library | None]:
    """(its name or file, what is known of it) of the native code that a worker is in; ("", None) when not seen."""
    for frame in view.native:
        if _PLUMBING.search(frame):
            continue
        known = next((library for library in _KNOWN if library.pattern.search(frame)), None)
        return (known.name if known is not None else frame.rpartition("(")[2].rstrip(")")), known
    return "", None


def tells(view: View) -> bool:
    """True when the native frames say more than the Python line that they lie in."""
    return bool(view.native) and (bool(view.gil) or bool(library_of(view)[0]))


_FILE_CALLS = frozenset(
    ("read", "write", "open", "openat", "pread64", "fsync", "flock", "fcntl", "newfstatat", "statx")
)
_SOCKET_CALLS = frozenset(("connect", "accept", "accept4", "recvfrom", "recvmsg", "sendmsg"))
_WAIT_CALLS = frozenset(("poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait"))
_NETWORK_CODE = re.compile(r'/(socket|ssl|http/client|(urllib3?|requests|httpx|aiohttp|botocore|grpc)/\S+)\.py"')
_CHILD_CALLS = frozenset(("wait4", "waitid"))
_CHILD_CODE = re.compile(r'/(subprocess|multiprocessing/(process|popen_\w+))\.py"')
_LOCK_LINE = re.compile(r"\.acquire\(|\bwith \w*lock|\.wait\(|\.join\(|\.get\(|\.put\(|\block\b", re.IGNORECASE)
_LOCK_CODE = re.compile(r'/(threading|queue|multiprocessing/(synchronize|queues|managers|pool))\.py"')
_GRPC_CODE = re.compile(r'/grpc/\S+\.py"')
_GRPC_THREAD = re.compile(r"grpc|event_engine|lifeguard|default-execut|resolver-execu")
_BUSY = 0.5
# Children and threads that are shown.
_SHOWN = 4


def _seen(case: Case, view: View) -> tuple[str, ...]:
    seen = [f"no sign of life for {case.seconds:.1f} s in stage {(case.stage or Stage.IDLE).name.lower()}"]
    seen += case.evidence.facts if case.evidence is not None and case.what is What.SILENT else ()
    if view.call and view.call != "running":
        seen.append(f"in the system call {view.call}" + (f" on {view.on}" if view.on else ""))
    if view.state == "D":
        seen.append(f"state D (uninterruptible) {('in ' + view.channel) if view.channel else ''}".rstrip())
    if view.call == "running":
        seen.append(f"in no system call: it computes ({view.busy:.0%} of a processor)")
    if view.line:
        seen.append(f"on the line: {view.line}")
    if view.gil and view.call != "running":
        seen.append("its main thread has the GIL")
    library, _ = library_of(view)
    if tells(view):
        seen.append(f"py-spy: in {view.native[0]}" + (f", called by {library}" if library else ""))
    if view.others and view.call == "futex":
        more = ", ..." if len(view.others) > _SHOWN else ""
        seen.append(f"its other threads: {', '.join(view.others[:_SHOWN])}{more}")
    if view.children:
        seen.append("processes it has started: " + _children(view))
    if case.evidence is not None and case.evidence.stack:
        seen.append("its Python stack, below")
    return tuple(seen)


def _children(view: View) -> str:
    shown = [f"{pid} ({name_of(command) or 'ended'})" for pid, command in view.children[:_SHOWN]]
    return ", ".join(shown) + (", ..." if len(view.children) > _SHOWN else "")


def hung(case: Case) -> Finding | None:
    """Past `sample_timeout`, or silent for long."""
    if case.cause is not Cause.DEADLINE and case.what is not What.SILENT:
        return None
    view = case.evidence.view if case.evidence is not None and case.evidence.view is not None else View()
    killed = case.cause is Cause.DEADLINE
    for judge in (_stopped, _uninterruptible, _child, _lost_threads, _network, _file, _lock, _computing, _holding):
        verdict = judge(case, view)
        if verdict is not None:
            name, says, advice, confidence = verdict
            return Finding(name, says, _seen(case, view), advice, confidence)
    if killed:
        limit = "timeout" if case.of_pool else "sample_timeout"
        return Finding(
            "sample-hung",
            f"it took longer than {limit}={case.sample_timeout:g} s, and was killed for it",
            _seen(case, view),
            "the last line of the stack is where it waits: give that call a timeout of its own, "
            f"or raise {'timeout' if case.of_pool else 'Policy(sample_timeout=...)'} if it is only slow",
        )
    return Finding(
        "worker-silent",
        f"worker {case.worker} has said nothing for {case.code} s; it was left alone",
        _seen(case, view),
        "submit_with(..., timeout=seconds) has such a worker killed"
        if case.of_pool
        else "set Policy(sample_timeout=seconds) to have such a worker killed and its sample tried again",
        "possible",
    )


Verdict = tuple[str, str, str, Confidence] | None


def _stopped(case: Case, view: View) -> Verdict:
    if view.state not in ("T", "t"):
        return None
    says = "it had been stopped from outside (SIGSTOP, Ctrl-Z, a debugger) and did not go on"
    return "worker-stopped", says, "find who sends SIGSTOP; a stopped worker holds its sample for ever", "certain"


def _uninterruptible(case: Case, view: View) -> Verdict:
    if view.state != "D":
        return None
    what = f"{view.on} ({view.file_system})" if view.on else "a disk or a network file system"
    says = f"the kernel has it in an uninterruptible wait for {what}"
    return "hang-uninterruptible", says, "look at `dmesg` and at the server or disk behind it", "certain"


def _child(case: Case, view: View) -> Verdict:
    """It waits for a program that it has started: for its end, or for what it writes."""
    if not view.children:
        return None
    stack = case.evidence.stack if case.evidence is not None else ""
    ends = view.call in _CHILD_CALLS
    listens = On.PIPE in view.kinds and view.call in _WAIT_CALLS | {"read", "write"}
    if not ends and not listens and not (view.call in _WAIT_CALLS and _CHILD_CODE.search(stack)):
        return None
    says = f"it waits for a process that it has started: {_children(view)}"
    advice = "look at what that program waits for; subprocess.run(..., timeout=30) gives it up"
    return "hang-child", says, advice, "certain" if ends else "likely"


def _lost_threads(case: Case, view: View) -> Verdict:
    """A client of gRPC's is served by threads of its own; a worker that has none of them got the client by the fork."""
    stack = case.evidence.stack if case.evidence is not None else ""
    threads = _threads_at_fork(case)
    if threads < 2 or view.call not in _WAIT_CALLS | {"futex"} or not _GRPC_CODE.search(stack.partition("\n\n")[0]):
        return None
    if any(_GRPC_THREAD.match(name) for name in view.others):
        return None
    return _fork_after_threads(view, threads, "likely", GRPC)


def _is_local(view: View) -> bool:
    """A socket to another process of this machine, not to the network."""
    return view.kinds[:1] == (On.UNIX_SOCKET,)


def _network(case: Case, view: View) -> Verdict:
    stack = case.evidence.stack if case.evidence is not None else ""
    names = "getaddrinfo" in stack or "getaddrinfo" in view.line
    if not (view.call in _SOCKET_CALLS or On.SOCKET in view.kinds or names or _NETWORK_CODE.search(stack)):
        return None
    if _is_local(view) and On.SOCKET not in view.kinds and not names:
        return None
    if view.call not in _SOCKET_CALLS | _WAIT_CALLS | {"read", "write", ""}:
        return None
    says = "it waits for " + ("a name to be looked up (DNS)" if names else "an answer on a socket")
    advice = "give that call a timeout: socket.setdefaulttimeout(30), or the library's own"
    if names:  # no timeout of a socket's ends that
        advice = 'os.environ["RES_OPTIONS"] = "timeout:1 attempts:1" bounds a lookup; is the name server reachable?'
    return "hang-network", says, advice, "likely"


def _file(case: Case, view: View) -> Verdict:
    local = _is_local(view) and view.call in _SOCKET_CALLS | _WAIT_CALLS
    if view.call not in _FILE_CALLS and not local:
        return None
    what = "a pipe" if view.kinds == (On.PIPE,) else view.on or "a file"
    if _is_local(view):
        what = f"another process of this machine ({view.on})"
    where = f", on {view.file_system}" if view.file_system else ""
    says = f"it waits in {view.call} for {what}{where}"
    advice = "look at what feeds that file, pipe or file system; copy the data to a local disk"
    if _is_local(view):
        advice = "is the process at its other end alive, and not busy with somebody else? Give the call a timeout"
    return "hang-io", says, advice, "certain"


def _lock(case: Case, view: View) -> Verdict:
    if view.call != "futex":
        return None
    stack = case.evidence.stack if case.evidence is not None else ""
    # Python gives the GIL away while it waits for a lock of its own.
    own_lock = not view.gil and bool(
        _LOCK_LINE.search(view.line) or _LOCK_CODE.search(stack.partition("\n\n")[0][:400])
    )
    threads = _threads_at_fork(case)
    if threads > 1 and own_lock and case.done is Did.RENEWED:
        return (
            "hang-inherited-lock",
            f"a lock that some thread of the trainer held at the fork ({threads} threads): here nobody will release it",
            'multiprocessing_context="spawn", or make the loader before those threads',
            "likely",
        )
    _, library = library_of(view)
    if view.gil and case.done is not Did.RENEWED and not (library is not None and library.threads):
        return None  # a lock of native code's own: see _holding
    if threads > 1 and not own_lock:
        return _fork_after_threads(view, threads, "likely")
    if view.gil:
        return None
    says = "it waits for a lock that is not released"
    return "hang-lock", says, "the stack shows which lock; who holds it, and will it ever let go?", "likely"


def _threads_at_fork(case: Case) -> int:
    if case.start_method != "fork" or case.evidence is None:
        return 0
    return case.evidence.trainer_threads


def _fork_after_threads(view: View, threads: int, confidence: Confidence, known: Library | None = None) -> Verdict:
    """`known`: the library, where the Python stack names it."""
    library = known if known is not None else library_of(view)[1]
    who = library.name if library is not None and library.threads else "native code"
    helps = (
        f"; or {library.advice}"
        if library is not None and library.threads
        else ("; or one thread in workers: torch.set_num_threads(1), cv2.setNumThreads(0), OMP_NUM_THREADS=1")
    )
    return (
        "fork-after-threads",
        f"{who} waits for threads that a fork does not copy (the trainer had {threads} threads then)",
        'multiprocessing_context="spawn"' + helps,
        "likely" if library is not None and library.threads else confidence,
    )


def _computing(case: Case, view: View) -> Verdict:
    if view.busy < _BUSY and not (view.call == "running" and view.state == "R"):
        return None
    threads = _threads_at_fork(case)
    if threads > 1 and case.done is Did.RENEWED:
        return _fork_after_threads(view, threads, "possible")  # a library that spins while it waits looks so, too
    name, _ = library_of(view)
    what = f"native code ({name}) that does not come back" if name else "a loop, or native code that does not come back"
    says = f"it computes without an end: {what}"
    return "hang-native", says, "the last line of the stack is the call; try that sample alone", "likely"


def _holding(case: Case, view: View) -> Verdict:
    """Python gives the GIL away before it waits; who waits with it is native code."""
    if not view.gil or view.state not in ("S", "D"):
        return None
    name, library = library_of(view)
    says = (
        f"native code{f' ({name})' if name else ''} waits in {view.call or 'the kernel'} and holds the GIL meanwhile: "
        "no Python timeout, signal handler or thread of this worker can run"
    )
    helps = f"{library.advice}; " if library is not None else ""
    return "hang-native", says, f"{helps}the last line of the stack is the call; try that sample alone", "certain"


RULES = (hung,)
