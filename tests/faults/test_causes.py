"""The first finding of every cause that can be made here is the right one, with its evidence."""

import pytest

from .causes import CAUSES, matrix, missing, named, wrong_about


@pytest.mark.timeout(100)
@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_the_cause_is_named(cause):
    if why := missing(cause):
        pytest.skip(why)
    finding, said = named(cause)
    assert not wrong_about(cause, finding, said), said


def test_the_matrix_shows_what_lies_off_its_diagonal():
    pairs = [("a", "a"), ("a", "a"), ("b", "c")]
    assert matrix(pairs) == ["       1  2  3", "  1 a  2  .  .", "  2 b  .  .  1", "  3 c  .  .  ."]
