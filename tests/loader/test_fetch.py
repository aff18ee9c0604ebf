"""Samples of a map-style dataset under the policy: what is in the batch, and what is told of the rest."""

import errno
import signal

import pytest
from torch.utils.data import Dataset

from holdfast import Policy, SampleError
from holdfast.core.host import POSITION, RETRIES, SAMPLES, STAGE, Spent
from holdfast.core.messages import Leave, Stage
from holdfast.loader.fetch import GIVEN, Draw, MapFetcher, SampleFailed, Unwatched, everything

from ..interrupt import Alarm


class Trips(Dataset):
    """index -> how many times it raises (-1: always). What it gives is its index."""

    def __init__(self, trips=(), error=None):
        self.trips = dict(trips)
        self.error = ValueError("bad") if error is None else error
        self.asked = []

    def __getitem__(self, index):
        self.asked.append(index)
        if self.trips.get(index, 0):
            self.trips[index] -= 1
            raise self.error
        return index


class Many(Trips):
    def __getitems__(self, indices):
        self.asked.append("many")
        if any(self.trips.get(index, 0) for index in indices):
            raise self.error
        return list(indices)


def fetcher(dataset, *, auto_collation=True, policy=(), **more):
    return MapFetcher(dataset, auto_collation, Policy(retry_delay=0.001, **dict(policy)), **more)


def load(fetch, draw):
    """(samples, what is told of those that went wrong)"""
    samples, troubles = fetch.load(draw, lambda: None)
    return samples, [(t.position, t.index, t.attempts, t.fate) for t in troubles]


SKIP, REPLACE = {"bad_sample": "skip"}, {"bad_sample": "replace"}


# What is in the batch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indices", [[3, 1, 2], (3, 1, 2), range(3), []])
def test_the_samples_come_in_the_order_of_the_indices(indices):
    assert load(fetcher(Trips()), Draw(-1, indices)) == (list(indices), [])


def test_without_auto_collation_there_is_one_sample():
    assert load(fetcher(Trips(), auto_collation=False), Draw(-1, 5)) == (5, [])


def test_a_dataset_is_asked_for_many_at_once_where_it_can_give_them():
    dataset = Many()
    assert load(fetcher(dataset), Draw(-1, [3, 1])) == ([3, 1], [])
    assert dataset.asked == ["many"]


@pytest.mark.parametrize("draw", [Draw(-1, [3, 1], alone=True), Draw(-1, [3, 1], bad=(0,))], ids=["alone", "bad"])
def test_a_batch_that_has_ended_a_life_is_loaded_one_by_one(draw):
    dataset = Many()
    assert load(fetcher(dataset), draw)[0] == [3, 1]
    assert dataset.asked == [3, 1]


def test_where_many_at_once_raise_the_bad_one_is_found_one_by_one():
    """With the random numbers as they were before."""
    dataset, seeded = Many({1: -1}), []
    samples, troubles = fetcher(dataset, policy=SKIP).load(Draw(-1, [3, 1, 2]), lambda: seeded.append(1))
    assert (samples, [t.index for t in troubles], seeded) == ([3, 2], [1], [1])


def test_where_a_dataset_can_give_only_many_at_once_its_error_names_no_sample():
    class Only(Dataset):
        def __getitems__(self, indices):
            raise ValueError("bad")

    with pytest.raises(SampleFailed) as caught:
        load(fetcher(Only()), Draw(-1, [3, 1]))
    assert (caught.value.position, caught.value.stage) == (-1, Stage.FETCH_MANY)


def test_what_an_earlier_life_has_loaded_is_not_loaded_again():
    dataset = Trips()
    draw = Draw(-1, [3, 1, 2], positions=[0, 1, 2])
    draw.done = ["from the journal"]
    assert load(fetcher(dataset), draw)[0] == ["from the journal", 1, 2]
    assert dataset.asked == [1, 2]


# Where it is ---------------------------------------------------------------------------------------------------------


class Noted(Trips):
    """Notes where the fetcher says it is when a sample is asked for."""

    def __getitem__(self, index):
        self.asked.append((self.words[STAGE], self.words[POSITION]))
        return super().__getitem__(index)


@pytest.mark.parametrize("policy", [{}, {"retries": 1}], ids=["quickly", "carefully"])
def test_the_pulse_says_which_sample_is_being_loaded(policy):
    context = Unwatched()
    dataset = Noted()
    dataset.words = context.words
    context.words[STAGE] = Stage.FETCH  # as the job has it before
    load(fetcher(dataset, context=context, policy=policy), Draw(-1, [7, 8]))
    assert dataset.asked == [(Stage.FETCH, 0), 7, (Stage.FETCH, 1), 8]
    assert context.words[SAMPLES] == 2


def test_samples_behind_one_that_was_left_out_keep_their_positions():
    context = Unwatched()
    dataset = Noted()
    dataset.words = context.words
    load(fetcher(dataset, context=context), Draw(-1, [7, 8], positions=[0, 3]))
    assert [asked for asked in dataset.asked if isinstance(asked, tuple)] == [(Stage.FETCH, 0), (Stage.FETCH, 3)]


# A sample that raises ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [{}, {"retries": 2, "retry_on": (OSError,)}], ids=["no retries", "others only"])
def test_an_exception_is_raised_with_where_it_was(policy):
    with pytest.raises(SampleFailed) as caught:
        load(fetcher(Trips({8: -1}), policy=policy), Draw(-1, [7, 8, 9]))
    failed = caught.value
    assert (failed.position, failed.index, failed.stage, failed.attempts) == (1, 8, Stage.FETCH, 1)
    assert failed.__cause__ is failed.error and type(failed.error) is ValueError


def test_a_bad_sample_is_skipped():
    assert load(fetcher(Trips({8: -1}), policy=SKIP), Draw(-1, [7, 8, 9])) == ([7, 9], [(1, 8, 1, "skipped")])


def test_a_bad_sample_is_replaced_where_it_stood():
    draw = Draw(-1, [7, 8, 9], spares=[70, 71])
    assert load(fetcher(Trips({8: -1}), policy=REPLACE), draw) == ([7, 70, 9], [(1, 8, 1, "replaced")])
    assert draw.troubles[0].replaced_by == 70


def test_a_spare_that_is_bad_too_is_passed_over():
    draw = Draw(-1, [7, 8], spares=[70, 71])
    assert load(fetcher(Trips({8: -1, 70: -1}), policy=REPLACE), draw)[0] == [7, 71]


def test_where_all_spares_are_bad_the_sample_s_own_error_is_raised():
    with pytest.raises(SampleFailed) as caught:
        load(fetcher(Trips({8: -1, 70: -1}), policy=REPLACE), Draw(-1, [7, 8], spares=[70]))
    assert (caught.value.position, caught.value.index) == (1, 8)


def test_a_sample_that_killed_is_replaced_untried_and_by_no_spare_that_killed():
    dataset = Trips()
    draw = Draw(-1, [7, 8, 9], spares=[70, 71], bad=(1,), deadly=(1,))
    assert load(fetcher(dataset, policy=REPLACE), draw) == ([7, 71, 9], [(1, 8, 0, GIVEN)])
    assert dataset.asked == [7, 71, 9]


def test_where_nothing_is_left_to_take_the_place_of_one_that_killed_that_is_said():
    with pytest.raises(SampleFailed) as caught:
        load(fetcher(Trips(), policy=REPLACE), Draw(-1, [8], spares=[70], bad=(0,), deadly=(1,)))
    assert type(caught.value.error) is SampleError
    assert "nothing left to try in its place" in str(caught.value.error)


# Retries -------------------------------------------------------------------------------------------------------------

DOWN = OSError("the store is down")


def test_a_sample_is_tried_again_as_often_as_the_policy_allows():
    context = Unwatched()
    fetch = fetcher(Trips({8: 2}, DOWN), policy={"retries": 2}, context=context)
    assert load(fetch, Draw(-1, [7, 8])) == ([7, 8], [(1, 8, 3, "retried")])
    assert context.words[RETRIES] == 2


def test_a_sample_that_fails_each_time_says_how_often():
    with pytest.raises(SampleFailed) as caught:
        load(fetcher(Trips({8: -1}, DOWN), policy={"retries": 2}), Draw(-1, [7, 8]))
    assert caught.value.attempts == 3


def test_while_a_store_is_down_only_the_first_sample_waits_for_it():
    dataset = Trips({7: -1, 8: -1, 9: 1}, DOWN)
    samples, troubles = load(fetcher(dataset, policy={"retries": 2, **SKIP}), Draw(-1, [7, 8, 6, 9]))
    assert samples == [6, 9]
    assert troubles == [(0, 7, 3, "skipped"), (1, 8, 1, "skipped"), (3, 9, 2, "retried")]


def test_no_deadline_runs_while_it_waits_to_try_again(monkeypatch):
    context, stages = Unwatched(), []
    monkeypatch.setattr("holdfast.loader.fetch.time.sleep", lambda _: stages.append(context.words[STAGE]))
    load(fetcher(Trips({8: 1}, DOWN), policy={"retries": 1}, context=context), Draw(-1, [8]))
    assert stages == [Stage.IDLE] and context.words[STAGE] == Stage.FETCH


# What is caught ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_in_a_worker_nothing_of_the_user_s_ends_it_silently(error):
    fetch = fetcher(Trips({8: -1}, error), policy=SKIP, catch=everything)
    assert load(fetch, Draw(-1, [7, 8])) == ([7], [(1, 8, 1, "skipped")])


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_in_the_trainer_ctrl_c_and_exit_go_through(error):
    with pytest.raises(type(error)):
        load(fetcher(Trips({8: -1}, error), policy=SKIP), Draw(-1, [7, 8]))


def test_what_a_signal_handler_of_the_trainer_raised_is_no_sample_s_fault():
    class Signals(Dataset):
        def __getitem__(self, index):
            signal.raise_signal(signal.SIGUSR2)
            return index

    def handler(number, frame):
        raise Alarm("time")

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with pytest.raises(Alarm):
            load(fetcher(Signals(), policy=SKIP), Draw(-1, [7]))
    finally:
        signal.signal(signal.SIGUSR2, before)


# A worker that has used something up ---------------------------------------------------------------------------------

FULL = OSError(errno.EMFILE, "Too many open files")


def spent(index, draw, *, before=0, **more):
    """What the worker leaves for, or None where the sample is told as bad instead."""
    fetch = fetcher(Trips({index: -1}, FULL), may_leave=True, **more)
    for _ in range(before):
        load(fetch, Draw(-1, [1]))
    try:
        load(fetch, draw)
    except SampleFailed:
        return None
    except Spent as leaving:
        return leaving.why
    raise AssertionError("it came")


def test_a_worker_that_has_loaded_something_leaves_the_sample_to_a_fresh_one():
    assert spent(8, Draw(-1, [7, 8])) is Leave.DESCRIPTORS
    assert spent(8, Draw(-1, [8]), before=1) is Leave.DESCRIPTORS


def test_a_fresh_worker_is_not_replaced_by_a_fresh_worker():
    assert spent(8, Draw(-1, [8])) is None


def test_where_a_fresh_worker_was_of_no_help_the_sample_is_bad():
    assert spent(8, Draw(1, [7, 8])) is None
    assert spent(8, Draw(0, [7, 8])) is Leave.DESCRIPTORS


def test_a_batch_that_does_not_collate_for_want_of_something_goes_to_a_fresh_worker_too():
    fetch = fetcher(Trips(), may_leave=True)
    failed = SampleFailed(FULL, -1, None, Stage.COLLATE, 1)
    load(fetch, Draw(-1, [7, 8]))
    fetch.leave_if_spent(failed, Draw(-1, [7, 8]))  # its first batch: it is fresh
    load(fetch, Draw(-1, [7, 8]))
    with pytest.raises(Spent):
        fetch.leave_if_spent(failed, Draw(-1, [7, 8]))


# What is left --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "left_out"),
    [(Draw(-1, [8]), True), (Draw(-1, [7, 8]), False), (Draw(-1, []), False), (Draw(-1, [], positions=[]), True)],
    ids=["all bad", "one is left", "asked for empty", "all had killed"],
)
def test_a_batch_of_which_nothing_is_left_is_left_out(draw, left_out):
    fetch = fetcher(Trips({8: -1}), policy=SKIP)
    samples, troubles = fetch.load(draw, lambda: None)
    assert fetch.left_out(samples, draw, troubles) is left_out


def test_what_a_failure_says_survives_without_what_may_not_pickle():
    with pytest.raises(SampleFailed) as caught:
        load(fetcher(Trips({(1, 2): -1})), Draw(-1, [(1, 2)]))
    failure = caught.value.to_failure()
    assert failure.index == (1, 2) and failure.raised.type_name == "ValueError"
    assert failure.brief().index is None
