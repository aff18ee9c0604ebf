"""What whole epochs have made of a dataset, and what of it can be given to a new life."""

import threading

import numpy as np
import torch

from holdfast.loader import dataset_changes
from holdfast.loader.dataset_changes import DatasetChanges
from holdfast.loader.fetch import everything


class Data:
    def __init__(self):
        self.epoch = 0
        self.lock = threading.Lock()
        self.large = np.zeros(dataset_changes.LIMIT + 1, np.uint8)
        self.shared = torch.zeros(2).share_memory_()
        self.view = np.frombuffer(bytearray(8), np.uint8)
        self.walker = None


class Hostile:
    def __reduce__(self):
        raise SystemExit("no")


class Walker:
    def __init__(self, dataset):
        self.dataset = dataset


def test_nothing_is_given_on_where_nothing_has_changed():
    dataset = Data()
    of_life = DatasetChanges(dataset, everything)
    assert of_life.moved() == b""
    dataset.epoch = 1
    assert of_life.moved()
    assert of_life.moved() == b""


def test_what_has_changed_comes_to_another_life_and_goes_on_from_there():
    """With what was changed in the lives before it; and what belongs together stays so."""
    first, second, third = Data(), Data(), Data()
    of_first, of_second, of_third = (DatasetChanges(dataset, everything) for dataset in (first, second, third))
    first.epoch, first.walker = 3, Walker(first)
    of_second.restore(of_first.moved())
    assert second.epoch == 3
    assert second.walker.dataset is second
    assert of_second.moved() == b""
    second.files = ["a"]
    of_third.restore(of_second.moved())
    assert (third.epoch, third.files) == (3, ["a"])


def test_what_is_large_or_shared_or_cannot_be_pickled_is_as_in_every_life():
    first, second = Data(), Data()
    of_first, of_second = DatasetChanges(first, everything), DatasetChanges(second, everything)
    own = dict(vars(second))
    first.large[0] = first.shared[0] = first.view[0] = 1
    first.lock, first.walker = threading.Lock(), Hostile()
    first.epoch = 1
    of_second.restore(of_first.moved())
    assert second.epoch == 1
    assert all(vars(second)[name] is own[name] for name in own if name != "epoch")


def test_a_change_of_what_cannot_be_given_on_is_seen():
    """Of large arrays some elements, of others what stands beside a lock, and where a file is read."""
    changes = {
        "an array": lambda data: data.large.fill(1),
        "a list": lambda data: data.names.reverse(),
        "beside a lock": lambda data: data.both.update(epoch=1),
        "a file": lambda data: data.file.read(1),
        "a generator": lambda data: setattr(data, "walk", (x for x in "ab")),
    }
    with open(__file__) as file:
        for name, change in changes.items():
            dataset = Data()
            dataset.names = [f"{i:030}" for i in range(200_000)]
            dataset.both = {"lock": threading.Lock(), "epoch": 0, "local": lambda: 0}
            dataset.file = file
            of_life = DatasetChanges(dataset, everything)
            assert of_life.moved() == b"" and not of_life.lost, name
            change(dataset)
            assert of_life.moved() == b"" and of_life.lost, name


def test_what_is_held_back_for_a_file_stays_there(tmp_path):
    """It may be held back in several processes, and would be written by each."""
    dataset = Data()
    with open(tmp_path / "log", "w+") as file:
        dataset.file = file
        file.write("held back")
        assert DatasetChanges(dataset, everything).moved() == b""
        assert (tmp_path / "log").read_text() == ""
