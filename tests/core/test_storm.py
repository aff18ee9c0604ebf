"""No innocent sample is blamed in a storm, and every poison sample is found. `python -m tests.core.soak` runs more."""

import random

from .storm import storm


def run(first: int, count: int) -> dict[str, int]:
    total = {"epochs": 0, "innocent_blamed": 0, "poison_missed": 0, "gave_up": 0, "deaths": 0}
    for seed in range(first, first + count):
        rng = random.Random(seed)
        low = rng.uniform(1, 10)
        poison = frozenset(rng.sample(range(128), rng.choice([0, 0, 1, 2])))
        outcome = storm(
            seed,
            workers=rng.choice([2, 3, 4]),
            batch=rng.choice([4, 8, 16, 32, 64]),
            sample_ms=(low, rng.uniform(low, 50)),
            poison=poison,
        )
        total["epochs"] += 1
        total["innocent_blamed"] += len(outcome.blamed - poison)
        total["gave_up"] += outcome.gave_up
        total["deaths"] += outcome.deaths
        if not outcome.gave_up:
            total["poison_missed"] += len(poison - outcome.blamed)
            assert outcome.delivered == [i for i in range(128) if i not in outcome.blamed]
    return total


def test_a_thousand_storms():
    """At most one innocent sample in a thousand epochs; all poison found; the run goes on."""
    total = run(0, 1000)
    assert total["innocent_blamed"] <= 1, total
    assert total["poison_missed"] == 0, total
    assert total["gave_up"] <= 2, total


def test_poison_without_a_storm_costs_few_lives():
    """Nobody else dies, so a handful of strikes is proof."""
    for seed in range(50):
        outcome = storm(seed, kill_ms=None, poison=frozenset({70}), sample_ms=(1, 5))
        assert outcome.blamed == {70}
        assert outcome.deaths <= 12
