"""Control groups, versions 1 and 2: which limits and counters apply to a process.

A process in a container may see a path that does not exist in its own mount of the hierarchy; then the mount's root
is what applies to it. `root` and `proc` can be other folders than the real ones, for tests.
"""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
# Version 1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class Group:
    """What holds for one process. None where nothing is set, or nothing can be read."""

    memory_limit: int | None = None
    memory_used: int | None = None
    oom_kills: int | None = None
    """How many processes of this group the kernel has killed for memory so far."""
    pids_limit: int | None = None
    pids_used: int | None = None


def group_of(pid: int | str = "self", root: Path = ROOT, proc: Path = PROC) -> Group:
    """The groups of a process; an empty Group when it is gone or has none."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return Group()
    paths = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    if "memory" in paths or "pids" in paths:
        return _version_1(paths, root)
    return _version_2(paths.get("", "/"), root)


def _version_1(paths: dict[str, str], root: Path) -> Group:
    memory = _folders(root / "memory", paths.get("memory", "/"))
    pids = _folders(root / "pids", paths.get("pids", "/"))
    return Group(
        memory_limit=_least(memory, "memory.limit_in_bytes"),
        memory_used=_number(memory[0] / "memory.usage_in_bytes"),
        oom_kills=_field(memory[0] / "memory.oom_control", "oom_kill"),
        pids_limit=_least(pids, "pids.max"),
        pids_used=_number(pids[0] / "pids.current"),
    )


def _version_2(path: str, root: Path) -> Group:
    top = root / "unified" if (root / "unified").is_dir() else root
    folders = _folders(top, path)
    return Group(
        memory_limit=_least(folders, "memory.max"),
        memory_used=_number(folders[0] / "memory.current"),
        oom_kills=_field(folders[0] / "memory.events", "oom_kill"),
        pids_limit=_least(folders, "pids.max"),
        pids_used=_number(folders[0] / "pids.current"),
    )


def _folders(top: Path, path: str) -> list[Path]:
    """The group's own folder, then those above it: each of them limits it."""
    own = top / path.lstrip("/")
    if not own.is_dir():
        own = top
    folders = [own]
    while folders[-1] != top:
        folders.append(folders[-1].parent)
    return folders


def _least(folders: list[Path], name: str) -> int | None:
    limits = [n for n in (_number(folder / name) for folder in folders) if n is not None and n < _NO_LIMIT]
    return min(limits, default=None)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not there; or "max"
        return None


def _field(file: Path, name: str) -> int | None:
    try:
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass  # an older kernel, or not ours to read
    return None
