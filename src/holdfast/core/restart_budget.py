"""RestartBudget: how many deaths are too many. It counts each worker's deaths since the last progress of any worker.

Progress is a finished batch, or a position in a batch that was not reached before. A worker that never comes up uses up
a budget of its own: what kills it then is there each time.
"""

from collections import Counter

from holdfast.policy import Policy

# Deaths in a row before a worker ever came up.
BOOT_DEATHS = 5


class RestartBudget:
    """`restarts`: see the policy."""

    def __init__(self, workers: int, restarts: int) -> None:
        self._restarts = restarts
        self.stalled = False  # a worker died since the last progress
        self._stalls = [0] * workers  # deaths of each worker since then
        self._stalled_on: Counter[tuple[int, int]] = Counter()  # (task, position) -> deaths there since then
        self._boot_deaths = [0] * workers

    def progress(self) -> None:
        """A worker came further. This is on the way of every batch: look at `stalled` first."""
        self.stalled = False
        self._stalled_on.clear()
        self._stalls = [0] * len(self._stalls)

    def booted(self, worker: int) -> None:
        """It came up."""
        self._boot_deaths[worker] = 0

    def died_in_boot(self, worker: int) -> None:
        """It did not come up."""
        self._boot_deaths[worker] += 1

    def died(self, worker: int, on: tuple[int, int] | None) -> None:
        """It died. `on`: (task, position)."""
        if on is not None:
            self._stalled_on[on] += 1
        self.stalled = True
        self._stalls[worker] += 1

    def is_out(self, worker: int) -> bool:
        """This worker has died too often."""
        boots = min(BOOT_DEATHS, self._restarts)
        return self._stalls[worker] > self._restarts or self._boot_deaths[worker] > boots

    def is_stuck_on(self, worker: int, on: tuple[int, int], hardly_chance: bool) -> bool:
        """All of this worker's deaths since the last progress fell on this place. `hardly_chance`: most are enough."""
        here, all_of_them = self._stalled_on[on], self._stalls[worker]
        return here == all_of_them or (hardly_chance and 2 * here > all_of_them)


# BadSampleBreaker: opens when a larger share than `max_bad` of the samples seen so far is bad.


# Below this many samples a share says nothing, and the breaker never opens.
BREAKER_LEAST = 20


class BadSampleBreaker:
    """The ledger counts `seen` and `bad` up directly: that is on the way of every batch."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.seen = 0
        self.bad = 0

    @property
    def is_open(self) -> bool:
        """Ask this when a sample was bad."""
        if self._policy.bad_sample == "raise" or self.seen < BREAKER_LEAST:
            return False
        return self.bad > self._policy.max_bad * self.seen
