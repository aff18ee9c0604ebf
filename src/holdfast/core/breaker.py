"""Breaker: too many samples are bad to go on. It counts those that were seen, and opens past `max_bad` of them."""

from holdfast.policy import Policy

# It needs something to go by: below this many samples it never opens.
BREAKER_LEAST = 20


class Breaker:
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
