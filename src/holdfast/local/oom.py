"""The kernel's counters of kills for memory. Which process: the keeper."""

from collections import deque
from dataclasses import dataclass

from holdfast.local import cgroups

# A kill that the counters show belongs to a death within this time.
CLAIM_S = 2.0
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Oom:
    """A counter of the kernel's that rose around a death. `scope`: "cgroup" or "host"."""

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
    """The kernel's counters of kills for memory. Each kill that they show explains one death, and soon or never."""

    def __init__(self, now: float) -> None:
        self._seen = self._read()
        self._looked = now
        self._kills: deque[tuple[float, Oom]] = deque()
        self.readable = any(count is not None for count in self._seen.values())

    def _read(self) -> dict[str, int | None]:
        return {"cgroup": cgroups.oom_kills(), "host": host_oom_kills()}

    def look(self, now: float) -> None:
        """At times, so that an old kill of somebody else's is not held for a new one."""
        if now - self._looked >= LOOK_S:
            self._refresh(now)

    def _refresh(self, now: float) -> None:
        self._looked = now
        before, self._seen = self._seen, self._read()
        for scope in ("cgroup", "host"):  # a kill for a group's limit counts for the host too
            was, is_now = before[scope], self._seen[scope]
            if was is not None and is_now is not None and is_now > was:
                self._kills += [(now, Oom(scope, count, count + 1)) for count in range(was, is_now)]
                break

    def claim(self, now: float) -> Oom | None:
        """A worker was killed: by the kernel for memory?"""
        self._refresh(now)
        while self._kills:
            at, kill = self._kills.popleft()
            if now - at <= CLAIM_S:
                return kill
        return None
