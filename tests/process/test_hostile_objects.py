"""Samples, batches and indices of the user's that raise when they are asked anything: no worker ends for them."""

import json

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from holdfast import DataLoader, Policy, Pool, TaskLost
from holdfast.errors import SampleError
from holdfast.system.run_files import records_of

from .hostile import (
    BAD,
    LENGTH,
    BadNotesBeyond,
    BadStr,
    Beyond,
    Samples,
    Worse,
    exit_,
    outcomes,
    raises,
    refuse,
)


class Refuses:
    """Cannot be sent, and cannot be asked why."""

    def __reduce_ex__(self, protocol):
        raise BadStr("odd")

    __repr__ = refuse


class RefusesBeyond(Refuses):
    def __reduce_ex__(self, protocol):
        raise BadNotesBeyond("odd")


class Opens:
    """Cannot be opened."""

    def __reduce__(self):
        return raises, ("BadStrBeyond",)


class OddKey(str):
    __repr__ = __str__ = refuse
    __hash__ = str.__hash__


SAMPLES = {
    "refuses": lambda: Refuses(),
    "in a dict": lambda: {"a": [Refuses()]},
    "behind an odd key": lambda: {OddKey("a"): Refuses()},
}


class Unsendable(Dataset):
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return SAMPLES[self.kind]() if index == BAD else index


def the_first(samples):
    return samples[-1] if not isinstance(samples[-1], int) else torch.tensor(samples)


def test_what_cannot_be_sent_is_said():
    for kind in SAMPLES:
        loader = DataLoader(Unsendable(kind), batch_size=2, num_workers=1, collate_fn=the_first)
        found = outcomes(loader)
        assert [found[0], *found[2:]] == [[0, 1], [4, 5], [6, 7]], kind
        assert found[1].__name__ == "CannotSend", kind


def test_what_a_pool_cannot_send_or_open_is_said():
    with Pool(1) as pool:
        with pytest.raises(BadStr):
            pool.submit(id, Refuses()).result(timeout=60)
        with pytest.raises(BadNotesBeyond):
            pool.submit(id, RefusesBeyond()).result(timeout=60)
        assert isinstance(pool.submit(Refuses).exception(timeout=60), BadStr)
        assert isinstance(pool.submit(len, Opens()).exception(timeout=60), TaskLost)
        assert isinstance(pool.submit(Opens).exception(timeout=60), TaskLost)
        assert pool.submit(len, "pool").result(timeout=60) == 4


class LazyDict(dict):
    """Loads what is asked for: each time something else."""

    def __getitem__(self, key):
        return torch.rand(1)


class BadDict(dict):
    __getitem__ = __iter__ = __len__ = keys = items = values = refuse


class LazyList(list):
    def __iter__(self):
        torch.rand(1)
        return super().__iter__()


class BadList(list):
    __getitem__ = __iter__ = __len__ = refuse


class BadTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__reduce_ex__:
            return super().__torch_function__(function, types, args, kwargs)
        raise Worse(str(function))


class BadNumber(float):
    __repr__ = refuse


class BadWord(str):
    encode = exit_


class BadArray(np.ndarray):
    flat = property(exit_)


ITEMS = {
    "lazy dict": lambda: LazyDict(a=1),
    "lazy list": lambda: LazyList([1]),
    "bad dict": lambda: BadDict(a=1),
    "bad list": lambda: BadList([1]),
    "tensor": lambda: torch.ones(3).as_subclass(BadTensor),
    "number": lambda: BadNumber(1.5),
    "word": lambda: BadWord("word"),
    "array": lambda: np.ones(3).view(BadArray),
    "nested": lambda: [{"a": (BadWord("word"), np.ones(3).view(BadArray))}],
}


class Items(IterableDataset):
    """Items that raise when they are looked at, each followed by a number of torch's."""

    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        for _ in range(3):
            yield ITEMS[self.kind](), torch.rand(1).item()


def the_numbers(items):
    return torch.tensor([number for _, number in items])


def test_items_of_a_stream_are_looked_at_without_their_own_code():
    """It may raise, and it may draw random numbers, which would change those of the dataset."""
    want = None
    for kind in ITEMS:
        torch.manual_seed(3)
        found = outcomes(DataLoader(Items(kind), batch_size=3, num_workers=1, collate_fn=the_numbers))
        assert len(found) == 1, kind
        want = want or found
        assert found == want, kind


class BadKind:
    """What it is an instance of cannot be asked."""

    __class__ = property(exit_)


class BadToLookAt:
    def __getattribute__(self, name):
        raise Beyond(name)


class Pairs(Dataset):
    """For the default collation, which asks what the first sample is."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return (index, self.kind()) if index in (BAD - 1, BAD) else index


class StreamOfPairs(Pairs, IterableDataset):
    def __iter__(self):
        return map(self.__getitem__, range(LENGTH))


@pytest.mark.parametrize("kind", [BadKind, BadToLookAt])
@pytest.mark.parametrize("dataset", [Pairs, StreamOfPairs])
def test_a_sample_that_cannot_be_asked_what_it_is(kind, dataset):
    """Torch's collation asks it, too: what it raises there reaches the user."""
    found = outcomes(DataLoader(dataset(kind), batch_size=2, num_workers=1))
    assert [found[0], *found[2:]] == [[0, 1], [4, 5], [6, 7]]
    assert found[1] in (Beyond, SampleError)


class BadIndex(int):
    __repr__ = __str__ = __format__ = refuse


@pytest.mark.parametrize("bad_sample", ["raise", "skip", "replace"])
def test_an_index_that_cannot_be_shown(bad_sample, tmp_path, monkeypatch):
    """It is in the exception's note, in the report and in the run folder, which say what they can."""
    monkeypatch.setenv("HOLDFAST_RUN_DIR", str(tmp_path))
    policy = Policy(bad_sample=bad_sample, max_bad=1.0)
    order = [BadIndex(index) for index in range(LENGTH)]
    loader = DataLoader(Samples("BadStr"), sampler=order, batch_size=2, num_workers=1, policy=policy)
    found = outcomes(loader)
    assert [found[0], *found[2:]] == [[0, 1], [4, 5], [6, 7]]
    assert found[1] is BadStr if bad_sample == "raise" else isinstance(found[1], list)
    assert "BadIndex" in str(loader.report())
    assert [file for file in tmp_path.glob("trainer-*.jsonl") if "BadStr" in file.read_text()]


class Unlike(int):
    """What a copy is made of, and what JSON makes of numbers, are the user's own code."""

    __deepcopy__ = __copy__ = refuse
    __reduce_ex__ = object.__reduce_ex__


class Key:
    """An index that is no number, and is not copied."""

    def __init__(self, number):
        self.number = number

    __deepcopy__ = __copy__ = refuse

    def __repr__(self):
        return f"Key({self.number})"


class SulkyKey(Key):
    __repr__ = refuse


def itself(number):
    index = [number]
    index.append(index)
    return index


# How an index is made of a number, and which number it stands for; how JSON has it.
INDICES = {
    "keys that are tuples": (lambda number: {(1, 2): number}, lambda index: index[1, 2], "{(1, 2): 3}"),
    "inside a tuple": (lambda number: (number, {(1, 2): 3}), lambda index: index[0], "(3, {(1, 2): 3})"),
    "not to be copied": (Key, lambda index: index.number, "Key(3)"),
    "a number not to be copied": (Unlike, int, 3),
    "not to be copied or shown": (SulkyKey, lambda index: index.number, "<a SulkyKey, whose __repr__ raised Worse>"),
    "holds itself": (itself, lambda index: index[0], "[3, [...]]"),
    "too long a number": (
        lambda number: (number, 10**5000),
        lambda index: index[0],
        "<a tuple, whose __repr__ raised ValueError>",
    ),
    "a list": (lambda number: [number, "a"], lambda index: index[0], [3, "a"]),
    "a set": (lambda number: {number}, min, "{3}"),
}


class Indexed(Dataset):
    """Each index stands for a number."""

    def __init__(self, kind):
        self.number_of = INDICES[kind][1]

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        number = self.number_of(index)
        if number == BAD:
            raise ValueError("odd")
        return number


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("bad_sample", ["raise", "skip", "replace"])
def test_an_index_that_json_cannot_hold(bad_sample, kept, workers, tmp_path, monkeypatch):
    """It is not copied. Where JSON has no way to write it, it stands there as text."""
    for kind, (index, number, told) in INDICES.items():
        folder = tmp_path / kind
        monkeypatch.setenv("HOLDFAST_RUN_DIR", str(folder)) if kept else monkeypatch.delenv("HOLDFAST_RUN_DIR", False)
        order = [[index(first), index(first + 1)] for first in range(0, LENGTH, 2)]
        policy = Policy(bad_sample=bad_sample, max_bad=1.0)
        loader = DataLoader(Indexed(kind), batch_sampler=order, num_workers=workers, policy=policy)
        found = outcomes(loader)
        assert [found[0], *found[2:]] == [[0, 1], [4, 5], [6, 7]], kind
        assert found[1] is ValueError if bad_sample == "raise" else found[1][0] == 2
        report = json.loads(loader.report().to_json())
        assert report["incidents"][0]["index"] == report["bad_samples"][0]["index"] == told
        (raw,) = loader.report().to_dict()["bad_samples"]
        assert number(raw["index"]) == BAD
        if kept:
            records = (record for path in folder.glob("trainer-*.jsonl") for record in records_of(path))
            lines = [record for record in records if record["record"] == "incident"]
            assert [line["index"] for line in lines] == [told], kind
            assert not workers or lines[0]["again"]["indices"][1] == told


def test_an_exception_larger_than_any_slot_reaches_the_user(tmp_path):
    """Where a limit on files makes the slots small, its text is cut."""
    import resource
    import subprocess
    import sys

    body = """
import resource
from holdfast import DataLoader
class Samples:
    def __len__(self): return 4
    def __getitem__(self, index):
        if index == 1:
            raise ValueError("x" * (300 << 20))
        return index
loader = DataLoader(Samples(), batch_size=1, num_workers=1)
batches = iter(loader)
found = []
for _ in range(4):
    try: found.append(int(next(batches)))
    except Exception as error: found.append((type(error).__name__, len(str(error)) < 1 << 20))
print(found, loader.stats()["restarts"])
"""
    limit = 1 << 30

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-c", body], capture_output=True, text=True, timeout=100, check=False, preexec_fn=limited
    )
    assert done.stdout.strip() == "[0, ('SampleError', True), 2, 3] 0", done.stderr[-2000:]
