"""CachedDataset on real workers: samples come from memory the second time, whoever died in between."""

import copy
import gc
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
from decimal import Decimal

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import Dataset

from holdfast import CachedDataset, DataLoader, Policy

from ..conftest import METHODS, until
from .data import Stream


class Slow(Dataset):
    """Writes down each load, in whatever process; a sample says its index in every byte."""

    classes = ("cat", "dog")

    def __init__(self, path, length=40, size=3000, deadly=()):
        self.path = str(path)
        self.length = length
        self.size = size
        self.deadly = frozenset(deadly)  # kill their worker, once

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        with open(self.path, "a") as file:
            file.write(f"{index}\n")
        mark = f"{self.path}.{index}"
        if index in self.deadly and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((self.size,), index % 256, dtype=torch.uint8), index

    def loads(self):
        if not os.path.exists(self.path):
            return []
        with open(self.path) as file:
            return [int(line) for line in file]


class Many(Slow):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def seen(loader):
    indices = []
    for images, labels in loader:
        assert (images == (labels % 256).to(torch.uint8)[:, None]).all()
        indices += labels.tolist()
    return indices


@pytest.mark.parametrize(
    ("maker", "method"),
    [
        *((DataLoader, method) for method in METHODS),
        *((torch.utils.data.DataLoader, method) for method in ("fork", "forkserver")),
    ],
)
def test_the_second_epoch_comes_from_memory(maker, method, tmp_path):
    """New workers each epoch, and each sample is loaded once."""
    dataset = Slow(tmp_path / "log")
    cached = CachedDataset(dataset, "16MiB")
    loader = maker(cached, batch_size=4, num_workers=2, multiprocessing_context=method)
    for _ in range(2):
        assert seen(loader) == list(range(40))
    assert sorted(dataset.loads()) == list(range(40))
    figures = cached.figures()
    assert (figures["hits"], figures["misses"], figures["stored"], figures["samples"]) == (40, 40, 40, 40)
    assert figures["hit_rate"] == 0.5
    assert 40 * 3000 < figures["bytes"] < 40 * 3600


@pytest.mark.parametrize("workers", [0, 2])
def test_without_workers_too_and_the_trainer_shares(workers, tmp_path):
    dataset = Slow(tmp_path / "log")
    cached = CachedDataset(dataset, "16MiB")
    assert seen(DataLoader(cached, batch_size=4, num_workers=workers)) == list(range(40))
    assert [cached[i][1] for i in range(40)] == list(range(40))
    assert len(dataset.loads()) == 40


def test_with_getitems_only_what_is_missing_is_loaded(tmp_path):
    dataset = Many(tmp_path / "log")
    cached = CachedDataset(dataset, "16MiB")
    for i in range(0, 40, 2):
        cached[i]
    before = len(dataset.loads())
    assert seen(DataLoader(cached, batch_size=8, num_workers=2, shuffle=False)) == list(range(40))
    assert sorted(dataset.loads()[before:]) == list(range(1, 40, 2))
    assert [sample[1] for sample in cached.__getitems__([3, 1, 2])] == [3, 1, 2]


def test_getitems_is_there_only_if_the_dataset_has_it(tmp_path):
    """Otherwise a sample that ends its worker could not be named."""
    assert not hasattr(CachedDataset(Slow(tmp_path / "log"), "1MiB"), "__getitems__")
    assert hasattr(CachedDataset(Many(tmp_path / "log"), "1MiB"), "__getitems__")


@pytest.mark.parametrize("method", METHODS)
def test_the_cache_survives_its_workers(method, tmp_path):
    dataset = Slow(tmp_path / "log", deadly={5, 17, 30})
    cached = CachedDataset(dataset, "16MiB")
    loader = DataLoader(cached, batch_size=4, num_workers=2, multiprocessing_context=method)
    assert seen(loader) == list(range(40))
    before = len(dataset.loads())
    assert seen(loader) == list(range(40))
    assert len(dataset.loads()) == before
    assert cached.figures()["samples"] == 40
    assert loader.stats()["restarts"] == 3


def test_workers_are_killed_all_the_time_and_every_byte_is_right(tmp_path):
    """In a cache that is too small, so that they are killed while they evict and write."""
    dataset = Slow(tmp_path / "log", length=200, size=30_000)
    cached = CachedDataset(dataset, "2MiB", evict="oldest")
    policy = Policy(strikes=50, restarts=500)
    loader = DataLoader(cached, batch_size=4, num_workers=2, shuffle=True, persistent_workers=True, policy=policy)
    kills = 0
    chance = random.Random(1)
    for _ in range(4):
        epoch = iter(loader)
        indices = []
        for images, labels in epoch:
            assert (images == (labels % 256).to(torch.uint8)[:, None]).all()
            indices += labels.tolist()
            if chance.random() < 0.1:
                try:
                    os.kill(chance.choice(epoch._workers).pid, signal.SIGKILL)
                    kills += 1
                except (ProcessLookupError, TypeError):
                    pass  # between two lives
        assert sorted(indices) == list(range(200))
    assert kills > 5
    figures = cached.figures()
    assert figures["hits"] > 0 and figures["bytes"] <= 2 << 20
    del epoch, loader


def test_it_never_takes_more_than_it_was_given(tmp_path):
    for evict in ("never", "oldest"):
        cached = CachedDataset(Slow(tmp_path / "log", length=300, size=50_000), "4MiB", evict=evict)
        loader = DataLoader(cached, batch_size=10, num_workers=2)
        for _ in range(2):
            assert seen(loader) == list(range(300))
        figures = cached.figures()
        assert figures["bytes"] <= 4 << 20
        pages = os.stat(f"/proc/self/fd/{cached._store.shared._fd}").st_blocks * 512
        assert 3 << 20 < pages <= 4 << 20
        if evict == "never":
            assert 70 < figures["hits"] <= figures["samples"] == figures["stored"]
            # One that found the last segment with room in the other worker's hands was not kept either: nobody waits.
            assert figures["misses"] == 600 - figures["hits"]
            assert figures["misses"] == figures["stored"] + figures["no_room"] + figures["busy"]
        else:
            assert figures["stored"] > 500


def test_only_touched_pages_cost(tmp_path):
    cached = CachedDataset(Slow(tmp_path / "log"), "8GiB")
    cached[0]
    assert os.stat(f"/proc/self/fd/{cached._store.shared._fd}").st_blocks * 512 < 1 << 20


def test_an_exception_is_not_kept():
    class Moody(Dataset):
        calls = 0

        def __len__(self):
            return 3

        def __getitem__(self, index):
            self.calls += 1
            if self.calls == 1:
                raise OSError("not yet")
            return index

    cached = CachedDataset(Moody(), "1MiB")
    with pytest.raises(OSError, match="not yet"):
        cached[0]
    assert cached[0] == 0
    assert cached.figures()["samples"] == 1


class Unreadable:
    """It pickles, and cannot be unpickled."""

    def __reduce__(self):
        return int, ("no number",)


def test_what_cannot_be_kept_is_passed_through_and_counted():
    samples = [threading.Lock(), torch.zeros(1 << 20), Unreadable(), "plain"]
    cached = CachedDataset(samples, "512KiB")
    for _ in range(2):
        for i, sample in enumerate(samples):
            assert cached[i] is sample or cached[i] == "plain"
    figures = cached.figures()
    assert (figures["hits"], figures["too_large"], figures["unpicklable"]) == (2, 2, 3)
    assert figures["samples"] == 2


def test_keys_that_are_no_index_are_passed_through_and_counted():
    class Words(dict):
        loads = 0

        def __getitem__(self, key):
            Words.loads += 1
            return super().__getitem__(int(key) if hasattr(key, "dtype") else key)

    cached = CachedDataset(Words({"a": 1, (1, 2): 3, -1: 4, 99: 5, 2: 6, 0: 7}), "1MiB")
    for _ in range(2):
        assert [cached[key] for key in ("a", (1, 2), -1, 99)] == [1, 3, 4, 5]
        assert cached[np.int64(2)] == cached[torch.tensor(2)] == cached[2] == 6
    assert Words.loads == 4 * 2 + 1
    assert cached.figures()["odd_keys"] == 8
    assert cached.figures()["hits"] == 5


def test_keys_that_only_look_like_an_index():
    """A tensor gives another shape for each of them."""
    table = torch.arange(12).view(4, 3)
    cached = CachedDataset(table, "1MiB")
    for _ in range(2):
        for key in (1, True, torch.tensor([1]), torch.tensor(True), slice(0, 2), [1], np.array([1])):
            assert torch.equal(cached[key], table[key]), key
    assert (cached.figures()["hits"], cached.figures()["odd_keys"]) == (1, 12)


def test_samples_come_back_as_they_were():
    samples = [
        {"image": torch.rand(3, 8, 8), "box": np.arange(4.0), "name": "a", "none": None},
        (torch.rand(4, 4).t(), torch.zeros(0), torch.tensor(True), torch.rand(2).bfloat16()),
        torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        [1, 2.5, b"bytes", {"nested": [np.float32(1)]}],
        (None, torch.ones(3)),
        Decimal("1.5"),
        None,
    ]
    cached = CachedDataset(samples, "1MiB")
    for i, sample in enumerate(samples):
        cached[i]
        same(cached[i], sample)
    assert cached.figures()["hits"] == len(samples)
    assert cached[2].stride() == samples[2].stride()
    cached[4][1].fill_(9)  # the user's own copy
    same(cached[4], samples[4])


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype and (a == b).all()
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            same(one, other)
    else:
        assert a == b


def test_attributes_are_the_datasets(tmp_path):
    dataset = Slow(tmp_path / "log")
    cached = CachedDataset(dataset, "1MiB")
    assert cached.classes == ("cat", "dog") and len(cached) == 40 and cached.dataset is dataset
    with pytest.raises(AttributeError, match="colours"):
        _ = cached.colours
    with pytest.raises(AttributeError):
        _ = CachedDataset.__new__(CachedDataset).classes


def test_what_makes_no_sense_is_refused(tmp_path):
    with pytest.raises(TypeError, match="Stream is an IterableDataset"):
        CachedDataset(Stream(), "1MiB")
    with pytest.raises(TypeError, match="__len__"):
        CachedDataset(iter([]), "1MiB")
    with pytest.raises(ValueError, match="not a size"):
        CachedDataset([1], "large")
    with pytest.raises(ValueError, match="'never' or 'oldest'"):
        CachedDataset([1], "1MiB", evict="lru")
    with pytest.raises(ValueError, match="too small"):
        CachedDataset(range(1_000_000), "1MiB")


class Loud(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index + torch.rand(1).item()


def shout(sample):
    return sample, torch.rand(1).item()


def test_chance_belongs_behind_the_cache(caplog, tmp_path):
    with caplog.at_level(logging.WARNING, "holdfast"):
        cached = CachedDataset(Loud(), "1MiB")
        for i in range(8):
            cached[i]
    assert [r.message for r in caplog.records if "drew random numbers" in r.message] and len(caplog.records) == 1
    assert "then=augment" in caplog.text
    assert cached.figures()["random"] == 8
    kept = CachedDataset(Slow(tmp_path / "log"), "1MiB", then=shout)
    assert kept[0][1] != kept[0][1] and kept.figures()["hits"] == 1
    assert kept.figures()["random"] == 0


def test_a_size_beyond_the_memory_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING, "holdfast"):
        CachedDataset([1], "4TiB")
    assert "4096.0 GiB are more than" in caplog.text


def test_cleared_when_the_dataset_changes(tmp_path):
    dataset = Slow(tmp_path / "log")
    cached = CachedDataset(dataset, "16MiB")
    loader = DataLoader(cached, batch_size=4, num_workers=2)
    seen(loader)
    cached.clear()
    assert cached.figures()["samples"] == 0
    seen(loader)
    assert len(dataset.loads()) == 80


def test_a_deep_copy_has_a_cache_of_its_own(tmp_path):
    """Its dataset may be changed to give other samples."""
    cached = CachedDataset(Slow(tmp_path / "log"), "1MiB")
    cached[0]
    other = copy.deepcopy(cached)
    other.dataset.size = 5
    assert len(other[0][0]) == 5 and len(cached[0][0]) == 3000
    assert len(copy.copy(cached)[0][0]) == 3000


def test_unpickled_where_it_cannot_be_found_it_starts_empty(tmp_path):
    """A later run, another machine."""
    cached = CachedDataset(Slow(tmp_path / "log"), "1MiB")
    cached[0]
    together = pickle.loads(pickle.dumps(cached))
    assert together.figures()["samples"] == 1
    saved = pickle.dumps(cached)
    del cached, together
    gc.collect()
    alone = pickle.loads(saved)
    assert alone.figures()["samples"] == 0
    assert alone[0][1] == 0 and alone.figures()["samples"] == 1


def test_one_that_may_not_look_says_so(tmp_path):
    """Another user's process on the same machine: a cache of its own in each worker would be far too much memory."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become somebody else")
    held = CachedDataset([1, 2], "1MiB")
    saved = pickle.dumps(held)
    code = (
        "import os, pickle, sys; from holdfast import CachedDataset\n"
        "saved = sys.stdin.buffer.read()\n"
        "os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "pickle.loads(saved)"
    )
    ended = subprocess.run([sys.executable, "-c", code], input=saved, capture_output=True, check=False)
    assert b"cannot open the memory that process" in ended.stderr, ended.stderr.decode()
    assert b"PermissionError" in ended.stderr


def test_a_trainer_that_is_killed_leaves_nothing(tmp_path):
    code = (
        "import os, sys, torch\n"
        "from holdfast import CachedDataset, DataLoader\n"
        "from tests.process.test_cache import Slow\n"
        f"cached = CachedDataset(Slow({str(tmp_path / 'log')!r}), '16MiB')\n"
        "loader = DataLoader(cached, batch_size=4, num_workers=2)\n"
        "for batch in loader:\n"
        "    print('batch', flush=True); os.kill(os.getpid(), 9)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert ended.returncode == -9 and "batch" in ended.stdout
    until(lambda: not holders("holdfast-cache"), "some process still holds the cache of a dead trainer", 5)


def holders(name):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/maps") as maps:
                if name in maps.read() and int(pid) != os.getpid():
                    found.append(int(pid))
        except OSError:
            continue
    return found


def test_another_generator_behind_numpys_functions():
    """Looking for draws must not disturb who has put one there."""
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "import numpy as np; np.random.set_bit_generator(np.random.PCG64(1))\n"
        "from holdfast import CachedDataset\n"
        "class Drawn(list):\n"
        "    def __getitem__(self, index):\n"
        "        return np.random.rand() if index else index\n"
        "cached = CachedDataset(Drawn([0, 1]), '1MiB')\n"
        "cached[0]; print(cached.figures()['random']); cached[1]; print(cached.figures()['random'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert ended.stdout.split() == ["0", "1"], ended.stderr
