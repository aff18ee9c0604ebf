"""Figures of caches, and large parts, of datasets of the user's that cannot be asked what they hold."""

import pytest
from torch.utils.data import Dataset

from holdfast import CachedDataset, DataLoader, FileCache
from holdfast.loader.measure import large_parts


class Plots(Dataset):
    """What it calls figures is its own affair."""

    def __init__(self, part=None):
        self.part = part

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index

    def figures(self, axes):
        raise ValueError("nothing to plot")


class PlotsNothing(Plots):
    def figures(self):
        raise ValueError("nothing to plot")


class Secretive(Plots):
    """Its attributes cannot be asked for."""

    __dict__ = property(PlotsNothing.figures)


class Disguised:
    """A part that does not say what it is."""

    __class__ = property(PlotsNothing.figures)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Plots, PlotsNothing])
def test_a_dataset_with_figures_of_its_own(kind, workers, tmp_path, monkeypatch):
    """Only those of our caches are asked for, also where a user's dataset lies between."""
    monkeypatch.setenv("HOLDFAST_RUN_DIR", str(tmp_path))
    for dataset in (kind(), kind(kind()), CachedDataset(kind(), "1MiB"), kind(FileCache(3))):
        loader = DataLoader(dataset, batch_size=4, num_workers=workers)
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        caches = loader.stats()["caches"]
        assert set(caches) <= {"CachedDataset", "FileCache part"}
        assert len(caches) == (isinstance(dataset, CachedDataset) or isinstance(dataset.part, FileCache))
        assert "8 samples delivered" in str(loader.report())
    assert len(list(tmp_path.glob("trainer-*.jsonl"))) == 4 * workers


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_cannot_be_looked_into(workers, tmp_path, monkeypatch):
    """It has no caches that we know of."""
    monkeypatch.setenv("HOLDFAST_RUN_DIR", str(tmp_path))
    for dataset in (Secretive(), Plots(Disguised())):
        loader = DataLoader(dataset, batch_size=4, num_workers=workers)
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert loader.stats()["caches"] == {}
        assert large_parts(dataset) == ()


class NoLength(list):
    __len__ = PlotsNothing.figures


def test_large_parts_are_told_as_far_as_they_can_be_asked():
    """What comes before one that raises is in the report."""
    dataset = Plots([None] * 60_000)
    dataset.odd = NoLength()
    (told,) = large_parts(dataset)
    assert told.startswith("Plots.part is a list of 60,000 NoneType")
