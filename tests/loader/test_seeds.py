"""Seeds of batches: what the generators are seeded with, and that it is good."""

import random
from itertools import pairwise

import pytest

from holdfast.loader import seeds
from holdfast.loader.seeds import Seeder, mix


@pytest.fixture(autouse=True)
def put_back():
    state = random.getstate()
    yield
    random.setstate(state)


@pytest.mark.parametrize("seed", [0, 1, 12345, 1 << 32, (1 << 64) - 1, mix(7, 8)])
def test_pythons_generator_is_seeded_as_its_own_seed_does(seed):
    random.gauss(0, 1)  # which keeps another one for the next time
    seeds._seed_random(seed)
    state = random.getstate()
    random.seed(seed)
    assert state == random.getstate()


def test_numbers_of_neighbouring_batches_have_nothing_to_do_with_each_other():
    seeder, firsts, bits = Seeder(), [], []
    for batch in range(2000):
        seeder.seed(42, batch)
        firsts.append(random.random())
        bits.append(random.getrandbits(64).bit_count())
    assert len(set(firsts)) == len(firsts)
    assert 0.47 < sum(firsts) / len(firsts) < 0.53
    assert 31 < sum(bits) / len(bits) < 33
    pairs = list(pairwise(firsts))
    assert abs(sum((a - 0.5) * (b - 0.5) for a, b in pairs) / len(pairs)) < 0.01
