"""Exceptions of the user's that raise when they are asked anything: ours to ask, so ours to survive.

Each reaches the user, as itself where it can; no worker ends for it, and the batches behind it come.
"""

import pytest
import torch
from torch.utils.data import IterableDataset

from holdfast import DataLoader, Policy, Pool
from holdfast.errors import SampleError

from .hostile import BAD, ERRORS, LENGTH, PAST_EXCEPTION, Samples, outcomes, raises


class Stream(IterableDataset):
    """Its iterator is no generator: it goes on after an exception."""

    def __init__(self, error):
        self.error = error

    def __iter__(self):
        self.number = -1
        return self

    def __next__(self):
        self.number += 1
        if self.number == LENGTH:
            raise StopIteration
        if self.number == BAD:
            raise ERRORS[self.error]()
        return self.number


class Generated(Stream):
    def __iter__(self):
        for index in range(LENGTH):
            if index == BAD:
                raise ERRORS[self.error]()
            yield index


class Collates:
    def __init__(self, error):
        self.error = error

    def __call__(self, samples):
        if BAD in samples:
            raise ERRORS[self.error]()
        return torch.tensor(samples)


class Starts:
    def __init__(self, error):
        self.error = error

    def __call__(self, worker):
        raise ERRORS[self.error]()


def as_itself(error):
    kind = type(ERRORS[error]())
    return (kind, SampleError)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_of_a_sample_reaches_the_user(workers):
    """Whatever it does when it is asked; and the batches before and behind it come."""
    for error in ERRORS:
        if workers == 0 and error in PAST_EXCEPTION:
            continue  # in the trainer what is no Exception passes: it may be a Ctrl-C
        found = outcomes(DataLoader(Samples(error), batch_size=2, num_workers=workers))
        assert [found[0], *found[2:]] == [[0, 1], [4, 5], [6, 7]], error
        assert found[1] in as_itself(error), error


@pytest.mark.parametrize("retries", [0, 1])
def test_a_sample_that_raises_is_left_out(retries):
    policy = Policy(bad_sample="skip", max_bad=1.0, retries=retries, retry_on=(Exception,), retry_delay=0.001)
    for error in ERRORS:
        loader = DataLoader(Samples(error), batch_size=2, num_workers=1, policy=policy)
        assert outcomes(loader) == [[0, 1], [2], [4, 5], [6, 7]], error
        assert len(loader.report().bad_samples) == 1
        str(loader.report())


@pytest.mark.parametrize("kind", [Stream, Generated])
def test_an_exception_of_a_stream_reaches_the_user(kind):
    for error in ERRORS:
        if kind is Generated and error == "stop":
            continue
        found = outcomes(DataLoader(kind(error), batch_size=2, num_workers=1))
        assert found[0] == [0, 1], error
        assert found[1] in as_itself(error), error
        # A generator that raised is finished; other iterators go on.
        assert found[2:] == ([] if kind is Generated else [[4, 5], [6, 7]]), error


def test_an_exception_of_a_collate_fn_reaches_the_user():
    for error in ERRORS:
        loader = DataLoader(range(LENGTH), batch_size=2, num_workers=1, collate_fn=Collates(error))
        found = outcomes(loader)
        assert [found[0], *found[2:]] == [[0, 1], [4, 5], [6, 7]], error
        assert found[1] in as_itself(error), error


def test_an_exception_of_a_worker_init_fn_reaches_the_user():
    for error in ERRORS:
        with pytest.raises(as_itself(error)):
            next(iter(DataLoader(range(LENGTH), num_workers=1, worker_init_fn=Starts(error))))


def test_an_exception_of_a_task_of_a_pool_reaches_the_user():
    with Pool(1) as pool:
        for error in ERRORS:
            raised = pool.submit(raises, error).exception(timeout=60)
            assert type(raised) in as_itself(error), error
        assert pool.submit(len, "pool").result(timeout=60) == 4
        assert pool.stats()["restarts"] == 0
