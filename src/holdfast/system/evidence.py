"""Evidence: facts taken at the moment of an incident; no opinions. Diagnosis reads it.

The keeper takes the evidence of a death or a silence, whatever the trainer is doing. The worker takes the evidence of
an exception while it handles it.
"""

import errno
import os
import re
import resource
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import StreamBroken
from holdfast.system import linux, procfs
from holdfast.system.cgroups import ControlGroup, Oom, OomWatch, group_of
from holdfast.system.signal_origin import Fault, Sender
from holdfast.system.snapshot import Bounds, Snapshot

_FULL = 1 << 20
_STACK = 16 << 20
# Letters of a text that are looked through, and an errno in it, with its meaning before it.
_TEXT = 2000
_NUMBER = re.compile(r": ([A-Z][^:()]*) \((\d{1,3})\)")
_MOST_SHARED = 3
# Whose world this process lives in, by what they leave in the environment.
_WORLDS = {
    "Slurm": ("SLURM_JOB_ID",),
    "Kubernetes": ("KUBERNETES_SERVICE_HOST",),
    "YARN": ("YARN_CONTAINER_ID", "NM_HOST", "CONTAINER_ID"),
    "Databricks": ("DATABRICKS_RUNTIME_VERSION",),
    "Spark": ("SPARK_ENV_LOADED", "PYTHON_WORKER_FACTORY_PORT", "SPARK_EXECUTOR_POD_IP"),
    "Ray": ("RAY_JOB_ID", "RAY_RAYLET_PID"),
    "torchrun": ("TORCHELASTIC_RUN_ID",),
    "a notebook": ("JPY_PARENT_PID",),
}


class Sign(Enum):
    """What the rules read from the state of a process in which an exception was raised."""

    STACK_REFUSED = auto()  # our own limit on memory leaves no room for the stack of a thread
    SHM_FULL = auto()  # the file system that is full is /dev/shm
    OPEN_FILES = auto()  # most of its descriptors are files
    OPEN_TENSORS = auto()  # most of its descriptors are the shared memory of torch's tensors
    SHARED_FILE = auto()  # a file was open before the fork, and all workers read it at one position
    ADDRESSES_LIMITED = auto()  # RLIMIT_AS is set
    DATA_LIMITED = auto()  # RLIMIT_DATA is set
    UNLIKE = auto()  # samples of a batch differ from one another, and the default collate failed
    DIVERGED = auto()  # a stream gave other items when it was replayed


class Facts(NamedTuple):
    """What was seen around an exception: `texts` for people, `signs` for the rules."""

    texts: tuple[str, ...] = ()
    signs: frozenset[Sign] = frozenset()


@dataclass(frozen=True, slots=True)
class View:
    """A process that hangs, seen from outside."""

    state: str = ""
    """R running, S sleeping, D uninterruptible, T stopped."""
    call: str = ""
    """The system call it is in; "running" in none; "" when that may not be seen."""
    on: str = ""
    """The file, socket or pipe that the call is made on, for people."""
    file_system: str = ""
    channel: str = ""
    """Where in the kernel it waits."""
    threads: int = 0
    busy: float = 0.0
    """Share of a processor that it used while we looked."""
    line: str = ""
    """The text of the Python line that it is on."""
    gil: bool | None = None
    """Whether its main thread had the GIL; None when that is not known."""
    others: tuple[str, ...] = ()
    """Its other threads: name and state."""
    children: tuple[tuple[int, str], ...] = ()
    """The processes it has started: pid, command line. Of many, a part."""
    kinds: tuple[procfs.On, ...] = ()
    """`on` for the rules."""
    native: tuple[str, ...] = ()
    """Native frames inside the Python line, innermost first, where py-spy could see them."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen of one life when it died, hung or was signalled."""

    pid: int
    lived_s: float = 0.0
    stack: str = ""
    """The Python stack from faulthandler: at the crash, or of the hung worker just before it was killed."""
    view: View | None = None
    peak_bytes: int = 0
    """Largest resident size, from its rusage."""
    memory: tuple[tuple[float, int], ...] = ()
    """The last readings of its resident size: seconds before, bytes."""
    oom: Oom | None = None
    counters: bool = False
    """True when the kernel's counters of kills for memory could be read."""
    kernel_log: str = ""
    group: ControlGroup | None = None
    pressure: float = 0.0
    """Share of the last ten seconds, in per cent, in which somebody on this machine waited for memory (PSI)."""
    free_bytes: int = 0
    total_bytes: int = 0
    """Of the machine's memory: what could be had after the death, and all of it. 0 when not looked at."""
    shm_free: int = -1
    """Bytes free in /dev/shm; -1 where there is none."""
    sender: Sender | None = None
    fault: Fault | None = None
    """The mapped file that a SIGBUS or SIGSEGV lay in."""
    trainer_threads: int = 0
    """How many threads the trainer had when the keeper was forked from it."""
    worlds: tuple[str, ...] = ()
    noted_signals: int = 0
    fork_errno: int = 0
    """Set when the process could not even be made."""
    limits: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    """What a worker that makes room for a fresh one was over, in words."""
    grown_bytes: int = 0
    """Private memory beyond what it had when it was ready; at the end, or when it was asked to leave."""
    tasks: int = 0
    """Batches that this life has done, and samples in them."""
    samples: int = 0
    descriptors: int = 0
    look: Snapshot | None = None
    """What it had when it was last looked at: at once for a hang, some seconds before for a death."""
    bounds: Bounds | None = None
    """What the kernel allowed it, read before it was reaped."""

    @property
    def for_memory(self) -> bool:
        """The kernel killed it for memory, and that is known: its log names this process, or the counter of its own
        group rose. (The machine's counter rises for anybody.)
        """
        return bool(self.kernel_log) or (self.oom is not None and self.oom.scope == "cgroup")

    @property
    def last_bytes(self) -> int:
        """Its resident size when it was last seen; its peak where that is not known."""
        return next((size for _, size in reversed(self.memory) if size), self.peak_bytes)


def shortened(value: Any, entries: int, letters: int) -> Any:
    """The same evidence, or part of it: no list of texts has more entries, and no text more letters. Figures stay."""
    if isinstance(value, str):
        return value[:letters]
    if isinstance(value, tuple) and _has_text(value):
        return tuple(shortened(part, entries, letters) for part in value[:entries])
    if is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: getattr(value, each.name) for each in fields(value)}
        return replace(value, **{name: shortened(part, entries, letters) for name, part in parts.items()})
    return value


def _has_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, tuple) and any(map(_has_text, value)))


def at_death(evidence: Evidence, oom: OomWatch, now: float, *, killed: bool, read_log: bool = True) -> Evidence:
    """The same evidence, with what the kernel tells at a death. `killed`: by SIGKILL, and not by us.

    `read_log`: whether the kernel's log may be read for it, which takes milliseconds.
    """
    free, total = procfs.free_memory() if killed else (0, 0)
    return replace(
        evidence,
        free_bytes=free,
        total_bytes=total,
        oom=oom.claim(now) if killed else None,
        counters=oom.readable,
        kernel_log=procfs.kernel_says(evidence.pid, now - evidence.lived_s) if killed and read_log else "",
        group=group_of(),
        shm_free=shm_free(),
        pressure=procfs.memory_pressure(),
        worlds=worlds(),
    )


def view_of(pid: int, busy: float = 0.0) -> View:
    """Which process: the keeper, of a worker that is silent."""
    call, on, kinds = procfs.system_call(pid)
    system = procfs.file_system(on) if kinds == (procfs.On.FILE,) else ""
    state = linux.process_state(pid)
    return View(
        state,
        call,
        on,
        system,
        procfs.wait_channel(pid),
        procfs.threads(pid),
        busy,
        kinds=kinds,
        others=procfs.other_threads(pid),
        children=procfs.children(pid),
    )


def worlds() -> tuple[str, ...]:
    """Which schedulers and containers this process runs under."""
    found = [name for name, marks in _WORLDS.items() if any(mark in os.environ for mark in marks)]
    if os.path.exists("/.dockerenv"):
        found.append("Docker")
    return tuple(found)


def shm_free() -> int:
    try:
        about = os.statvfs("/dev/shm")
    except OSError:
        return -1
    return about.f_bavail * about.f_frsize


def process_limits() -> tuple[str, ...]:
    """What may forbid one more process or thread, with the figures: the nearest limit first."""
    group = group_of()
    user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    found = []
    if group.pids_max is not None:
        found.append(f"cgroup pids.max {group.pids_max}, in use {group.pids_now}")
    if user != resource.RLIM_INFINITY:
        found.append(f"ulimit -u {user} for uid {os.getuid()}")
    try:
        with open("/proc/sys/kernel/threads-max") as file:
            found.append(f"threads-max {int(file.read())}")
    except OSError:
        pass  # not told here
    return tuple(found)


def descriptor_limits() -> tuple[str, ...]:
    """What may forbid one more descriptor. Which process: the keeper."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = linux.descriptors()
    facts = (f"{count} descriptors open in the keeper, three for each worker; the limit is {soft} (hard {hard})",)
    try:
        with open("/proc/sys/fs/file-nr") as file:
            now, _, most = file.read().split()
    except OSError:
        return facts  # no descriptor for that
    return (*facts, f"{now} files open on this machine, the limit is {most}")


def facts_of(error: BaseException) -> Facts:
    """What the system knows about this exception. Which process: the worker, while it handles the exception."""
    if isinstance(error, StreamBroken) and error.diverged:
        return Facts(signs=frozenset({Sign.DIVERGED}))
    number = error_number(error)
    if number in (errno.EMFILE, errno.ENFILE):
        return _descriptors()
    if number == errno.ENOSPC:
        return _full(error)
    if number == errno.EDQUOT:
        return Facts((f"uid {os.geteuid()}, gid {os.getegid()}", *_about_path(error)))
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and "can't start new thread" in str(error)):
        limit, used = resource.getrlimit(resource.RLIMIT_DATA)[0], linux.data_bytes()
        ours = limit != resource.RLIM_INFINITY and limit - used < _STACK
        texts = (f"{procfs.threads()} threads in this process", *process_limits())
        if not ours:
            return Facts(texts)
        full = f"RLIMIT_DATA {limit >> 20} MiB, used {used >> 20} MiB: no room for the stack of a thread"
        return Facts((full, *texts), frozenset({Sign.STACK_REFUSED}))
    if number == errno.ENOMEM or isinstance(error, MemoryError) or "can't allocate memory" in str(error)[:200]:
        return _memory()
    if number:
        return Facts(_about_path(error))
    shared = [
        f"open since before the fork, read at one position by all: {path}, at byte {position}"
        for path, position in procfs.shared_files()[:_MOST_SHARED]
    ]
    return Facts(tuple(shared), frozenset({Sign.SHARED_FILE} if shared else ()))


def error_number(error: BaseException) -> int:
    """The errno that an exception is about: its own; or the one in a text of torch's, which raises RuntimeError with
    "...: No space left on device (28)". 0 for none.
    """
    if isinstance(error, OSError):
        return error.errno if isinstance(error.errno, int) else 0
    found = _NUMBER.search(str(error)[:_TEXT]) if isinstance(error, RuntimeError) else None
    return int(found[2]) if found is not None and os.strerror(int(found[2])) == found[1] else 0


def _descriptors() -> Facts:
    """What the descriptors of this process are, now that there are too many."""
    count, paths = procfs.open_files()
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = max(paths, key=lambda one: one[1], default=("", 0))[0]
    sign = Sign.OPEN_TENSORS if "torch_" in most else Sign.OPEN_FILES if most.startswith("/") else None
    texts = (f"{count} descriptors open, the limit is {soft}", f"open: {procfs.in_words(paths)}")
    return Facts(texts, frozenset({sign} if sign is not None else ()))


def _about_path(error: BaseException) -> tuple[str, ...]:
    named = getattr(error, "filename", None)
    if not isinstance(named, str):
        return ()
    path = os.path.abspath(named)
    return (f"{path} on {procfs.file_system(path) or 'an unknown file system'}",)


def _full(error: BaseException) -> Facts:
    """The file systems that are full; the file itself is not named by a failed write, and closed by now."""
    named = getattr(error, "filename", None)
    places = [os.path.dirname(os.path.abspath(named))] if isinstance(named, str) else []
    if not isinstance(error, OSError) and "torch_" in str(error)[:_TEXT]:
        places = ["/dev/shm"]  # the shared memory of a tensor: torch has given it back by now
    facts: list[str] = []
    signs = frozenset[Sign]()
    for place in dict.fromkeys([*places, "/dev/shm", *procfs.mounts()]):
        try:
            about = os.statvfs(place)
        except OSError:
            continue  # not ours to look at
        free, size = about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize
        no_inodes = about.f_files > 0 and about.f_favail == 0
        full = size and (free < _FULL or no_inodes) and not about.f_flag & os.ST_RDONLY
        if place in places or full:
            if not facts and Path("/dev/shm") in (Path(place), *Path(place).parents):
                signs = frozenset({Sign.SHM_FULL})
            inodes = f", 0 of {about.f_files} inodes" if no_inodes else ""
            facts.append(f"{place}: {free >> 20} of {size >> 20} MiB free{inodes}")
    return Facts(tuple(facts), signs)


def _memory() -> Facts:
    facts, signs = [f"data of this process {linux.data_bytes() >> 20} MiB"], set()
    for name, kind, sign in (
        ("RLIMIT_DATA", resource.RLIMIT_DATA, Sign.DATA_LIMITED),
        ("RLIMIT_AS", resource.RLIMIT_AS, Sign.ADDRESSES_LIMITED),
    ):
        soft = resource.getrlimit(kind)[0]
        if soft != resource.RLIM_INFINITY:
            signs.add(sign)
            facts.append(f"{name} {soft >> 20} MiB")
    group = group_of()
    if group.memory_limit is not None:
        facts.append(f"cgroup limit {group.memory_limit >> 20} MiB, used {group.memory_used >> 20} MiB")
    return Facts(tuple(facts), frozenset(signs))
