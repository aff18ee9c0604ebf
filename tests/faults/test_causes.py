"""The first finding of every cause that can be made here is the right one, with its evidence."""

import json

import pytest

from .causes import CAUSES, all_of, matrix, missing, named, still_wrong, wrong_about


def asked_for(request, fixture):
    """The causes of the tests that use this fixture, if they can be made here."""
    items = [item for item in request.session.items if fixture in item.fixturenames]
    causes = {item.callspec.params["cause"].name: item.callspec.params["cause"] for item in items}
    return [cause for cause in causes.values() if not missing(cause)]


@pytest.fixture(scope="module")
def told(request):
    """By cause: what was named, and all that was said. Made before the first test, two at a time."""
    return {cause.name: answer for cause, answer in all_of(asked_for(request, "told"), named)}


@pytest.fixture(scope="module")
def wrong_after(request):
    """By cause: what its advice does not help against."""
    return {cause.name: answer for cause, answer in all_of(asked_for(request, "wrong_after"), still_wrong)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_the_cause_is_named(cause, told):
    if why := missing(cause):
        pytest.skip(why)
    finding, said = told[cause.name]
    assert not wrong_about(cause, finding, said), said


@pytest.mark.timeout(900)
@pytest.mark.parametrize("cause", [c for c in CAUSES if c.heeded is not None], ids=lambda cause: cause.name)
def test_the_advice_helps(cause, told, wrong_after):
    """It is followed on the case that it was given for: no batch is lost any more, or the finding is gone."""
    if why := missing(cause):
        pytest.skip(why)
    finding, said = told[cause.name]
    assert finding == cause.finding
    assert cause.heeded.advice in json.loads(said)["advice"]
    if not cause.heeded.gone:
        assert json.loads(said)["batches_lost"], "there is nothing to help against"
    assert not wrong_after[cause.name], wrong_after[cause.name]


def test_the_matrix_shows_what_lies_off_its_diagonal():
    pairs = [("a", "a"), ("a", "a"), ("b", "c")]
    assert matrix(pairs) == ["       1  2  3", "  1 a  2  .  .", "  2 b  .  .  1", "  3 c  .  .  ."]
