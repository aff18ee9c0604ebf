"""What a retry asks for, and what is told of the batch that comes of it."""

import os
import pickle
import signal
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from holdfast import DataLoader, Policy
from holdfast.errors import CannotSend, LoaderTorn, TooManyBad, WorkerLost

from .data import flat


class Trips(Dataset):
    """Raises at some indices, and kills its worker at others: as often as it is told, over all lives."""

    def __init__(self, folder, deadly=(), raising=(), length=40, exits=False):
        self.folder, self.deadly, self.raising, self.length = Path(folder), dict(deadly), dict(raising), length
        self.exits = exits

    def __len__(self):
        return self.length

    def _times(self, what, index):
        mark = self.folder / f"{what}-{index}"
        times = len(mark.read_text()) if mark.exists() else 0
        mark.write_text("x" * (times + 1))
        return times

    def __getitem__(self, index):
        index = index[0] if isinstance(index, list) else index
        if index in self.deadly and self._times("death", index) < self.deadly[index]:
            os._exit(3) if self.exits else os.kill(os.getpid(), signal.SIGKILL)
        if index in self.raising and self._times("error", index) < self.raising[index]:
            raise OSError(f"sample {index} is bad")
        return index


class Calls(Dataset):
    """Its indices are functions."""

    def __getitem__(self, index):
        return index()


def bad():
    raise OSError("bad")


class Together(Trips):
    """Gives many at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


ALWAYS = 1 << 30


class OneList:
    """Gives the same list for each batch, filled anew; with `nested`, of the same lists."""

    def __init__(self, batches, size, nested):
        self.batches, self.size, self.nested = batches, size, nested

    def __len__(self):
        return self.batches

    def __iter__(self):
        batch = [[0] for _ in range(self.size)] if self.nested else [0] * self.size
        for start in range(0, self.batches * self.size, self.size):
            for position in range(self.size):
                if self.nested:
                    batch[position][0] = start + position
                else:
                    batch[position] = start + position
            yield batch


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("bad_sample", ["raise", "skip", "replace"])
def test_a_retry_asks_for_what_the_sampler_gave(nested, bad_sample, tmp_path):
    """A sampler that fills one list again and again loses and doubles nothing when workers die."""
    loader = DataLoader(
        Trips(tmp_path, deadly={5: 1, 22: 1}),
        batch_sampler=OneList(10, 4, nested),
        num_workers=2,
        policy=Policy(bad_sample=bad_sample),
    )
    assert flat(loader) == list(range(40))
    assert loader.stats()["restarts"] == 2


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("bad_sample", ["raise", "skip", "replace"])
def test_the_report_names_the_index_that_the_sampler_gave(bad_sample, workers, nested, tmp_path):
    """The sampler's list has moved on when the sample is given up, and when the report is read."""
    deadly = {5: ALWAYS} if workers and bad_sample == "skip" else {}
    loader = DataLoader(
        Trips(tmp_path, deadly=deadly, raising={5: ALWAYS, 22: ALWAYS}, exits=True),
        batch_sampler=OneList(10, 4, nested),
        num_workers=workers,
        policy=Policy(bad_sample=bad_sample, strikes=2, max_bad=1.0),
    )
    it, got = iter(loader), []
    while True:
        try:
            got += next(it).tolist()
        except StopIteration:
            break
        except OSError:
            got += [None] * 4
    report = loader.report().bad_samples
    assert [bad.index for bad in report] == ([[5], [22]] if nested else [5, 22])
    if bad_sample == "replace":
        spares = [bad.replaced_by[0] if nested else bad.replaced_by for bad in report]
        assert got == [{5: spares[0], 22: spares[1]}.get(i, i) for i in range(40)]
        assert spares[0] in range(8) and spares[1] in range(24)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_spare_is_any_sample_given_before(workers, tmp_path):
    """Also where the sampler fills the same lists again: those of earlier batches are not forgotten."""
    loader = DataLoader(
        Trips(tmp_path, raising=dict.fromkeys(range(20, 24), ALWAYS)),
        batch_sampler=OneList(10, 4, nested=True),
        num_workers=workers,
        policy=Policy(bad_sample="replace", max_bad=1.0),
    )
    got = flat(loader)
    assert got[:20] == [*range(20)] and {*got[20:24]} <= {*range(20)} and got[24:] == [*range(24, 40)]


def epoch_of(tmp_path, workers, seed, bad_sample, **settings):
    """Each batch or error of a shuffled epoch, and what the report says of its bad samples."""
    loader = DataLoader(
        Trips(tmp_path, raising=dict.fromkeys((3, 8, 17, 30), ALWAYS)),
        batch_size=4,
        shuffle=True,
        num_workers=workers,
        generator=torch.Generator().manual_seed(seed),
        policy=Policy(bad_sample=bad_sample, **settings),
    )
    it, got = iter(loader), []
    while True:
        try:
            got.append(next(it).tolist())
        except StopIteration:
            break
        except TooManyBad as error:
            got.append((error.bad, error.seen))
            break
        except OSError as error:
            got.append(str(error))
    report, stats = loader.report().bad_samples, loader.stats()
    told = [(bad.index, bad.batch, bad.attempts, bad.replaced_by) for bad in report]
    return got, told, {name: stats[name] for name in ("batches", "samples", "retries", "bad_samples")}


@pytest.mark.parametrize("bad_sample", ["raise", "skip", "replace"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_seed_gives_the_same_with_and_without_workers(seed, bad_sample, tmp_path):
    """The same spares stand in the same places, and the same is told and counted."""
    alone, one, three = (epoch_of(tmp_path, workers, seed, bad_sample, max_bad=1.0) for workers in (0, 1, 3))
    assert alone == one == three
    assert {spare is not None for *_, spare in alone[1]} == {bad_sample == "replace"}


@pytest.mark.parametrize("bad_sample", ["skip", "replace"])
def test_too_many_bad_samples_are_counted_alike_with_and_without_workers(bad_sample, tmp_path):
    """The breaker opens at the same batch, after the same number of samples."""
    alone, one = (epoch_of(tmp_path, workers, 5, bad_sample, max_bad=0.05) for workers in (0, 1))
    assert alone[0][-1] == one[0][-1] and isinstance(alone[0][-1], tuple)


def test_too_many_bad_samples_end_the_epoch_without_workers(tmp_path):
    """Every later call raises the same, as with workers."""
    loader = DataLoader(Trips(tmp_path, raising=dict.fromkeys(range(40), ALWAYS)), policy=Policy(bad_sample="skip"))
    it = iter(loader)
    for _ in range(3):
        with pytest.raises(TooManyBad, match="20 of 20 samples are bad"):
            next(it)


def test_indices_that_cannot_be_pickled_are_named_without_workers(tmp_path):
    """They never have to be."""
    loader = DataLoader(
        Calls(), batch_sampler=[[bad, lambda: 1], [lambda: 2, bad]], policy=Policy(bad_sample="replace", max_bad=1.0)
    )
    assert [{*batch.tolist()} <= {1, 2} for batch in loader] == [True, True]
    assert [told.index for told in loader.report().bad_samples] == [bad, bad]


def test_indices_that_cannot_be_pickled_are_an_error_and_no_hang(tmp_path):
    """next() raises what pickling them raised, and whoever goes on comes to an end."""
    batches = [[0, 1], [lambda: 2], [4, 5]]
    loader = DataLoader(Trips(tmp_path), batch_sampler=batches, num_workers=1, prefetch_factor=1)
    errors, it = [], iter(loader)
    while len(errors) < 3:
        try:
            next(it)
        except (StopIteration, LoaderTorn):
            break
        except Exception as error:
            errors.append(type(error))
    assert errors in ([AttributeError], [pickle.PicklingError])


# What is told of a batch ---------------------------------------------------------------------------------------------


def told(loader):
    return [(bad.index, bad.replaced_by is not None) for bad in loader.report().bad_samples]


@pytest.mark.parametrize("deaths", [0, 1, 2, 3])
@pytest.mark.parametrize("bad_sample", ["skip", "replace"])
def test_what_was_left_out_or_replaced_is_told_once_however_often_its_worker_died(bad_sample, deaths, tmp_path):
    """The sample raises each time; another one of the same batch ends its worker that many times."""
    loader = DataLoader(
        Trips(tmp_path, deadly={14: deaths}, raising={10: ALWAYS, 12: ALWAYS}),
        batch_size=8,
        num_workers=1,
        policy=Policy(bad_sample=bad_sample, strikes=9, max_bad=1.0),
    )
    got, good = flat(loader), (i for i in range(40) if i not in (10, 12))
    if bad_sample == "replace":
        assert [i for position, i in enumerate(got) if position not in (10, 12)] == list(good)
    else:
        assert got == list(good)
    assert told(loader) == [(10, bad_sample == "replace"), (12, bad_sample == "replace")]
    assert loader.stats()["restarts"] == deaths


def test_a_sample_that_was_tried_again_is_told_once_however_often_its_worker_died(tmp_path):
    """It raised once, in the second life; the third has it from the journal."""
    loader = DataLoader(
        Trips(tmp_path, deadly={9: 1, 14: 1}, raising={10: 1}),
        batch_size=8,
        num_workers=1,
        policy=Policy(retries=1, retry_delay=0.01, strikes=9),
    )
    assert flat(loader) == list(range(40))
    assert [i.index for i in loader.incidents if "tried again" in i.did] == [10]
    assert loader.stats()["retries"] == 1


def spoilt(samples):
    """A collate_fn that raises for one batch."""
    if 14 in samples:
        raise ValueError("this batch cannot be collated")
    return samples


class Unsendable:
    def __reduce__(self):
        raise TypeError("not to be sent")


def unsendable(samples):
    return [Unsendable()] if 14 in samples else samples


@pytest.mark.parametrize("collate_fn", [spoilt, unsendable])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_fails_tells_of_its_bad_samples_all_the_same(collate_fn, workers, tmp_path):
    """One sample is skipped, and then the batch cannot be collated or sent."""
    if workers == 0 and collate_fn is unsendable:
        pytest.skip("nothing is sent")
    loader = DataLoader(
        Trips(tmp_path, raising={10: ALWAYS}),
        batch_size=8,
        num_workers=workers,
        collate_fn=collate_fn,
        policy=Policy(bad_sample="skip", max_bad=1.0),
    )
    it, errors, got = iter(loader), 0, []
    while True:
        try:
            got += next(it)
        except StopIteration:
            break
        except Exception:
            errors += 1
    assert errors == 1 and got == [*range(8), *range(16, 40)]
    assert told(loader) == [(10, False)]


def test_a_batch_that_raises_tells_of_what_was_tried_again_before(tmp_path):
    """One sample went well at the second attempt; a later one of the same batch raises for good."""
    loader = DataLoader(
        Trips(tmp_path, raising={1: 1, 3: ALWAYS}, length=8),
        batch_size=4,
        num_workers=1,
        policy=Policy(retries=1, retry_delay=0.01),
    )
    it = iter(loader)
    with pytest.raises(OSError, match="sample 3"):
        next(it)
    assert next(it).tolist() == [4, 5, 6, 7]
    assert [i.index for i in loader.incidents if "tried again" in i.did] == [1]


class Items(IterableDataset):
    """No generator, so it goes on after an exception: every number from `bad` on raises."""

    def __init__(self, length, bad):
        self.length, self.bad = length, bad

    def __iter__(self):
        self.at = -1
        return self

    def __next__(self):
        self.at += 1
        if self.at >= self.length:
            raise StopIteration
        if self.at >= self.bad:
            raise OSError(f"item {self.at} is bad")
        return self.at


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_last_items_of_a_stream_are_told_of_though_no_batch_follows(workers, drop_last):
    """Nothing good comes after the bad ones, so there is no batch with which they could travel."""
    loader = DataLoader(
        Items(11, 8),
        batch_size=4,
        num_workers=workers,
        drop_last=drop_last,
        policy=Policy(bad_sample="skip", max_bad=1.0),
    )
    each = max(1, workers)
    assert sorted(flat(loader)) == sorted([*range(8)] * each)
    assert len(loader.report().bad_samples) == 3 * each
    assert loader.stats()["samples"] == 8 * each


def test_a_spare_that_kills_is_named_as_itself(tmp_path):
    """Samples end their workers, and so do some of those that are to replace them: each is bad once."""
    loader = DataLoader(
        Trips(tmp_path, deadly=dict.fromkeys(range(3), ALWAYS), length=16, exits=True),
        batch_size=4,
        num_workers=1,
        generator=torch.Generator().manual_seed(3),
        policy=Policy(bad_sample="replace", strikes=1, max_bad=1.0),
    )
    assert flat(loader) == [3, 3, 3, *range(3, 16)]
    assert [bad.index for bad in loader.report().bad_samples] == [0, 1, 2]
    spares = [incident.index for incident in loader.incidents if "another" in incident.did]
    assert spares and 3 not in spares
    assert len(loader.incidents) == 3 + len(spares)


def replacements(loader):
    """index -> (what happened to it, what stands in its place); each is told once."""
    bad = loader.report().bad_samples
    assert len({sample.index for sample in bad}) == len(bad) == loader.stats()["bad_samples"]
    return {sample.index: (sample.error, sample.replaced_by) for sample in bad}


@pytest.mark.parametrize("deaths", [0, 2], ids=["", "and-its-batch-dies-twice-more"])
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_a_spare_that_raises_is_no_bad_sample(seed, deaths, tmp_path):
    """The first sample ends its worker, and those that are tried in its place raise: it is told once, with the last."""
    loader = DataLoader(
        Trips(tmp_path, deadly={0: ALWAYS, 6: deaths}, raising=dict.fromkeys(range(1, 5), ALWAYS), exits=True),
        batch_size=8,
        num_workers=1,
        generator=torch.Generator().manual_seed(seed),
        policy=Policy(bad_sample="replace", strikes=3 if deaths else 1, max_bad=1.0),
    )
    got = flat(loader)
    found = replacements(loader)
    assert sorted(found) == [*range(5)] and got[5:] == [*range(5, 40)]
    assert got[:5] == [found[index][1] for index in range(5)] and {*got[:5]} <= {5, 6, 7}
    assert "exited with code 3" in found[0][0]
    assert all(found[index][0] == f"OSError: sample {index} is bad" for index in range(1, 5))


@pytest.mark.parametrize("together", [False, True], ids=["", "getitems"])
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_a_spare_that_kills_is_not_the_fault_of_what_it_replaces(seed, together, tmp_path):
    """A sample raises, and what is tried in its place ends the worker: each is told once, with what it did itself."""
    dataset = (Together if together else Trips)(
        tmp_path, deadly=dict.fromkeys((1, 2, 3), ALWAYS), raising={0: ALWAYS}, exits=True
    )
    loader = DataLoader(
        dataset,
        batch_size=6,
        num_workers=1,
        generator=torch.Generator().manual_seed(seed),
        policy=Policy(bad_sample="replace", strikes=2, max_bad=1.0),
    )
    got = flat(loader)
    found = replacements(loader)
    assert sorted(found) == [0, 1, 2, 3] and got[4:] == [*range(4, 40)]
    assert got[:4] == [found[index][1] for index in range(4)] and {*got[:4]} <= {4, 5}
    assert found[0][0] == "OSError: sample 0 is bad"
    assert all("exited with code 3" in found[index][0] for index in (1, 2, 3))
    deaths = [incident for incident in loader.incidents if incident.finding != "sample-raised"]
    assert all(incident.index in (1, 2, 3) or together for incident in deaths)
    assert [i.index for i in deaths if "replaced" in i.did] == [1, 2, 3]


@pytest.mark.parametrize("kind", ["kills", "raises"])
def test_what_replaces_a_sample_is_told_without_batches(kind, tmp_path):
    """batch_size=None: the spare is loaded in the place of the one sample."""
    bad = dict.fromkeys([5], ALWAYS)
    loader = DataLoader(
        Trips(tmp_path, deadly=bad if kind == "kills" else {}, raising=bad, exits=True),
        batch_size=None,
        num_workers=1,
        generator=torch.Generator().manual_seed(1),
        policy=Policy(bad_sample="replace", strikes=2, max_bad=1.0),
    )
    got = list(loader)
    ((error, spare),) = replacements(loader).values()
    assert got == [*range(5), spare, *range(6, 40)] and spare in range(5)
    assert ("exited" in error) == (kind == "kills")


def test_a_batch_of_which_nothing_can_be_loaded_is_given_up(tmp_path):
    """Each of them ends its worker, and so does whatever is tried in its place: next() raises for that batch."""
    loader = DataLoader(
        Trips(tmp_path, deadly=dict.fromkeys(range(4), ALWAYS), length=16, exits=True),
        batch_size=4,
        num_workers=1,
        policy=Policy(bad_sample="replace", strikes=1, max_bad=1.0),
    )
    it = iter(loader)
    with pytest.raises(WorkerLost, match="index 0"):
        next(it)
    assert [int(x) for batch in it for x in batch] == list(range(4, 16))
    assert [bad.index for bad in loader.report().bad_samples] == [0]


# Without batches -----------------------------------------------------------------------------------------------------


def raises_at_two(sample):
    if sample in (2, "two"):
        raise ValueError("not this one")
    return sample


def out_of_memory_at_two(sample):
    if sample == 2:
        raise MemoryError
    return sample


def unsendable_at_two(sample):
    return [Unsendable()] if sample == [2] else sample


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate_fn", [raises_at_two, out_of_memory_at_two])
def test_a_collate_fn_may_raise_without_batches(collate_fn, workers):
    """batch_size=None: the exception arrives as itself, its worker lives on, and the next sample comes."""
    loader = DataLoader(range(6), batch_size=None, num_workers=workers, collate_fn=collate_fn)
    it, got = iter(loader), []
    for number in range(6):
        if number == 2:
            with pytest.raises((ValueError, MemoryError)):
                next(it)
        else:
            got.append(next(it))
    assert got == [0, 1, 3, 4, 5]
    assert loader.stats()["restarts"] == 0


def test_what_cannot_be_sent_is_named_without_batches():
    """batch_size=None, and samples that are lists: the error says what it is, and the next sample comes."""
    loader = DataLoader([[i] for i in range(6)], batch_size=None, num_workers=1, collate_fn=unsendable_at_two)
    it = iter(loader)
    assert [next(it), next(it)] == [[0], [1]]
    with pytest.raises(CannotSend, match=r"\[0\] is a Unsendable"):
        next(it)
    assert list(it) == [[3], [4], [5]]
