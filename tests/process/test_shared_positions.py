"""Files that a dataset holds open when its workers are forked: found at start, told, or refused."""

import gzip
import io
import mmap
import os
import struct
import tarfile
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset

from holdfast import DataLoader, FileCache, FileShared, Policy
from holdfast.loader.files import shared_positions

from .data import Numbers, Reopens, flat

COUNT = 1000


class Held(Dataset):
    """Opened in the trainer; each worker seeks and reads."""

    def __init__(self, path):
        self.file = open(path, "rb", buffering=0)

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        self.file.seek(index * 8)
        time.sleep(0.0002)  # another worker comes between
        return int.from_bytes(self.file.read(8), "little")


class Cached(Held):
    """The same by a FileCache, which the trainer has used."""

    def __init__(self, path):
        self.path = path
        self.files = FileCache(4, mode="rb", buffering=0)
        self.files[path].read(8)

    @property
    def file(self):
        return self.files[self.path]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(struct.pack(f"<{COUNT}q", *range(COUNT)))
    return path


def loader(dataset, method="fork", **policy):
    return DataLoader(
        dataset, 10, num_workers=4, multiprocessing_context=method, policy=Policy(**policy) if policy else None
    )


def test_a_file_that_was_open_before_the_fork_gives_wrong_samples_and_is_told(path):
    """That the samples are wrong is why it is told: nothing else notices."""
    held = loader(Held(path))
    wrong = 0
    for _ in range(20):
        wrong += sum(a != b for a, b in zip(flat(held), range(COUNT), strict=True))
        if wrong:
            break
    assert wrong > 0
    (incident,) = held.incidents  # once, in however many epochs
    assert incident.finding == "handle-shared-by-fork"
    assert incident.headline == "the trainer forks workers while dataset.file is open"
    assert incident.seen == (f"dataset.file is open: {path}",)
    assert "FileCache" in incident.advice and incident.did == "went on"
    assert "handle-shared-by-fork" in str(held.report())
    held.dataset.file.close()


def test_or_refused_by_policy(path):
    held = loader(Held(path), shared_files="error")
    for _ in range(2):
        with pytest.raises(FileShared, match=rf"dataset\.file is open: {path}"):
            iter(held)
    held.dataset.file.close()
    assert len(held.incidents) == 2 and held.stats()["batches"] == 0


def test_or_ignored(path):
    held = loader(Held(path), shared_files="ignore")
    next(iter(held))
    assert held.incidents == ()
    held.dataset.file.close()


def test_a_file_cache_shares_none(path):
    cached = loader(Cached(path), shared_files="error")
    assert flat(cached) == list(range(COUNT)) and cached.incidents == ()
    cached.dataset.files.close()


def test_spawned_workers_open_their_own(path):
    own = loader(Reopens(path, 40), "spawn", shared_files="error")
    assert flat(own) == list(range(40)) and own.incidents == ()
    own.dataset.file.close()


def test_without_workers_nothing_is_shared(path):
    alone = DataLoader(Held(path), 10, policy=Policy(shared_files="error"))
    assert flat(alone) == list(range(COUNT)) and alone.incidents == ()
    alone.dataset.file.close()


# What is found -------------------------------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("handle", "other")

    def __init__(self, handle):
        self.handle = handle


class Bag:
    def __init__(self, **parts):
        vars(self).update(parts)


@pytest.fixture
def opened():
    """Remembers what to close."""
    handles = []

    def keep(handle):
        handles.append(handle)
        return handle

    yield keep
    for handle in reversed(handles):
        handle.close()


def zipped(path):
    archive = path.with_suffix(".zip")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a", "x")
    return zipfile.ZipFile(archive)


def tarred(path):
    archive = path.with_suffix(".tar")
    with tarfile.open(archive, "w") as file:
        file.add(path)
    return tarfile.open(archive)


def gzipped(path):
    with gzip.open(path.with_suffix(".gz"), "wb") as file:
        file.write(b"x")
    return gzip.open(path.with_suffix(".gz"))


OPENERS = {
    "text": open,
    "buffered": lambda path: open(path, "rb"),
    "raw": lambda path: open(path, "rb", buffering=0),
    "for both": lambda path: open(path, "r+b"),
    "zip": zipped,
    "tar": tarred,
    "gzip": gzipped,
}


@pytest.mark.parametrize("kind", OPENERS)
def test_files_and_archives_are_found(kind, path, opened):
    ((where, name),) = shared_positions(Bag(file=opened(OPENERS[kind](path))))
    assert where == "dataset.file" and Path(name).stem == "data"


def test_they_are_found_a_few_levels_deep(path, opened):
    handle = opened(open(path))
    for dataset, where in [
        (Bag(files=[1, handle]), "dataset.files[1]"),
        (Bag(files={"a": (handle,)}), "dataset.files['a'][0]"),
        (Bag(inner=Slotted(handle)), "dataset.inner.handle"),
        (Subset(ConcatDataset([Numbers(), Bag2(handle)]), [0]), "dataset.dataset.datasets[1].file"),
    ]:
        assert shared_positions(dataset) == [(where, str(path))]


class Bag2(Numbers):
    def __init__(self, file):
        super().__init__()
        self.file = file


def test_what_has_no_shared_position_is_not_found(path, tmp_path, opened):
    closed = open(path)
    closed.close()
    mapped = opened(open(path, "rb"))
    reader, writer = os.pipe()
    dataset = Bag(
        closed=closed,
        memory=io.BytesIO(b"x"),
        log=opened(open(tmp_path / "log", "w")),
        pipe=opened(os.fdopen(reader)),
        other=opened(os.fdopen(writer, "w")),
        mapped=mapped,
        map=opened(mmap.mmap(mapped.fileno(), 0, access=mmap.ACCESS_READ)),
        memmap=np.memmap(path, mode="r"),
        itself=None,
        module=os,
    )
    dataset.itself = dataset
    assert shared_positions(dataset) == []


def test_an_h5py_file_reads_by_pread(tmp_path, opened):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = [1, 2]
    assert shared_positions(Bag(file=opened(h5py.File(tmp_path / "a.h5", "r")))) == []


def test_a_dataset_of_a_million_entries_is_not_walked():
    dataset = Bag(paths=[(f"{i}.jpg", [i]) for i in range(1_000_000)])
    took = []
    for _ in range(10):
        began = time.perf_counter()
        assert shared_positions(dataset) == []
        took.append(time.perf_counter() - began)
    assert min(took) < 0.001


class Hostile(io.RawIOBase):
    def readable(self):
        raise ValueError("mine")


def test_a_dataset_that_raises_when_it_is_looked_at_is_not_in_the_way():
    assert shared_positions(Bag(file=Hostile())) == []
