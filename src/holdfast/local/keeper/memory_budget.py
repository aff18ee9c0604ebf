"""Room: how many workers fit into memory. Which process: the keeper.

The limit is the control group's or the machine's, whichever leaves less. What a worker needs is what the neediest has
had so far at its peak, in private memory since it was ready and in its slots; a worker that does nothing at the moment
will need as much again. So many fit as keep the whole below `FULL`, or leave room for two more.

Two more marks, as the last resort where samples grow later: at `PAUSE` of the limit no batch is begun while another
is being made, and at `SHED` a worker is taken away. They count only where what is left is less than two workers need:
a machine of which others use 85 % is no danger to a loader that needs little.
"""

from collections.abc import Sequence
from pathlib import Path

from holdfast.core.host import Room
from holdfast.system.cgroups import LEAST, PAUSE, MemoryFiles

RESUME, SHED, FULL = 0.75, 0.90, 0.90
# Above this the neediest worker is killed, to be started again later: better one of ours, with nothing lost, than
# whom the kernel picks.
CRITICAL = 0.97
# A worker that was taken away is given back after so long in which it would have fitted; one at a time.
CALM_S = 5.0
# Where less than this is left for each worker at the start, the others wait for the first batch of the first one.
CAREFUL = 2 << 30


class MemoryBudget:
    """`need`: what a worker needed in an earlier epoch; 0 when that is not known. `said`: what was told last; at first
    how many may begin.
    """

    def __init__(self, workers: int, need: int = 0, first: int | None = None, root: Path = Path("/")) -> None:
        self._workers = workers
        self._files = MemoryFiles(root)
        self.need = need
        self._known = bool(need)
        self._calm_since: float | None = None
        self.limit, self.used = self._files.read(0.0)
        self.said = Room(self._first() if first is None else first, False)

    def _first(self) -> int:
        if self.need:
            return self._fitting(self.used)
        return 1 if self.tight else self._workers

    def _fitting(self, alone: int) -> int:
        need = max(LEAST, self.need)
        reserve = min((1 - FULL) * self.limit, 2 * need)  # the trainer may grow, too
        return max(1, min(self._workers, int((self.limit - reserve - alone) // need)))

    @property
    def tight(self) -> bool:
        """Little is left for each worker: look closely."""
        return (self.limit - self.used) < self._workers * max(CAREFUL, 2 * self.need)

    @property
    def critical(self) -> bool:
        """The kernel is about to kill somebody of its own choice."""
        return self.used >= CRITICAL * self.limit and self.limit - self.used < max(LEAST, self.need)

    def facts(self) -> tuple[str, ...]:
        """The sum, in words."""
        return (
            f"{self.used >> 20} of {self.limit >> 20} MiB in use",
            f"a worker needs up to {self.need >> 20} MiB",
            f"{self._workers} workers are wanted, {self.said.workers} fit",
        )

    def look(self, now: float, lives: Sequence[tuple[int, int]], proven: bool) -> Room | None:
        """Once in a tick. `lives`: (grown by now, at most) of each worker; `proven`: one has done a batch. What
        changed, if something did.
        """
        self.limit, self.used = self._files.read(RESUME)
        said = self.said
        if proven or self._known:
            self.need = max([self.need, *(most for _, most in lives)])
        share, left = self.used / self.limit, self.limit - self.used
        danger = left < 2 * max(LEAST, self.need)
        paused = danger and share >= (RESUME if said.paused else PAUSE)
        fits = said.workers
        if proven or self._known:
            grown = sum(now for now, _ in lives)
            fits = self._fitting(self.used - grown)
            if fits < said.workers:  # file pages may be in it, which the kernel gives back
                self.limit, self.used = self._files.read(0.0)
                fits = self._fitting(self.used - grown)
            if self._known and fits > said.workers:
                fits = self._after_a_while(now, paused)
            else:
                self._calm_since = None
            self._known = True
        if danger and share >= SHED:
            fits = max(1, min(fits, len(lives) - 1))
        self.said = Room(fits, paused)
        return self.said if self.said != said else None

    def _after_a_while(self, now: float, paused: bool) -> int:
        """One more, when it has been calm for long enough."""
        if paused or self._calm_since is None:
            self._calm_since = None if paused else now
        elif now - self._calm_since >= CALM_S:
            self._calm_since = now
            return self.said.workers + 1
        return self.said.workers
