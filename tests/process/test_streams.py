"""Epochs of iterable datasets beside torch's: whole, in the same order, whatever was killed or left before."""

import os
import random
import signal

import pytest
import torch
from torch.utils.data import IterableDataset

from holdfast import DataLoader, LoaderTorn, Policy, StreamBroken
from holdfast.loader import loader_job
from holdfast.loader.batch_requests import BatchRequests
from holdfast.loader.iterator import WorkerIterator
from holdfast.loader.stream import StreamFetcher, fingerprint

from .data import Numbers
from .streams import (
    COUNTING,
    KINDS,
    UNFIT,
    Counts,
    CountsAtItsStart,
    CountsWithState,
    GoesOn,
    Itself,
    Pending,
    Plain,
    Stateful,
    Stays,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def end(loader):
    """The processes of persistent workers."""
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()


def epochs(loader, plan, kill=lambda epoch, batch: None):
    """What each epoch gave. `plan`: after how many batches it is left; None for not at all. `kill`: whom, and when."""
    try:
        return [epoch(loader, number, stop, kill) for number, stop in enumerate(plan)]
    finally:
        end(loader)


def epoch(loader, number, stop, kill):
    iterator = iter(loader)
    batches = []

    def strike():
        worker = kill(number, len(batches))
        if worker is not None and iterator._workers[worker].pid:
            os.kill(iterator._workers[worker].pid, signal.SIGKILL)

    strike()
    for batch in iterator:
        batches.append(torch.as_tensor(batch).tolist())
        strike()
        if len(batches) == stop:
            break
    return batches


@pytest.mark.parametrize("kind", [GoesOn, Itself, Stays])
@pytest.mark.parametrize("batch_size", [8, None])
def test_each_epoch_of_a_stream_that_knows_its_place_is_whole(kind, batch_size):
    """Without any fault: what is asked of a worker whose stream has ended moves no dataset."""
    loader = DataLoader(kind(60, 0.0005), batch_size=batch_size, num_workers=4, persistent_workers=True)
    for epoch, batches in enumerate(epochs(loader, [None] * 25)):
        given = [x for batch in batches for x in (batch if batch_size else [batch])]
        assert sorted(given) == list(range(60)), f"epoch {epoch}"
    assert not loader.incidents


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_epoch_begins_where_torchs_would(kind):
    """Epochs that are left move a dataset that goes on from where it is as far as torch would."""
    plan = [None, 1, None, 3, 2, None, 1, 1, None]
    settings = {"batch_size": 4, "num_workers": 3, "persistent_workers": True}
    expected = epochs(torch.utils.data.DataLoader(kind(110), **settings), plan)
    assert epochs(DataLoader(kind(110, 0.0005), **settings), plan) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_kill_in_one_epoch_shortens_no_other(kind, method):
    """The state that a new life was given belongs to that epoch."""
    settings = {"batch_size": 2, "num_workers": 1, "persistent_workers": True, "multiprocessing_context": method}
    loader = DataLoader(kind(24, 0.002), **settings)
    given = epochs(loader, [None, None, 3, None], lambda epoch, batch: 0 if (epoch, batch) == (0, 5) else None)
    assert given == epochs(torch.utils.data.DataLoader(kind(24), **settings), [None, None, 3, None])
    assert loader.stats()["restarts"] == 1


@pytest.mark.parametrize("kind", [GoesOn, Itself, Stays, Pending])
@pytest.mark.parametrize("early", [0, 1])
def test_a_life_that_begins_after_epochs_that_were_left(kind, early):
    """Killed before anything of the epoch was given, or after its first batch: it begins where torch's would."""
    settings = {"batch_size": 2, "num_workers": 1, "persistent_workers": True, "prefetch_factor": 2}
    plan = [3, 3, None, None]
    expected = epochs(torch.utils.data.DataLoader(kind(40), **settings), plan)
    loader = DataLoader(kind(40, 0.01), **settings)
    assert epochs(loader, plan, lambda epoch, batch: 0 if (epoch, batch) == (2, early) else None) == expected
    assert loader.stats()["restarts"] == 1


@pytest.mark.parametrize("kind", COUNTING)
@pytest.mark.parametrize("when", [(0, 0), (0, 5), (1, 0), (1, 5), (2, 0), (2, 5)])
def test_what_a_dataset_counts_over_its_epochs_outlives_a_worker(kind, when):
    """Else a new life takes its share of another order, and what is in neither share is lost without a word."""
    settings = {"batch_size": 2, "num_workers": 2, "persistent_workers": True}
    expected = epochs(torch.utils.data.DataLoader(kind(40), **settings), [None] * 5)
    loader = DataLoader(kind(40, 0.001), **settings)
    assert epochs(loader, [None] * 5, lambda *now: 1 if now == when else None) == expected
    assert loader.stats()["restarts"] == 1


def test_a_count_outlives_a_worker_also_where_an_epoch_was_left_before():
    """Left in epoch 0, killed before epoch 1 and in it: epoch 2 begins where the first two have led."""
    settings = {"batch_size": 2, "num_workers": 2, "persistent_workers": True}
    plan, kills = [3, None, None, None], {(1, 0): 1, (1, 6): 1}
    expected = epochs(torch.utils.data.DataLoader(CountsWithState(40), **settings), plan)
    loader = DataLoader(CountsWithState(40, 0.001), **settings)
    assert epochs(loader, plan, lambda *now: kills.get(now)) == expected


@pytest.mark.parametrize("kind", [Counts, CountsWithState, CountsAtItsStart])
@pytest.mark.parametrize("when", [(1, 2), (3, 0), (3, 1), (3, 5)])
def test_what_epochs_that_were_left_count_outlives_a_worker(kind, when):
    """And they are not all gone through again: each gives on what the ones before have made of the dataset."""
    settings = {"batch_size": 2, "num_workers": 2, "persistent_workers": True}
    plan = [1, 3, 2, None, None]
    expected = epochs(torch.utils.data.DataLoader(kind(40), **settings), plan)
    loader = DataLoader(kind(40, 0.001), **settings)
    found = []

    def kill(*now):
        found.append(max(map(len, loader._iterator._orders._left.values()), default=0))
        return 1 if now == when else None

    assert epochs(loader, plan, kill) == expected
    assert max(found) == 1


@pytest.mark.parametrize("kind", UNFIT)
@pytest.mark.parametrize("when", [(1, 0), (2, 0), (2, 5), (3, 0), (3, 5)])
def test_what_cannot_be_given_on_is_noticed_and_gone_through_again(kind, when):
    """Whole epochs and such as were left: no life takes its share of another order, with nobody to notice."""
    settings = {"batch_size": 2, "num_workers": 2, "persistent_workers": True}
    plan = [None, 3, None, None, None]
    expected = epochs(torch.utils.data.DataLoader(kind(40), **settings), plan)
    loader = DataLoader(kind(40, 0.001), **settings)
    assert epochs(loader, plan, lambda *now: 1 if now == when else None) == expected
    assert loader.stats()["restarts"] == 1


def test_a_whole_epoch_is_not_gone_through_where_it_changes_nothing(monkeypatch):
    """A life that was given a state may begin the next epoch as all others have."""
    monkeypatch.setattr(StreamFetcher, "run_out", None)
    loader = DataLoader(Stays(24, 0.002), batch_size=2, num_workers=1, persistent_workers=True)
    given = epochs(loader, [None] * 4, lambda *now: 0 if now == (2, 5) else None)
    assert given == [[[i, i + 1] for i in range(0, 24, 2)]] * 4
    assert loader.stats()["restarts"] == 1


@pytest.mark.parametrize("seed", range(16))
def test_random_loaders_give_what_torchs_give_undisturbed(seed):
    """Any kind of dataset, number of workers, size of batches, epochs that are left, and workers that are killed."""
    dice = random.Random(seed)
    kind = dice.choice([*KINDS, *COUNTING, GoesOn, Stays, Numbers])
    length, workers = dice.randrange(5, 90), dice.randrange(1, 5)
    settings = {
        "batch_size": dice.choice([None, 1, 3, 4, 8]),
        "num_workers": workers,
        "persistent_workers": dice.random() < 0.8,
        "prefetch_factor": dice.choice([2, 2, 3]),
    }
    if settings["batch_size"] is not None:
        settings["drop_last"] = dice.random() < 0.3
    plan = [dice.choice([None, None, 1, dice.randrange(1, 12)]) for _ in range(6)]
    if kind in (GoesOn, Itself):
        # How much was asked of each stream when an epoch is left is certain as long as none of them has ended.
        plan[1::2] = [None] * 3
        length += workers * (settings["batch_size"] or 1) * 16
    kills = {(dice.randrange(6), dice.randrange(8)): dice.randrange(workers) for _ in range(dice.choice([0, 1, 3]))}
    expected = epochs(torch.utils.data.DataLoader(kind(length), **settings), plan)
    loader = DataLoader(kind(length, 0.001), **settings)
    assert epochs(loader, plan, lambda *when: kills.get(when)) == expected, (kind, length, settings, plan, kills)


class WantsArguments(Stateful):
    """As LitData's and MosaicML's."""

    def state_dict(self, num_samples_yielded, num_workers, batch_size):
        return {}

    def load_state_dict(self, state):
        raise AssertionError("there is no state to load")


class Raises(Stateful):
    def state_dict(self):
        raise SystemExit("not now")

    def load_state_dict(self, state):
        raise AssertionError("there is no state to load")


class CannotBePickled(Raises):
    def state_dict(self):
        return {"lock": __import__("threading").Lock()}


@pytest.mark.parametrize("kind", [WantsArguments, Raises, CannotBePickled])
def test_a_state_that_cannot_be_had_means_no_snapshots(kind):
    """The run is undisturbed, a kill is answered by a replay, and it is said once."""
    loader = DataLoader(kind(60, 0.002), batch_size=2, num_workers=2, persistent_workers=True)
    given = epochs(loader, [None, None], lambda epoch, batch: 1 if (epoch, batch) == (1, 12) else None)
    assert [sorted(x for batch in batches for x in batch) for batches in given] == [list(range(60))] * 2
    findings = [incident.finding for incident in loader.incidents]
    assert findings.count("stream-without-state") == 1
    assert loader.stats()["restarts"] == 1
    assert "state_dict() of the dataset raised" in str(loader.report())


class Refuses(Stateful):
    def load_state_dict(self, state):
        raise ValueError("of another version")


def test_a_state_that_is_refused_is_answered_by_a_replay():
    """load_state_dict() that raises loses nothing."""
    loader = DataLoader(Refuses(40, 0.005), batch_size=2, num_workers=1)
    assert epochs(loader, [None], lambda epoch, batch: 0 if batch == 8 else None) == [
        [[i, i + 1] for i in range(0, 40, 2)]
    ]
    assert loader.stats()["restarts"] == 1


class Once(IterableDataset):
    """Its iter() raises in the first worker."""

    def __iter__(self):
        if torch.utils.data.get_worker_info().id == 0:
            raise ValueError("no such shard")
        return iter(range(6))


def test_an_iter_that_raises_is_told_once_and_the_others_go_on():
    """And what it could not give is not counted as lost in silence."""
    iterator = iter(DataLoader(Once(), batch_size=2, num_workers=2))
    with pytest.raises(ValueError, match="no such shard"):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint32, torch.float32, torch.complex64])
def test_an_item_of_one_number_is_told_from_another(dtype):
    """Whatever its stride: such a one counts as contiguous."""
    numbers = torch.arange(6).to(dtype).view(2, 3).t()
    columns = [numbers[at : at + 1, 0] for at in range(3)] + [numbers[:1, 1]]
    assert len({fingerprint(column, 0) for column in columns}) == 4


# The counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["fork", "raise", "skip"])
def test_every_batch_is_counted_once(ending):
    """Delivered, raised, or nothing left of it: then the epoch is whole, and its end is a plain end."""
    dataset = Bad(40) if ending != "fork" else Numbers(40)
    policy = Policy(bad_sample="skip", max_bad=1.0) if ending == "skip" else Policy()
    iterator = iter(DataLoader(dataset, batch_size=2, num_workers=2, policy=policy))
    given = 0
    while True:
        try:
            given += len(next(iterator))
        except ValueError:
            continue
        except StopIteration:
            break
    assert given == (40 if ending == "fork" else 36)


class Bad(Numbers):
    def __getitem__(self, index):
        if index in (6, 7, 20, 21):
            raise ValueError("bad")
        return index


@pytest.mark.parametrize("dataset", [Numbers(40), Plain(40)])
def test_a_batch_that_got_lost_in_the_trainer_is_noticed(dataset, monkeypatch):
    """The epoch does not end as if it were whole."""
    take, lost = WorkerIterator._take, []

    def loses_one(self):
        unpacked = take(self)
        if self._num_yielded == 3 and not lost:
            lost.append(unpacked)
            return None
        return unpacked

    monkeypatch.setattr(WorkerIterator, "_take", loses_one)
    iterator = iter(DataLoader(dataset, batch_size=2, num_workers=2))
    with pytest.raises(LoaderTorn, match=r"not whole: .* that were asked for, 19 came"):
        list(iterator)
    with pytest.raises(LoaderTorn, match="not whole"):
        next(iterator)


def test_a_batch_of_a_stream_that_was_never_asked_for_is_noticed(monkeypatch):
    """The worker counts its batches, and is asked for each by its number."""
    told = BatchRequests.payload

    def skips_one(self, send):
        return told(self, send._replace(number=send.number + (send.number >= 3)))

    monkeypatch.setattr(BatchRequests, "payload", skips_one)
    with pytest.raises(StreamBroken, match="has come to batch 3, and was asked for batch 4"):
        list(DataLoader(Plain(40), batch_size=2, num_workers=2))


def test_a_stream_that_made_more_batches_than_came_is_noticed(monkeypatch):
    """At its end the worker's own count is compared."""
    take = StreamFetcher.take

    def takes_two(self, *args, **named):
        if self.number == 3:
            take(self, *args, **named)
        return take(self, *args, **named)

    monkeypatch.setattr(StreamFetcher, "take", takes_two)
    monkeypatch.setattr(StreamFetcher, "prepare", lambda self, number: self._seed(number))
    with pytest.raises(StreamBroken, match=r"ended after 10 batches by its own count, and 9 came"):
        list(DataLoader(Plain(40), batch_size=2, num_workers=2))


def test_an_item_of_a_stream_that_did_not_come_is_noticed(monkeypatch):
    """At the end of the epoch the items are compared, too."""
    send = loader_job.LoaderJob._send

    def loses_one(self, content, *args):
        (troubles, snapshot, items, moved), batch = content
        return send(self, ((troubles, snapshot, items - 1, moved), batch[1:]), *args)

    monkeypatch.setattr(loader_job.LoaderJob, "_send", loses_one)
    with pytest.raises(StreamBroken, match=r"gave 20 items by its own count, and 10 came"):
        list(DataLoader(Plain(40), batch_size=2, num_workers=2))
