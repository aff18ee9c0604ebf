"""Others who use a loader: Lightning, copies, subclasses, torch's own checks, children of workers."""

import copy
import multiprocessing
import os
import pickle
import subprocess
import time

import pytest
import torch
from torch.utils.data import TensorDataset

import holdfast
from holdfast import DataLoader, Policy

from .data import Numbers, Stream, flat


def test_lightning_can_rebuild_it():
    """`type(loader)(**kwargs)` from public attributes that are also parameters."""
    import inspect

    policy = Policy(bad_sample="skip", retries=2)
    loader = DataLoader(Numbers(8), batch_size=2, num_workers="auto", policy=policy)
    names = set(inspect.signature(DataLoader.__init__).parameters) - {"self"}
    kwargs = {k: v for k, v in vars(loader).items() if not k.startswith("_") and k in names}
    kwargs["multiprocessing_context"] = loader.multiprocessing_context
    kwargs |= {"batch_size": 1, "sampler": None, "drop_last": False}
    again = type(loader)(**kwargs)
    assert again.policy == loader.policy and again.policy.auto_workers and again.policy.retries == 2
    assert isinstance(again.num_workers, int) and again.num_workers >= 1
    assert flat(again) == list(range(8))


def test_attributes_that_others_use():
    loader = DataLoader(Numbers(8), batch_size=2, num_workers=2, persistent_workers=True)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert DataLoader[int] is not None
    assert loader._auto_collation and loader._index_sampler is loader.batch_sampler and loader._dataset_kind == 0
    iterator = iter(loader)
    next(iterator)
    assert loader._iterator is iterator and len(iterator) == 4
    worker = iterator._workers[0]
    assert worker.pid > 0 and worker.is_alive() and worker.exitcode is None
    iterator._shutdown_workers()
    worker.join(5)
    assert not worker.is_alive()
    with pytest.raises(NotImplementedError):
        pickle.dumps(iterator)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_in_use_can_be_copied(persistent):
    """Frameworks copy loaders, and spawned ranks get them pickled; the workers stay with the one that has them."""
    loader = DataLoader(Numbers(40), batch_size=4, num_workers=2, persistent_workers=persistent)
    batches = iter(loader)
    next(batches)
    copies = [copy.copy(loader)]
    if not persistent:  # one that holds its iterator cannot be pickled; nor can torch's
        copies += [copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
    flat(batches)
    for made in copies:
        assert flat(made) == list(range(40))
        assert sum(row["samples"] for row in made.stats()["per_worker"]) >= 40


def test_a_collate_that_gives_none_after_a_retry(tmp_path):
    """None is a batch like any other, also where a sample was loaded at its second attempt."""
    loader = DataLoader(
        Shaky(tmp_path), batch_size=2, num_workers=1, collate_fn=nothing, policy=Policy(retries=1, retry_delay=0.01)
    )
    assert list(loader) == [None, None, None]
    assert loader.stats()["retries"] == 1


class Shaky(Numbers):
    """Sample 2 raises once."""

    def __init__(self, folder):
        super().__init__(6)
        self.mark = folder / "raised"

    def __getitem__(self, index):
        if index == 2 and not self.mark.exists():
            self.mark.touch()
            raise OSError("once")
        return index


def nothing(samples):
    return None


def test_torchs_own_checks_stand():
    for wrong in (
        {"num_workers": -1},
        {"num_workers": "many"},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"num_workers": 2, "prefetch_factor": 0},
        {"persistent_workers": True},
        {"shuffle": True, "sampler": [1]},
        {"batch_size": 2, "batch_sampler": [[1]]},
    ):
        with pytest.raises(ValueError):
            DataLoader(Numbers(8), **wrong)
    with pytest.raises(TypeError, match=r"holdfast\.Policy"):
        DataLoader(Numbers(8), policy="skip")
    with pytest.raises(ValueError, match="map-style"):
        DataLoader(Stream(8), policy=Policy(bad_sample="replace"))


def test_it_is_subclassed_and_tensordatasets_work():
    class Mine(holdfast.DataLoader):
        pass

    data = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    assert [b[1].tolist() for b in Mine(data, batch_size=5, num_workers=1)] == [[0, 2, 4, 6, 8], [10, 12, 14, 16, 18]]


def test_a_worker_may_have_children_that_can_be_terminated():
    """Signals that workers note do not reach the programs that the dataset starts."""

    class Starts(Numbers):
        def __getitem__(self, index):
            process = subprocess.Popen(["sleep", "30"])
            process.terminate()
            code = process.wait(5)
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
            child.start()
            child.terminate()
            child.join(5)
            return code, child.exitcode

    loader = DataLoader(Starts(2), batch_size=None, num_workers=1)
    assert [tuple(map(int, pair)) for pair in loader] == [(-15, -15)] * 2


class Leaving:
    """Cannot be pickled: it tries to end whoever does."""

    def __reduce__(self):
        raise SystemExit("in __reduce__")


class DeadlyOnce(Numbers):
    """Ends its process at index 2, the first time."""

    def __init__(self, flag):
        super().__init__(4)
        self.flag = flag

    def __getitem__(self, index):
        if index == 2 and not self.flag.exists():
            self.flag.touch()
            os._exit(1)
        return Leaving()


def how_many(samples):
    return torch.tensor(len(samples))


def test_samples_that_cannot_be_pickled_are_loaded_again_all_the_same(tmp_path):
    """The second attempt at a batch keeps what it has loaded, for a third; what cannot be kept is no fault."""
    loader = DataLoader(DeadlyOnce(tmp_path / "died"), batch_size=4, num_workers=1, collate_fn=how_many)
    assert [int(batch) for batch in loader] == [4]
    assert loader.stats()["restarts"] == 1
