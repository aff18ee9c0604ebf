"""Python's `random` is seeded by a way of our own: the same state with a compiler and without, a good one."""

import random
from itertools import pairwise

import pytest

from holdfast.loader import seeds
from holdfast.loader.seeds import Seeder, mix

compiled_only = pytest.mark.skipif(seeds.fill is None, reason="built without a compiler")


@pytest.fixture(autouse=True)
def put_back():
    state = random.getstate()
    yield
    random.setstate(state)


@compiled_only
def test_the_compiled_way_is_taken():
    assert seeds._QUICK


@compiled_only
@pytest.mark.parametrize("seed", [0, 1, 12345, 1 << 32, (1 << 64) - 1, *(mix(7, n) for n in range(20))])
def test_both_ways_lead_to_the_same_state(monkeypatch, seed):
    states = []
    for quick in (True, False):
        monkeypatch.setattr(seeds, "_QUICK", quick)
        random.gauss(0, 1)  # which keeps another one for the next time
        random.random()
        seeds._seed_random(seed)
        states.append(random.getstate())
    assert states[0] == states[1]
    _, words, gauss = states[0]
    assert len(set(words)) > 600 and gauss is None


@compiled_only
def test_a_python_whose_generators_look_different_is_noticed(monkeypatch):
    monkeypatch.setattr(seeds, "fill", lambda trial, seed: None)
    assert not seeds._knows_its_way()
    monkeypatch.undo()
    monkeypatch.setattr(seeds, "_THE_ONE", object())
    assert not seeds._knows_its_way()
    monkeypatch.setattr(seeds, "_RANDOM", type("Larger", (seeds._RANDOM,), {"__slots__": ("more",)}))
    assert not seeds._knows_its_way()


@compiled_only
def test_what_is_no_seed_is_refused():
    for bad in (-1, 1 << 64, "1"):
        with pytest.raises((OverflowError, TypeError)):
            seeds.fill(seeds._THE_ONE, bad)
    with pytest.raises(TypeError):
        seeds.fill(seeds._THE_ONE)


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
