"""One worker's stream: each item once, whatever life gives it, and a replay that goes elsewhere is noticed."""

import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch

from holdfast import Policy, StreamBroken
from holdfast.core.host import POSITION, SAMPLES, STAGE
from holdfast.core.messages import Stage
from holdfast.loader import stream as stream_module
from holdfast.loader.fetch import SampleFailed
from holdfast.loader.stream import StreamFetcher, fingerprint
from holdfast.remote_exception import Raised


class Numbers:
    """`length` numbers, each time anew."""

    def __init__(self, length=10, start=0):
        self.length, self.start = length, start

    def __iter__(self):
        return iter(range(self.start, self.start + self.length))


class Fails:
    """An iterator that raises at these, and goes on after them."""

    def __init__(self, length, bad):
        self.length, self.bad, self.at = length, bad, -1

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        if self.at >= self.length:
            raise StopIteration
        if self.at in self.bad:
            raise ValueError(f"bad: {self.at}")
        return self.at


class Knows:
    """It knows its place. `later`: the place that it was given becomes its own when it is iterated."""

    def __init__(self, length=10, later=False):
        self.length, self.later, self.at, self.given = length, later, 0, None

    def __iter__(self):
        self.at = self.given if self.given is not None else self.at
        self.given = None
        while self.at < self.length:
            self.at += 1
            yield self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        if self.later:
            self.given = state["at"]
        else:
            self.at = state["at"]


def generator(items, error=None):
    yield from items
    if error is not None:
        raise error


def fetcher(dataset, *, auto_collation=True, drop_last=False, seeds=None, **policy):
    seed = (lambda number: None) if seeds is None else seeds.append
    return StreamFetcher(dataset, auto_collation, drop_last, Policy(**policy), seed)


def rest(stream, size=4):
    """All batches that are left."""
    batches = []
    while True:
        try:
            batches.append(stream.take(size)[0])
        except StopIteration:
            return batches


# Batches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drop_last", "batches"), [(False, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]), (True, [[0, 1, 2, 3], [4, 5, 6, 7]])]
)
def test_batches_come_in_order_and_are_counted(drop_last, batches):
    stream = fetcher(Numbers(), drop_last=drop_last)
    assert rest(stream) == batches
    assert (stream.number, stream.items, stream.ended) == (len(batches), sum(map(len, batches)), True)


def test_a_stream_that_ends_with_a_batch_has_no_empty_one():
    stream = fetcher(Numbers(8))
    assert rest(stream) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert stream.number == 2


def test_without_auto_collation_each_item_is_a_batch():
    stream = fetcher(Numbers(3), auto_collation=False)
    assert rest(stream) == [0, 1, 2]
    assert (stream.number, stream.items) == (3, 3)


def test_nobody_asks_for_more_after_the_end():
    """Some iterators begin again."""
    stream = fetcher(Numbers(4))
    rest(stream)
    stream._items = iter(range(4))
    assert rest(stream) == []


def test_the_pulse_says_which_item_is_being_loaded():
    seen = []

    class Watched(Numbers):
        def __iter__(self):
            for item in super().__iter__():
                seen.append((stream._words[STAGE], stream._words[POSITION]))
                yield item

    stream = fetcher(Watched(3))
    rest(stream, 2)
    assert seen == [(Stage.FETCH, 0), (Stage.FETCH, 1), (Stage.FETCH, 0)]
    assert stream._words[SAMPLES] == 3


def test_the_generators_are_set_for_each_batch_by_its_number():
    seeds = []
    stream = fetcher(Numbers(), seeds=seeds)
    for number in range(2):
        stream.prepare(number)
        stream.take(4)
    assert seeds == [0, 1]


def test_a_batch_out_of_turn_is_an_error_and_none_follows():
    stream = fetcher(Numbers())
    stream.take(4)
    with pytest.raises(StreamBroken, match="has come to batch 1, and was asked for batch 3"):
        stream.prepare(3)
    assert rest(stream) == []


# Items that raise ----------------------------------------------------------------------------------------------------


def test_an_iterator_goes_on_behind_an_item_that_raised():
    stream = fetcher(Fails(6, {1}))
    with pytest.raises(SampleFailed) as caught:
        stream.take(2)
    assert (caught.value.position, caught.value.index, str(caught.value.error)) == (1, None, "bad: 1")
    assert rest(stream, 2) == [[2, 3], [4, 5]]


def test_an_item_that_raised_is_skipped_and_told_of():
    stream, troubles = fetcher(Fails(6, {1, 2}), bad_sample="skip"), []
    assert stream.take(3, troubles=troubles)[0] == [0, 3, 4]
    assert [(t.position, t.fate) for t in troubles] == [(1, "skipped"), (1, "skipped")]
    assert stream.items == 3


def test_a_batch_of_which_nothing_is_left_counts():
    """What went wrong in it must be told of."""
    stream, troubles = fetcher(Fails(4, {2, 3}), bad_sample="skip"), []
    stream.take(2)
    with pytest.raises(StopIteration):
        stream.take(2, troubles=troubles)
    assert (len(troubles), stream.number) == (2, 2)


@pytest.mark.parametrize("bad_sample", ["raise", "skip"])
def test_a_generator_that_raised_is_finished_and_that_is_said(bad_sample):
    stream = fetcher(generator([0, 1, 2], ValueError("bad")), bad_sample=bad_sample)
    assert stream.take(2)[0] == [0, 1]
    with pytest.raises(SampleFailed) as caught:
        stream.take(2)
    assert "it is finished" in caught.value.error.__notes__[0]
    assert rest(stream) == []


def test_a_dataset_that_cannot_be_iterated_ends_its_stream():
    class Refuses:
        def __iter__(self):
            raise ValueError("bad")

    stream = fetcher(Refuses())
    with pytest.raises(SampleFailed):
        stream.take(2)
    assert rest(stream) == []


# A next life ---------------------------------------------------------------------------------------------------------


def after(dataset, batches, size=4):
    """A stream that has given so many batches."""
    stream = fetcher(dataset)
    for _ in range(batches):
        stream.take(size)
    return stream


@pytest.mark.parametrize("batches", [0, 1, 2, 3])
def test_a_next_life_goes_on_where_the_last_one_was(batches):
    last = after(Numbers(), batches)
    stream = fetcher(Numbers())
    stream.resume(batches, last.print, None, 4)
    assert (stream.number, stream.items, stream.print) == (last.number, last.items, last.print)
    assert rest(stream) == rest(last)


def test_a_next_life_replays_with_the_same_random_numbers():
    seeds = []
    fetcher(Numbers(), seeds=seeds).resume(2, after(Numbers(), 2).print, None, 4)
    assert seeds == [0, 1]


def test_a_next_life_goes_on_behind_an_item_that_raised_before():
    def ran():
        stream = fetcher(Fails(8, {1}))
        with pytest.raises(SampleFailed):
            stream.take(2)
        stream.take(2)
        return stream

    last, stream = ran(), fetcher(Fails(8, {1}))
    stream.resume(2, last.print, None, 2)
    assert rest(stream, 2) == rest(last, 2) == [[4, 5], [6, 7]]


@pytest.mark.parametrize("other", [Numbers(start=1), Numbers(6), Numbers(0)], ids=["other items", "shorter", "empty"])
def test_a_replay_that_goes_elsewhere_is_an_error_and_none_follows(other):
    stream = fetcher(other)
    with pytest.raises(StreamBroken, match="other items when it was replayed for batch 2") as caught:
        stream.resume(2, after(Numbers(), 2).print, None, 4)
    assert caught.value.diverged
    assert rest(stream) == []


@pytest.mark.parametrize("later", [False, True], ids=["at once", "when iterated"])
def test_a_dataset_that_knows_its_place_goes_on_from_there(later):
    last = after(Knows(), 2)
    snapshot = last.number, last.items, last.print, pickle.dumps({"at": 8})
    dataset = Knows(later=later)
    stream = fetcher(dataset)
    stream.resume(2, last.print, snapshot, 4)
    assert rest(stream) == [[8, 9]]
    assert stream.moves is not later  # a next epoch of its own may begin there


def test_only_what_came_after_the_snapshot_is_replayed():
    snapshot = 1, 4, after(Knows(), 1).print, pickle.dumps({"at": 4})
    seeds = []
    stream = fetcher(Knows(), seeds=seeds)
    stream.resume(2, after(Knows(), 2).print, snapshot, 4)
    assert seeds == [0, 1]  # to open it, and for the second batch
    assert rest(stream) == [[8, 9]]


def test_a_state_that_leads_elsewhere_is_noticed():
    snapshot = 1, 4, after(Knows(), 1).print, pickle.dumps({"at": 5})
    with pytest.raises(StreamBroken):
        fetcher(Knows()).resume(2, after(Knows(), 2).print, snapshot, 4)


def test_where_a_state_is_not_taken_the_stream_is_replayed_from_its_start():
    class Refuses(Knows):
        def load_state_dict(self, state):
            raise ValueError("bad")

    last = after(Knows(), 2)
    stream = fetcher(Refuses())
    stream.resume(2, last.print, (1, 4, 0, pickle.dumps({"at": 4})), 4)
    assert rest(stream) == [[8, 9]]


@pytest.mark.parametrize(("later", "spoilt"), [(False, False), (True, True)], ids=["at once", "when iterated"])
def test_a_dataset_that_only_keeps_its_state_must_not_begin_the_next_epoch(later, spoilt):
    stream = fetcher(Knows(later=later))
    stream.resume(1, after(Knows(), 1).print, (1, 4, after(Knows(), 1).print, pickle.dumps({"at": 4})), 4)
    assert stream.spoilt is spoilt
    rest(stream)
    assert stream.spoilt  # it has come to its end in the middle of an epoch


@pytest.mark.parametrize(("number", "at"), [(2, 8), (-1, 10)], ids=["left", "whole"])
def test_an_epoch_of_another_life_is_gone_through(number, at):
    dataset = Knows()
    fetcher(dataset).run_out(4, number)
    assert dataset.at == at


# Snapshots -----------------------------------------------------------------------------------------------------------


def test_a_snapshot_is_given_one_batch_late(monkeypatch):
    """Whoever begins there comes by a batch that is known."""
    monkeypatch.setattr(stream_module, "SNAPSHOT_S", 0.0)
    stream, given = fetcher(Knows()), []
    for _ in range(2):
        stream.take(4)
        given.append((stream.number, stream.items, stream.print, stream.snapshot()))
    assert given[0][-1] is None
    *_, state = given[1][-1]
    assert given[1][-1][:3] == given[0][:3] and pickle.loads(state) == {"at": 4}


def test_snapshots_are_made_now_and_then(monkeypatch):
    clock, asked = [100.0], []

    class Counts(Knows):
        def state_dict(self):
            asked.append(clock[0])
            return super().state_dict()

    monkeypatch.setattr(stream_module.time, "monotonic", lambda: clock[0])
    stream = fetcher(Counts())
    for clock[0] in (100.0, 100.5, 101.2, 101.9):
        stream.take(2)
        stream.snapshot()
    assert asked == [100.0, 101.2]


def test_a_dataset_that_does_not_know_its_place_is_not_asked(monkeypatch):
    monkeypatch.setattr(stream_module, "SNAPSHOT_S", 0.0)
    stream = fetcher(Numbers())
    stream.take(4)
    assert [stream.snapshot(), stream.snapshot()] == [None, None]


def test_a_state_that_cannot_be_had_is_told_of_once(monkeypatch):
    class Refuses(Knows):
        def state_dict(self):
            raise ValueError("bad")

    monkeypatch.setattr(stream_module, "SNAPSHOT_S", 0.0)
    stream = fetcher(Refuses())
    stream.take(4)
    given = [stream.snapshot() for _ in range(3)]
    assert [type(told) for told in given] == [type(None), Raised, type(None)]


# Fingerprints --------------------------------------------------------------------------------------------------------

DIFFERENT = [
    0,
    1,
    None,
    0.0,
    "a",
    b"a",
    b"ab",
    [],
    [1],
    (1,),
    [1, 2],
    [2, 1],
    {"a": 1},
    {"b": 1},
    {"a": 2},
    torch.zeros(3),
    torch.ones(3),
    torch.zeros(1, 3),
    torch.zeros(3, dtype=torch.int32),
    torch.arange(1000),
    torch.arange(1000).flip(0),
    np.zeros(3),
    np.ones(3),
    np.zeros(3, np.int16),
]


def test_different_items_have_different_fingerprints():
    assert len({fingerprint(item, 0) for item in DIFFERENT}) == len(DIFFERENT)


def test_the_order_of_items_counts():
    assert fingerprint(2, fingerprint(1, 0)) != fingerprint(1, fingerprint(2, 0))


@pytest.mark.parametrize(
    ("item", "same"),
    [
        (torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T.contiguous()),
        (np.arange(6).reshape(2, 3).T, np.ascontiguousarray(np.arange(6).reshape(2, 3).T)),
        (torch.arange(6)[::2], torch.tensor([0, 2, 4])),
        (torch.ones(2, 3, dtype=torch.bfloat16).T, torch.ones(3, 2, dtype=torch.bfloat16)),
    ],
)
def test_how_the_bytes_lie_does_not_count(item, same):
    assert fingerprint(item, 5) == fingerprint(same, 5)


@pytest.mark.parametrize(
    "item",
    [
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        torch.eye(3).to_sparse(),
        torch.zeros(0, 3),
        torch.zeros(2, device="meta"),
        np.array([object()], dtype=object),
        np.zeros((0, 2)),
        object(),
    ],
    ids=["nested", "sparse", "empty", "meta", "objects", "empty array", "any object"],
)
def test_what_has_no_bytes_to_look_at_has_a_fingerprint(item):
    assert isinstance(fingerprint(item, 0), int)


class Restless(int):
    """A number of the user's whose own methods never say the same."""

    def __repr__(self):
        return str(torch.rand(1))


class RestlessDict(OrderedDict):
    def items(self):
        raise ValueError("not the same")


def test_methods_of_the_user_s_own_types_are_not_called():
    assert fingerprint(Restless(5), 0) == fingerprint(Restless(5), 0) == fingerprint(5, 0)
    assert isinstance(fingerprint(RestlessDict(a=1), 0), int)


def test_an_item_without_a_fingerprint_still_comes(monkeypatch):
    def refuse(item, so_far):
        raise RuntimeError("cannot be asked")

    monkeypatch.setattr(stream_module, "fingerprint", refuse)
    stream = fetcher(Numbers(3))
    assert rest(stream) == [[0, 1, 2]]
    assert stream.print
