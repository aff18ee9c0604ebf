"""A batch that cannot be collated because a few of its samples differ: those are named, left out, or replaced."""

import os

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from holdfast import CachedDataset, DataLoader, Policy, TooManyBad

ODD = 5
SEEN = f"index {ODD}: ['image'] is (3, 2); the other 7 are (3, 4)"


class Odd(Dataset):
    """One sample has another shape."""

    def __init__(self, odd=(ODD,), length=16):
        self.odd = frozenset(odd)
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"image": torch.full((3, 2 if index in self.odd else 4), float(index)), "label": index}


class OddMany(Odd):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class OddStream(IterableDataset):
    def __iter__(self):
        return iter([Odd()[index] for index in range(16)])


class DeadlyOnce(Odd):
    """The first that is asked for as a spare ends its worker, once: then it is being loaded a second time."""

    def __init__(self, mark):
        super().__init__()
        self.mark = mark
        self.seen = set()

    def __getitem__(self, index):
        if index in self.seen and not self.mark.exists():
            self.mark.touch()
            os._exit(3)
        self.seen.add(index)
        return super().__getitem__(index)


def refuse(samples):
    raise ValueError("mine")


WORKERS = [(0, None), (2, "fork"), (2, "spawn")]


def loader(dataset, workers, bad_sample, max_bad=0.5, **more):
    count, method = workers
    policy = Policy(bad_sample=bad_sample, max_bad=max_bad)
    return DataLoader(dataset, 8, num_workers=count, multiprocessing_context=method, policy=policy, **more)


def labels(loader):
    return [batch["label"].tolist() for batch in loader]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
@pytest.mark.parametrize("make", [Odd, OddMany, lambda: CachedDataset(Odd(), "1MiB")], ids=["one", "many", "cached"])
def test_a_few_samples_that_differ_are_left_out_and_named(make, workers):
    odd = loader(make(), workers, "skip")
    assert labels(odd) == [[0, 1, 2, 3, 4, 6, 7], list(range(8, 16))]
    (bad,) = odd.report().bad_samples
    assert (bad.index, bad.batch, bad.replaced_by) == (ODD, 0, None)
    assert bad.error == "['image'] is (3, 2); the other 7 are (3, 4)"
    (incident,) = odd.incidents
    assert (incident.finding, incident.index, incident.stage) == ("samples-differ", ODD, "collate")
    assert SEEN in incident.says and incident.did == "left the sample out"
    assert f"while collating index {ODD} of batch 0" in incident.line
    assert (odd.stats()["samples"], odd.stats()["bad_samples"]) == (15, 1)


def test_what_replaces_them_does_not_depend_on_who_loads():
    """Batches keep their size, and have the same bytes with workers and without."""
    came = []
    for workers in WORKERS:
        torch.manual_seed(3)
        odd = loader(Odd(), workers, "replace")
        came.append(labels(odd))
        (bad,) = odd.report().bad_samples
        assert bad.index == ODD and bad.replaced_by == came[-1][0][5]
        assert odd.incidents[0].did == "replaced the sample"
    assert came[0] == came[1] == came[2]
    assert came[0][0][5] in {0, 1, 2, 3, 4, 6, 7} and came[0][0][:5] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_by_default_the_error_is_torchs_and_names_them(workers):
    odd = iter(loader(Odd(), workers, "raise"))
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size") as caught:
        next(odd)
    assert caught.value.__notes__[0] == SEEN
    assert next(odd)["label"].tolist() == list(range(8, 16))


@pytest.mark.parametrize("workers", WORKERS, ids=str)
@pytest.mark.parametrize("bad_sample", ["skip", "replace"])
def test_where_half_of_them_differ_the_error_is_raised(bad_sample, workers):
    odd = loader(Odd(range(0, 8, 2)), workers, bad_sample)
    batches = iter(odd)
    with pytest.raises(RuntimeError, match="stack expects") as caught:
        next(batches)
    assert caught.value.__notes__[0].startswith("['image']: 4 are (3, 2), 4 are (3, 4)")
    assert next(batches)["label"].tolist() == list(range(8, 16))
    assert odd.report().bad_samples == ()


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_an_error_of_a_collate_fn_is_raised_under_any_policy(workers):
    odd = loader(Odd(), workers, "skip", collate_fn=refuse)
    with pytest.raises(ValueError, match="mine") as caught:
        next(iter(odd))
    assert caught.value.__notes__[0] == SEEN
    assert odd.incidents[0].finding == "collate-raised" and SEEN in odd.incidents[0].seen
    assert odd.report().bad_samples == ()


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_too_many_of_them_end_the_run(workers):
    odd = loader(Odd(range(0, 64, 4), 64), workers, "skip", max_bad=0.1)
    with pytest.raises(TooManyBad, match="6 of 8 are"):
        list(odd)


@pytest.mark.parametrize("workers", [(0, None), (1, "fork"), (1, "spawn")], ids=str)
def test_items_of_a_stream_are_left_out_too(workers):
    """The epoch is whole all the same: what was left out is counted as given."""
    odd = loader(OddStream(), workers, "skip")
    assert labels(odd) == [[0, 1, 2, 3, 4, 6, 7], list(range(8, 16))]
    assert odd.stats()["samples"] == 15
    assert odd.incidents[0].finding == "samples-differ"
    assert "item 5 of the batch: ['image'] is (3, 2)" in odd.incidents[0].says


def test_a_spare_that_kills_is_not_tried_again(tmp_path):
    """The batch is loaded once more, and another spare takes the place."""
    odd = DataLoader(
        DeadlyOnce(tmp_path / "died"), 8, num_workers=1, policy=Policy(bad_sample="replace", strikes=1, max_bad=1.0)
    )
    first, second = labels(odd)
    assert len(first) == 8 and first[:5] == [0, 1, 2, 3, 4] and first[5] != ODD
    assert second == list(range(8, 16)) and (tmp_path / "died").exists()
    assert [bad.index for bad in odd.report().bad_samples].count(ODD) == 1
