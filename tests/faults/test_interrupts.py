"""Signal handlers that raise inside next() and iter() lose nothing without a word. More: `make soak-interrupts`."""

import pytest

from .interrupts import ROWS, exact, timed

# Python prints what is raised in the callback of a weak reference, and goes on. So do we.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("row", ROWS)
def test_a_handler_that_raises_at_one_exact_moment_loses_nothing(row):
    """The next call gives the batch that was due, or LoaderTorn; after that a new iter() starts clean."""
    counts = exact(row, 24, seed=list(ROWS).index(row))
    assert counts["given again"] + counts["torn"] > 3


@pytest.mark.parametrize("row", ROWS)
def test_a_timer_whose_handler_raises_loses_nothing(row):
    """The same with the system's own timers, at random moments."""
    counts = timed(row, 30, seed=1)
    assert counts["given again"] + counts["torn"] + counts["in time"] > 20
