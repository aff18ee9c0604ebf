"""RestartBudget: the restart budget. It counts the deaths of one worker without progress between them, anybody's.

Progress is a finished batch, or a position in one that was not reached before. A worker that never comes up uses up a
budget of its own: what kills it then is there each time.
"""

from collections import Counter

from holdfast.policy import Policy

# Deaths in a row before a worker ever came up.
BOOT_DEATHS = 5


class RestartBudget:
    """`restarts`: see the policy."""

    def __init__(self, workers: int, restarts: int) -> None:
        self._restarts = restarts
        self.stalled = False  # somebody died since the last progress
        self._stalls = [0] * workers  # deaths of each worker since then
        self._stalled_on: Counter[tuple[int, int]] = Counter()  # (task, position) -> deaths on it since then
        self._boot_deaths = [0] * workers

    def progress(self) -> None:
        """Somebody came further. Asked for every batch: look at `stalled` first."""
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
        """It died, in which position of which task."""
        if on is not None:
            self._stalled_on[on] += 1
        self.stalled = True
        self._stalls[worker] += 1

    def is_out(self, worker: int) -> bool:
        """This worker's deaths are too many."""
        boots = min(BOOT_DEATHS, self._restarts)
        return self._stalls[worker] > self._restarts or self._boot_deaths[worker] > boots

    def is_stuck_on(self, worker: int, on: tuple[int, int], hardly_chance: bool) -> bool:
        """All of this worker's deaths since the last progress fell on this one place; or most, and hardly by chance."""
        here, all_of_them = self._stalled_on[on], self._stalls[worker]
        return here == all_of_them or (hardly_chance and 2 * here > all_of_them)


# BadSampleBreaker: too many samples are bad to go on. It counts those that were seen, and opens past `max_bad` of them.


# It needs something to go by: below this many samples it never opens.
BREAKER_LEAST = 20


class BadSampleBreaker:
    """`seen` may be counted up directly where it is hot."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.seen = 0
        self.bad = 0

    @property
    def is_open(self) -> bool:
        """Asked when a sample was bad."""
        if self._policy.bad_sample == "raise" or self.seen < BREAKER_LEAST:
            return False
        return self.bad > self._policy.max_bad * self.seen
