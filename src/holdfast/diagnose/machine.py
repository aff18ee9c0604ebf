"""What this machine grants a training run: limits, cgroups, memory, processors. Read once, judged in machine_checks.py.

Everything is read below one root, so that a test can lay out a machine as a tree of files. A value of None means
unlimited, or not to be found. Nothing here has an opinion.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.system.cgroups import ControlGroup, group_of, number_in, text_of

Limit = tuple[int | None, int | None]
"""Soft and hard."""

_NO_LIMIT: Limit = (None, None)
_LIMIT_NAMES = {
    "Max open files": "nofile",
    "Max processes": "nproc",
    "Max address space": "address_space",
    "Max data size": "data",
    "Max locked memory": "memlock",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One reading. The defaults are a healthy machine, so that a test names only what it is about."""

    nofile: Limit = (65_536, 1_048_576)
    nproc: Limit = _NO_LIMIT
    address_space: Limit = _NO_LIMIT
    data: Limit = _NO_LIMIT
    memlock: Limit = _NO_LIMIT
    cgroup: ControlGroup = field(default_factory=ControlGroup)
    memory_total: int = 64 << 30
    memory_available: int = 48 << 30
    swap_total: int = 0
    swap_free: int = 0
    shm_total: int | None = 32 << 30
    shm_free: int | None = 32 << 30
    cpus_online: int = 8
    cpus_allowed: int = 8
    hugepages: str = "madvise"
    ptrace_scope: int | None = 0
    overcommit: int = 0
    commit_left: int = 64 << 30
    own_data: int = 1 << 30
    tasks_of_user: int = 100
    root: bool = False
    infiniband: bool = False

    @property
    def cpus(self) -> int:
        """Processors that this process can really use: affinity and quota together, one at least."""
        quota = self.cgroup.cpus
        return max(1, self.cpus_allowed if quota is None else min(self.cpus_allowed, int(quota + 0.5)))

    @property
    def memory_free(self) -> int:
        """Bytes that can still be allocated: in the host or in the cgroup, whichever has less."""
        limit = self.cgroup.memory_limit
        if limit is None:
            return self.memory_available
        return min(self.memory_available, max(0, limit - self.cgroup.memory_used))


def read_machine(root: Path = Path("/")) -> Machine:
    """The machine as it is now; `root` is where proc, sys and dev lie."""
    proc = root / "proc"
    memory = _table(proc / "meminfo")
    limits = _limits(proc / "self/limits")
    shm_total, shm_free = _space(root / "dev/shm")
    allowed = _cpu_list(_words_after(proc / "self/status", "Cpus_allowed_list:"))
    return Machine(
        **limits,
        cgroup=group_of(root=root),
        memory_total=memory.get("MemTotal", 0),
        memory_available=memory.get("MemAvailable", memory.get("MemFree", 0)),
        swap_total=memory.get("SwapTotal", 0),
        swap_free=memory.get("SwapFree", 0),
        shm_total=shm_total,
        shm_free=shm_free,
        cpus_online=_cpu_list(text_of(root / "sys/devices/system/cpu/online")) or os.cpu_count() or 1,
        cpus_allowed=allowed or os.cpu_count() or 1,
        hugepages=_chosen(text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        ptrace_scope=number_in(text_of(proc / "sys/kernel/yama/ptrace_scope")),
        overcommit=number_in(text_of(proc / "sys/vm/overcommit_memory")) or 0,
        commit_left=max(0, memory.get("CommitLimit", 0) - memory.get("Committed_AS", 0)),
        own_data=_table(proc / "self/status").get("VmData", 0),
        tasks_of_user=_tasks_of(os.getuid(), proc),
        root=os.geteuid() == 0,
        infiniband=_has_entries(root / "sys/class/infiniband"),
    )


# Small files ---------------------------------------------------------------------------------------------------------


def _table(path: Path) -> dict[str, int]:
    """meminfo and status: "Name:  123 kB" in bytes."""
    found = {}
    for line in text_of(path).splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith(" kB"):
            found[name] = int(rest.split()[0]) * 1024
    return found


def _words_after(path: Path, start: str) -> str:
    return next((line[len(start) :].strip() for line in text_of(path).splitlines() if line.startswith(start)), "")


def _limits(path: Path) -> dict[str, Limit]:
    found: dict[str, Limit] = {}
    for line in text_of(path).splitlines():
        for title, name in _LIMIT_NAMES.items():
            if line.startswith(title):
                words = line[len(title) :].split()
                found[name] = (number_in(words[0]), number_in(words[1]))
    return found


def _cpu_list(text: str) -> int:
    """How many processors "0-3,8" names."""
    count = 0
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.strip().isdigit():
            count += int(last or first) - int(first) + 1
    return count


def _chosen(text: str) -> str:
    """ "madvise" of "always [madvise] never"."""
    return text.partition("[")[2].partition("]")[0] or "unknown"


def _space(path: Path) -> tuple[int | None, int | None]:
    try:
        about = os.statvfs(path)
    except OSError:
        return None, None
    return about.f_blocks * about.f_frsize, about.f_bavail * about.f_frsize


def _has_entries(path: Path) -> bool:
    try:
        return any(path.iterdir())
    except OSError:
        return False


def _tasks_of(uid: int, proc: Path) -> int:
    """Threads of this user: what RLIMIT_NPROC counts."""
    count = 0
    for entry in proc.iterdir() if proc.is_dir() else ():
        try:
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                count += len(os.listdir(entry / "task"))
        except OSError:
            continue  # it has ended meanwhile
    return count
