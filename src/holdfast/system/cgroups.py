"""Control groups, versions 1 and 2 or the two side by side: which limits and counters apply to a process.

If groups are nested, the tightest limit counts. In a container the path may be the host's and not be there; then the
mount itself applies. Everything is read below `root`, so that a test can lay out a machine as a tree of files.
"""

import errno
import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Version 1 writes "unlimited" as the largest multiple of a page; nobody has an exbibyte.
_V1_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlGroup:
    """What the groups of one process allow. None: unlimited, or not to be found."""

    version: int = 0
    memory_limit: int | None = None
    memory_used: int = 0
    """Without file pages that the kernel gives back at once."""
    oom_kills: int | None = None
    """How many processes of this group the kernel has killed for memory so far."""
    pids_max: int | None = None
    pids_now: int = 0
    cpus: float | None = None


def group_of(pid: int | str = "self", root: Path = Path("/")) -> ControlGroup:
    """A controller of version 1 is asked first."""
    levels = _levels(pid, root)
    version, groups = levels("memory")
    limit, used = _memory(version, groups)
    pids_max, pids_now = _pids(levels("pids")[1])
    return ControlGroup(
        version=version,
        memory_limit=limit,
        memory_used=used,
        oom_kills=_oom_kills(version, groups),
        pids_max=pids_max,
        pids_now=pids_now,
        cpus=_cpus(levels("cpu")[1]),
    )


def oom_kills() -> int | None:
    """How many processes of this process's groups the kernel has killed for memory."""
    return _oom_kills(*_levels("self", Path("/"))("memory"))


def usable_cpus() -> int:
    """Processors that this process may use: by its affinity, and by the quota of its groups."""
    here = len(os.sched_getaffinity(0))
    quota = _cpus(_levels("self", Path("/"))("cpu")[1])
    return max(1, here if quota is None else min(here, math.ceil(quota)))


# The share of the memory from which on no batch is begun while another is being made.
PAUSE = 0.80
# No worker needs less than this: the arithmetic must not end in hundreds of workers.
LEAST = 32 << 20


class MemoryFiles:
    """Limit and use of the memory that this process lives in: its groups', or the machine's.

    It is made for ten calls a second: what does not change is read once.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        version, groups = _levels("self", root)("memory")
        limit_name, used_name, self._cached = _NAMES[version]
        limits = [(number_in(text_of(group / limit_name)), group) for group in groups]
        self._groups = [
            (limit, group / used_name, group / "memory.stat")
            for limit, group in limits
            if limit is not None and limit < _V1_UNLIMITED
        ]
        self._machine = root / "proc/meminfo"
        self._last: tuple[int, int] | None = None

    def read(self, near: float) -> tuple[int, int]:
        """(limit, used) of whichever has least left. Below the share `near`, what the kernel would give back counts
        as used: to know it takes longer. While this process can open no file, it stays as it was last.
        """
        try:
            lines = self._machine.read_text().split("\n", 3)  # MemTotal, MemFree, MemAvailable
        except OSError as error:
            if self._last is None or error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            return self._last
        total, _, free = (int(line.split()[1]) << 10 for line in lines[:3])
        tightest = (total, total - free)
        for limit, used_file, stat in self._groups:
            used = number_in(text_of(used_file)) or 0
            if used >= near * limit:
                used = max(0, used - sum(_field(stat, name) or 0 for name in self._cached))
            if limit - used < tightest[0] - tightest[1]:
                tightest = (limit, used)
        self._last = tightest
        return tightest


def growth_bytes(wanted: int | str | None, workers: int) -> int | None:
    """What a worker may allocate beyond what it has when it is ready. "auto": its share of what is free now."""
    if wanted != "auto":
        assert not isinstance(wanted, str)
        return wanted
    limit, used = MemoryFiles().read(0.0)
    return max(LEAST, int(PAUSE * (limit - used)) // workers)


# What they are called in each version: limit, use, and file pages that the kernel gives back when they are needed.
_NAMES = {
    0: ("", "", ("",)),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def _levels(pid: int | str, root: Path) -> Callable[[str], tuple[int, list[Path]]]:
    """For a controller: its version, and the process's group and those around it."""
    base = root / "sys/fs/cgroup"
    old: dict[str, tuple[str, str]] = {}  # controller -> (all that are mounted with it, path)
    unified: str | None = None
    for line in text_of(root / f"proc/{pid}/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            unified = path
        for controller in controllers.split(","):
            old[controller] = (controllers, path)

    def levels(controller: str) -> tuple[int, list[Path]]:
        if controller in old:
            together, path = old[controller]
            for name in (controller, together):
                if (base / name).is_dir():
                    return 1, list(_upwards(base / name, path))
        if unified is None:
            return 0, []
        for mount in (base / "unified", base):
            if (mount / "cgroup.controllers").exists():
                return 2, list(_upwards(mount, unified))
        return 0, []

    return levels


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """A group and those around it."""
    group = mount / path.lstrip("/")
    while group != mount and mount in group.parents:
        if group.is_dir():
            yield group
        group = group.parent
    yield mount


def _memory(version: int, groups: list[Path]) -> tuple[int | None, int]:
    """Limit and use of the group with the least left."""
    limit_name, used_name, cached_names = _NAMES[version]
    tightest: tuple[int | None, int] = (None, 0)
    for group in groups:
        limit = number_in(text_of(group / limit_name))
        if limit is None or limit >= _V1_UNLIMITED:
            continue
        cached = sum(_field(group / "memory.stat", name) or 0 for name in cached_names)
        used = max(0, (number_in(text_of(group / used_name)) or 0) - cached)
        if tightest[0] is None or limit - used < tightest[0] - tightest[1]:
            tightest = (limit, used)
    return tightest


def _oom_kills(version: int, groups: list[Path]) -> int | None:
    """The counter of the process's own group: version 1 counts a kill nowhere else."""
    if not groups:
        return None
    return _field(groups[0] / ("memory.oom_control" if version == 1 else "memory.events"), "oom_kill")


def _pids(groups: list[Path]) -> tuple[int | None, int]:
    tightest: tuple[int | None, int] = (None, 0)
    for group in groups:
        most = number_in(text_of(group / "pids.max"))
        now = number_in(text_of(group / "pids.current")) or 0
        if most is not None and (tightest[0] is None or most - now < tightest[0] - tightest[1]):
            tightest = (most, now)
    return tightest


def _cpus(groups: list[Path]) -> float | None:
    found: list[float] = []
    for group in groups:
        words = text_of(group / "cpu.max").split()
        quota = number_in(words[0]) if words else number_in(text_of(group / "cpu.cfs_quota_us"))
        period = number_in(words[1]) if len(words) > 1 else number_in(text_of(group / "cpu.cfs_period_us"))
        if quota is not None and quota > 0:
            found.append(quota / (period or 100_000))
    return min(found, default=None)


def text_of(path: Path) -> str:
    """What a small file holds; "" for one that is not there, or not for us."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def number_in(text: str) -> int | None:
    """None for "max", "unlimited" and what is not there."""
    try:
        return int(text.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return None


def _field(path: Path, name: str) -> int | None:
    lines = (line.partition(" ") for line in text_of(path).splitlines())
    return next((number_in(value) for key, _, value in lines if key == name), None)


# The kernel's counters of kills for memory. Which process: the keeper.


# A kill that the counters show belongs to a death within this time.
CLAIM_S = 2.0
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Oom:
    """A counter of the kernel's that rose around a death.

    `scope`: "cgroup": that of its own group. "host": that of the machine, where that of its group cannot be read.
    "elsewhere": that of the machine, and not that of its group. The kernel counts each kill in both, so that was
    another process.
    """

    scope: str
    before: int
    after: int


def host_oom_kills() -> int | None:
    """How many processes the kernel has killed for memory on this machine since it started."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
    except OSError:
        return None


class OomWatch:
    """The kernel's counters of kills for memory. A kill that they show explains one death, soon or never."""

    def __init__(self, now: float) -> None:
        self._seen = self._read()
        self._looked = now
        self._kills: deque[tuple[float, Oom]] = deque()
        self.readable = any(count is not None for count in self._seen.values())

    def _read(self) -> dict[str, int | None]:
        return {"cgroup": oom_kills(), "host": host_oom_kills()}

    def look(self, now: float) -> None:
        """At times, so that an old kill of somebody else's is not held for a new one."""
        if now - self._looked >= LOOK_S:
            self._refresh(now)

    def _refresh(self, now: float) -> None:
        self._looked = now
        before, self._seen = self._seen, self._read()
        for scope in ("cgroup", "host"):  # a kill in the group counts for the host too
            was, is_now = before[scope], self._seen[scope]
            if was is not None and is_now is not None and is_now > was:
                known = "host" if before["cgroup"] is None else "elsewhere"
                named = scope if scope == "cgroup" else known
                self._kills += [(now, Oom(named, count, count + 1)) for count in range(was, is_now)]
                break

    def claim(self, now: float) -> Oom | None:
        """A worker was killed: by the kernel for memory? A kill in its own group explains it best."""
        self._refresh(now)
        fresh = [(at, kill) for at, kill in self._kills if now - at <= CLAIM_S]
        best = next((one for one in fresh if one[1].scope == "cgroup"), fresh[0] if fresh else None)
        self._kills = deque(one for one in fresh if one is not best)
        return best[1] if best is not None else None
