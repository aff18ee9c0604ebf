"""Which samples broke a batch, in words; and what the policy makes of them."""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from holdfast import Policy
from holdfast.core.host import JOB_WORDS, STAGE
from holdfast.core.messages import Stage
from holdfast.loader.collation import Collator, compare
from holdfast.loader.fetch import Draw, SampleFailed, Trouble, everything
from holdfast.remote_exception import Raised
from holdfast.system.evidence import Sign

Pair = namedtuple("Pair", "left right")


@dataclass
class Scan:
    image: object


def ones(*shape, dtype=None):
    return torch.ones(shape, dtype=dtype)


def told(samples):
    return compare(samples, [f"index {10 + place}" for place in range(len(samples))]).told(
        [f"index {10 + place}" for place in range(len(samples))]
    )


@pytest.mark.parametrize(
    ("usual", "odd", "text"),
    [
        (ones(3), ones(4), "index 11 is (4,); the other 3 are (3,)"),
        ({"a": ones(3)}, {"a": ones(4)}, "index 11: ['a'] is (4,); the other 3 are (3,)"),
        ({"a": [1, ones(3)]}, {"a": [1, ones(4)]}, "index 11: ['a'][1] is (4,); the other 3 are (3,)"),
        (Pair(1, ones(3)), Pair(1, ones(4)), "index 11: .right is (4,); the other 3 are (3,)"),
        (Scan(ones(3)), Scan(ones(4)), "index 11: .image is (4,); the other 3 are (3,)"),
        (np.ones(3), np.ones(3, np.int8), "index 11 is int8; the other 3 are float64"),
        (ones(3), ones(4, dtype=torch.int8), "index 11 is int8 (4,); the other 3 are float32 (3,)"),
        (ones(3), None, "index 11 is None; the other 3 are Tensor float32 (3,)"),
        (ones(3), np.ones(3, np.float32), "index 11 is ndarray; the other 3 are Tensor"),
        (5, "five", "index 11 is str; the other 3 are int or float"),
        ([1, 2], [1, 2, 3], "index 11 is of length 3; the other 3 are of length 2"),
        ({"a": 1, "b": 2}, {"a": 1}, "index 11: ['b'] is missing; the other 3 are int or float"),
        ({"a": 1}, {"a": 1, "b": 2}, "index 11: ['b'] is int or float; the other 3 have none"),
        ({"a": {"b": 1}}, {"a": None}, "index 11: ['a'] is None; the other 3 are dict"),
    ],
    ids=str,
)
def test_the_odd_sample_is_named(usual, odd, text):
    """By its index, the path inside it, what it has, and what the others have. Nothing else is said."""
    assert told([usual, odd, usual, usual]) == (text,)


@pytest.mark.parametrize(
    "samples",
    [[1, 2.5, True, np.float32(3)], ["a", "long"], [{"a": b"x"}, {"a": b"yz"}]],
    ids=["numbers", "str", "bytes"],
)
def test_what_torch_takes_together_is_alike(samples):
    default_collate(samples)
    assert told(samples) == ()


def test_without_a_majority_nobody_is_odd():
    assert told([ones(3), ones(4), ones(3), ones(4)]) == ("2 are (3,), 2 are (4,) (compare index 10 with index 11)",)
    assert told([{"a": ones(i)} for i in range(8)]) == (
        "['a']: 1 are (0,), 1 are (1,), 1 are (2,), 1 are (3,), 1 are (4,), 3 more kinds "
        "(compare index 10 with index 11)",
    )


def test_of_many_odd_ones_the_first_are_told():
    texts = told([ones(3)] * 9 + [ones(4)] * 7)
    assert len(texts) == 6 and texts[-1] == "and 2 more"


def test_a_sample_of_very_many_parts_is_looked_at_less_deeply():
    """In all samples alike: nothing is called missing that was only not looked at."""
    large = {"a": [[0] * 100] * 1000, "b": 1}
    assert told([large, {"a": large["a"]}, large]) == ("index 11: ['b'] is missing; the other 2 are int or float",)


# Under the policy ----------------------------------------------------------------------------------------------------


def collator(policy="skip", *, collate=default_collate, words=None, spares=(), auto_collation=True):
    """`spares`: index and sample."""
    return Collator(
        collate,
        auto_collation,
        Policy(bad_sample=policy),
        [0] * JOB_WORDS if words is None else words,
        everything,
        default=collate is default_collate,
        spares=lambda position, draw: ((index, sample, None) for index, sample in spares),
    )


def made(samples, policy="skip", troubles=(), draw=None, **more):
    """The batch, and what is told: (position, index, fate, spare, how it differs)."""
    found = list(troubles)
    draw = Draw(-1, range(10, 10 + len(samples))) if draw is None else draw
    batch = collator(policy, **more).batch(samples, found, draw)
    return batch, [(t.position, t.index, t.fate, t.replaced_by, t.raised.facts[0]) for t in found[len(troubles) :]]


ODD = "index 12 is (4,); the other 3 are (3,)"
SAMPLES = [ones(3), ones(3) * 2, ones(4), ones(3) * 4]


def test_one_that_differs_is_left_out():
    batch, told = made(SAMPLES)
    assert batch[:, 0].tolist() == [1, 2, 4]
    assert told == [(2, 12, "skipped", None, ODD)]


def test_or_replaced_by_a_spare_that_fits():
    batch, told = made(SAMPLES, "replace", spares=[(70, ones(5)), (71, None), (72, ones(3) * 7)])
    assert batch[:, 0].tolist() == [1, 2, 7, 4]
    assert told == [(2, 12, "replaced", 72, ODD)]


def test_what_is_told_has_the_error_of_its_own_pair():
    """Here the batch as a whole fails at the None."""
    found = []
    collator().batch([ones(3), None, ones(4), ones(3), ones(3)], found, Draw(-1, range(5)))
    assert [(t.index, t.raised.type_name, t.stage) for t in found] == [
        (1, "TypeError", Stage.COLLATE),
        (2, "RuntimeError", Stage.COLLATE),
    ]
    assert all(Sign.UNLIKE in t.raised.signs for t in found)


def failure(samples, policy="skip", **more):
    """What is raised; that nothing is told of is checked, too."""
    troubles = []
    with pytest.raises(SampleFailed) as caught:
        collator(policy, **more).batch(samples, troubles, Draw(-1, range(10, 10 + len(samples))))
    assert troubles == []
    assert (caught.value.position, caught.value.stage) == (-1, Stage.COLLATE)
    return caught.value


def test_by_default_the_error_is_raised_and_names_it():
    failed = failure(SAMPLES, "raise")
    assert type(failed.error) is RuntimeError and failed.__cause__ is failed.error
    assert failed.error.__notes__ == [ODD] and failed.facts == ((ODD,), {Sign.UNLIKE})


@pytest.mark.parametrize("policy", ["skip", "replace"])
def test_where_nobody_can_tell_the_error_is_raised(policy):
    failed = failure([ones(3), ones(4)] * 2, policy, spares=[(70, ones(3))])
    assert failed.facts.texts == ("2 are (3,), 2 are (4,) (compare index 10 with index 11)",)


def test_a_tie_is_not_broken_by_leaving_others_out():
    samples = [{"a": ones(3 + i % 2), "b": 1} for i in range(8)]
    samples[0]["b"] = "odd"
    failed = failure(samples)
    assert failed.facts.texts == (
        "index 10: ['b'] is str; the other 7 are int or float",
        "['a']: 4 are (3,), 4 are (4,) (compare index 10 with index 11)",
    )


def test_where_no_spare_fits_the_error_is_raised():
    assert failure(SAMPLES, "replace", spares=[(70, ones(5))]).facts.texts == (ODD,)


@pytest.mark.parametrize("place", [0, 2])
def test_more_keys_are_harmless_behind_the_first_sample(place):
    """Torch goes by the keys of the first."""
    samples = [{"a": ones(3)} for _ in range(5)]
    samples[place]["more"] = 1
    assert [position for position, *_ in made(samples)[1]] == ([0] if place == 0 else [])
    samples[3]["a"] = None
    assert [position for position, *_ in made(samples)[1]] == ([0, 3] if place == 0 else [3])


def test_who_only_is_odd_did_not_break_it():
    samples = [ones(3), ones(3, dtype=torch.float64), ones(4), ones(3), ones(3)]
    assert [index for _, index, *_ in made(samples)[1]] == [12]
    assert failure(samples, "raise").facts.texts == ("index 12 is float32 (4,); 3 of 5 are float32 (3,)",)


def test_what_differs_is_not_blamed_for_what_all_have():
    samples = [{"image": Scan(1), "label": ones(1)} for i in range(4)]
    samples[1]["label"] = ones(1, dtype=torch.float64)
    texts = ("['image'] is of type Scan, which default_collate does not know",)
    assert failure(samples).facts == (texts, frozenset())
    samples[2]["label"] = ones(1, dtype=torch.float64)
    assert failure(samples).facts == (texts, frozenset())


def test_an_object_that_no_sample_can_be_stacked_with():
    failed = failure([{"image": Scan(1), "label": i} for i in range(4)])
    assert failed.facts.texts == ("['image'] is of type Scan, which default_collate does not know",)


def test_an_error_of_the_users_collate_fn_is_raised_with_the_comparison():
    def refuse(samples):
        raise ValueError("bad")

    words = [0] * JOB_WORDS
    failed = failure(SAMPLES, collate=refuse, words=words)
    assert type(failed.error) is ValueError and failed.error.__notes__ == [ODD]
    assert failed.facts == ((ODD,), frozenset()) and words[STAGE] == Stage.COLLATE
    assert not hasattr(failure([1, 2], collate=refuse).error, "__notes__")


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(24, "Too many open files"), RuntimeError("can't allocate memory")]
)
def test_what_the_process_lacks_is_no_samples_fault(error, monkeypatch):
    def refuse(samples):
        raise error

    found = Collator(refuse, True, Policy(bad_sample="skip"), [0] * JOB_WORDS, everything, default=True)
    with pytest.raises(SampleFailed) as caught:
        found.batch(SAMPLES, [], Draw(-1, range(4)))
    assert caught.value.facts.texts == ()


def test_samples_that_were_left_out_or_replaced_before_keep_their_names():
    nothing = Raised("", "", "", None, None)
    before = [Trouble(0, 10, 1, 0.0, nothing, "skipped"), Trouble(3, 13, 1, 0.0, nothing, "replaced", 70)]
    samples = [ones(3), ones(3), ones(4), ones(3)]  # of 11, 12, 70, 14
    _, told = made(samples, troubles=before, draw=Draw(-1, range(10, 15)))
    assert told == [(3, 70, "skipped", None, "index 70 is (4,); the other 3 are (3,)")]
    _, told = made(samples, draw=Draw(-1, [11, 12, 13, 14], positions=[1, 2, 3, 4]))
    assert told == [(3, 13, "skipped", None, "index 13 is (4,); the other 3 are (3,)")]


def test_of_samples_that_nobody_can_name_none_is_left_out():
    """`__getitems__` gave more than were asked for."""
    with pytest.raises(SampleFailed) as caught:
        collator().batch(SAMPLES, [], Draw(-1, [1, 2]))
    assert caught.value.facts.texts == ("sample 2 of the batch is (4,); the other 3 are (3,)",)


def test_a_sample_that_is_no_batch_is_compared_with_nothing():
    failed = failure(SAMPLES, collate=lambda sample: 1 / 0, auto_collation=False)
    assert failed.facts.texts == ()


class Hostile:
    @property
    def shape(self):
        raise SystemExit(3)


def test_a_sample_that_raises_when_it_is_compared_hides_no_error():
    failed = failure([1, Hostile()])
    assert type(failed.error) is RuntimeError and failed.facts.texts == ()


def test_items_of_a_stream_are_named_by_their_places():
    found = []
    batch = collator().batch(SAMPLES, found)
    assert len(batch) == 3
    assert [(t.position, t.index, t.raised.facts[0]) for t in found] == [
        (2, None, "item 2 of the batch is (4,); the other 3 are (3,)")
    ]
