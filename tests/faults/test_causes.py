"""The first finding of every cause that can be made here is the right one, with its evidence."""

import pytest

from .causes import CAUSES, all_named, matrix, missing, wrong_about


@pytest.fixture(scope="module")
def told(request):
    """By cause: what was named, and all that was said. Made before the first test, two at a time."""
    wanted = [item.callspec.params["cause"] for item in request.session.items if "told" in item.fixturenames]
    return {cause.name: answer for cause, *answer in all_named([c for c in wanted if not missing(c)])}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_the_cause_is_named(cause, told):
    if why := missing(cause):
        pytest.skip(why)
    finding, said = told[cause.name]
    assert not wrong_about(cause, finding, said), said


def test_the_matrix_shows_what_lies_off_its_diagonal():
    pairs = [("a", "a"), ("a", "a"), ("b", "c")]
    assert matrix(pairs) == ["       1  2  3", "  1 a  2  .  .", "  2 b  .  .  1", "  3 c  .  .  ."]
