"""The batches of torch's own loader and of ours are the same: types, dtypes, shapes and bytes, small and large.

Batches of 1 MB and more take another way than small ones (shm/slot_writer.py); tuples take another way than dicts.
"""

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset

from holdfast import DataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]
LENGTH = 20
BATCH = 8
# Values in a sample: 8 of the larger ones, as bytes, are more than 1 MB. (Odd, so that addresses are odd as well.)
SIDES = {"small": 3, "large": 399}
Point = namedtuple("Point", "x y")


@dataclass
class Record:
    image: torch.Tensor
    name: str


def array(index, side, dtype=np.uint8):
    return (np.arange(side * side).reshape(side, side) * (index + 1) % 251).astype(dtype)


def tensor(index, side, dtype=torch.float32):
    return torch.from_numpy(array(index, side, np.int64)).to(dtype)


class Marked(torch.Tensor):
    """A subclass, which must come back as torch gives it back."""


SAMPLES = {
    "array": array,
    "array and label": lambda i, n: (array(i, n), i),
    "arrays in a dict": lambda i, n: {"image": array(i, n), "mask": array(i, n, np.bool_), "label": i},
    "arrays in a list": lambda i, n: [array(i, n, np.float64), array(i + 1, n, np.int16)],
    "arrays in a named tuple": lambda i, n: Point(array(i, n), array(i, n, np.float32)),
    "array of another order": lambda i, n: (np.asfortranarray(array(i, n)), i),
    "array with gaps": lambda i, n: (array(i, 2 * n)[::2, ::2], i),
    "array that is read-only": lambda i, n: (np.broadcast_to(array(i, n)[0], (n, n)), i),
    "array of complex": lambda i, n: array(i, n, np.complex64),
    "array of half": lambda i, n: (array(i, n, np.float16),),
    "array without dimensions": lambda i, n: (np.float32(i), np.array(i)),
    "tensor": tensor,
    "tensor and label": lambda i, n: (tensor(i, n), i),
    "tensors in a dict": lambda i, n: {"image": tensor(i, n), "deep": {"mask": tensor(i, n, torch.bool)}},
    "tensors in a list": lambda i, n: [tensor(i, n, torch.uint8), (tensor(i, n, torch.float64), "name")],
    "tensors in a named tuple": lambda i, n: Point(tensor(i, n), [tensor(i, n, torch.int16)]),
    "tensors in an ordered dict": lambda i, n: OrderedDict(b=tensor(i, n), a=array(i, n)),
    "tensor of another order": lambda i, n: (tensor(i, n).t(), i),
    "tensor with gaps": lambda i, n: (tensor(i, 2 * n)[::2, 1::2], i),
    "tensor of bfloat16": lambda i, n: (tensor(i, n, torch.bfloat16), i),
    "tensor of complex": lambda i, n: (torch.complex(tensor(i, n), tensor(i + 1, n)), i),
    "conjugated": lambda i, n: torch.complex(tensor(i, n), tensor(i + 1, n)).conj(),
    "tensor of mixed dtypes": lambda i, n: tensor(i, n, torch.float32 if i % 2 == 0 else torch.float64),
    "tensor that wants its gradient": lambda i, n: (tensor(i, n).requires_grad_(), i),
    "subclass": lambda i, n: tensor(i, n).as_subclass(Marked),
    "empty": lambda i, n: (torch.empty(0, n), np.empty((n, 0))),
    "without dimensions": lambda i, n: torch.tensor(float(i)),
    "words and bytes": lambda i, n: ("word" * n, b"bytes" * n, i, float(i), True),
    "tensor beside words": lambda i, n: (tensor(i, n), f"name {i}", array(i, n)),
    "none": lambda i, n: None,
    "record": lambda i, n: Record(tensor(i, n), f"name {i}"),
    "packed": lambda i, n: pack_sequence([tensor(i, n), tensor(i + 1, n)[:1]]),
    "sparse": lambda i, n: tensor(i % 2, n).to_sparse(),
    "sparse that wants its gradient": lambda i, n: tensor(i % 2, n).to_sparse().requires_grad_(),
    "sparse by rows": lambda i, n: tensor(i % 2, n).to_sparse_csr(),
    "sparse by columns": lambda i, n: tensor(i % 2, n).to_sparse_csc(),
    "sparse in blocks": lambda i, n: torch.eye(2 * n).to_sparse_bsr(2),
    "text array": lambda i, n: np.array(["text"] * n),
    "structured array": lambda i, n: np.array([(i, 2.0)] * n, dtype=[("a", "i4"), ("b", "f8")]),
}
# default_collate refuses these: with a collate_fn that changes nothing, they cross as they are.
AS_THEY_ARE = [
    kind for kind in SAMPLES if kind.startswith(("none", "record", "packed", "sparse", "text", "struct", "sub"))
]


class Samples(Dataset):
    def __init__(self, kind, side):
        self.kind = kind
        self.side = side

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return SAMPLES[self.kind](index, self.side)


def the_same(batch):
    return batch


def described(value):
    """What must be equal, in plain values."""
    if isinstance(value, torch.Tensor) and (value.is_nested or value.is_quantized):
        parts = value.unbind() if value.is_nested else (value.int_repr(), value.q_scale())
        return "nested" if value.is_nested else value.dtype, [described(part) for part in parts]
    if isinstance(value, torch.Tensor):
        dense = value.to_dense() if value.layout is not torch.strided else value
        raw = dense.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        strides = value.stride() if value.layout is torch.strided else None
        return (
            type(value),
            value.layout,
            value.dtype,
            tuple(value.shape),
            strides,
            value.requires_grad,
            bytes(raw.numpy()),
        )
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return type(value), value.dtype, value.shape, value.tolist()
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype, value.shape, value.tobytes()
    if isinstance(value, dict):
        return type(value), [(key, described(part)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [described(part) for part in value]
    if isinstance(value, Record):
        return Record, described(value.image), value.name
    return type(value), value


def batches(loader_class, kind, side, collate_fn, workers):
    """Or how it fails: the exception's type."""
    loader = loader_class(Samples(kind, side), batch_size=BATCH, collate_fn=collate_fn, num_workers=workers)
    try:
        return [described(batch) for batch in loader]
    except (TypeError, RuntimeError) as error:
        return type(error)


@pytest.mark.parametrize("size", SIDES)
@pytest.mark.parametrize("kind", SAMPLES)
def test_collated(kind, size):
    # In a worker torch stacks into what the first sample wants, and otherwise promotes. (Compared with torch without
    # workers: there it neither fails where ours does not, as for conjugated ones, nor takes seconds to fail.)
    theirs = batches(TorchLoader, kind, SIDES[size], None, workers=2 if "mixed" in kind else 0)
    assert batches(DataLoader, kind, SIDES[size], None, workers=2) == theirs


@pytest.mark.parametrize("size", SIDES)
@pytest.mark.parametrize("kind", AS_THEY_ARE)
def test_as_they_are(kind, size):
    theirs = batches(TorchLoader, kind, SIDES[size], the_same, workers=0)
    assert isinstance(theirs, list)
    assert batches(DataLoader, kind, SIDES[size], the_same, workers=2) == theirs


def channels_last(samples):
    return torch.stack(samples).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 256, 256)], ids=str)
def test_the_memory_format_is_kept(dtype, shape):
    """A model in channels_last would copy each batch that came in another order."""
    samples = [torch.full(shape, float(index)).to(dtype) for index in range(LENGTH)]
    want, got = (
        [described(batch) for batch in loader(samples, batch_size=BATCH, collate_fn=channels_last, num_workers=2)]
        for loader in (TorchLoader, DataLoader)
    )
    assert got == want


BATCHES = {
    "lists": [[1, 2], [3]],
    "tuples": [(1, 2), (3,)],
    "sets": [{1, 2}, {3}],
    "dicts": [{1: "a", 2: "b"}, {3: "c"}],
    "ranges": [range(1, 3), range(3, 4)],
    "arrays": [np.array([1, 2]), np.array([3])],
    "tensors": [torch.tensor([1, 2]), torch.tensor([3])],
    "iterators": [map(int, [1, 2]), map(int, [3])],
    "empty ones": [[], [1, 2], []],
}


class Told(Dataset):
    """Samples by whatever index; those in `bad` raise."""

    def __init__(self, bad=()):
        self.bad = bad

    def __getitem__(self, index):
        if int(index) in self.bad:
            raise KeyError(int(index))
        return int(index)


def outcomes(loader):
    """Each batch, or the exception in its place."""
    batches = iter(loader)
    found = []
    while True:
        try:
            found.append(next(batches))
        except StopIteration:
            return found
        except KeyError as error:
            found.append(type(error))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("bad", [(), (2,)], ids=["good", "bad"])
@pytest.mark.parametrize("kind", BATCHES)
def test_what_a_batch_sampler_may_give(kind, bad, workers):
    """Anything that can be gone through, and empty batches too: each is delivered, or raises in its place."""
    asked = {"batch_sampler": BATCHES[kind], "collate_fn": the_same}
    want = outcomes(TorchLoader(Told(bad), **copy.deepcopy(asked)))
    got = outcomes(DataLoader(Told(bad), **copy.deepcopy(asked), num_workers=workers))
    assert len(want) == len(BATCHES[kind])
    assert got == want


def test_an_empty_batch_that_cannot_be_collated_raises():
    loader = DataLoader(Told(), batch_sampler=[[1], [], [2]], num_workers=2)
    batches = iter(loader)
    assert next(batches).tolist() == [1]
    with pytest.raises(IndexError):
        next(batches)
    assert next(batches).tolist() == [2]


ODD_ITEMS = {
    "nested": lambda i: torch.nested.nested_tensor([torch.full((2,), float(i)), torch.zeros(3)]),
    "nested by rows": lambda i: torch.nested.nested_tensor(
        [torch.full((2,), float(i)), torch.zeros(3)], layout=torch.jagged
    ),
    "quantized": lambda i: torch.quantize_per_tensor(torch.full((300,), float(i)), 0.5, 0, torch.quint8),
    "conjugated": lambda i: torch.complex(torch.full((3,), float(i)), torch.ones(3)).conj(),
    "negated": lambda i: torch.complex(torch.full((3,), float(i)), torch.ones(3)).conj().imag,
    "sparse": lambda i: torch.full((3,), float(i + 1)).to_sparse(),
    "array transposed": lambda i: np.full((3, 4), i).T,
    "array of words": lambda i: np.array([f"{i}"]),
    "array of objects": lambda i: np.array([i, None, "x"], object),
    "array without dimensions": lambda i: np.array(i),
}


class Stream(IterableDataset):
    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        return (ODD_ITEMS[self.kind](index) for index in range(5))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("kind", ODD_ITEMS)
def test_whatever_a_stream_gives(kind):
    """Each item is looked at in the worker, so that a replay can be compared: that must not fail."""
    want = [described(ODD_ITEMS[kind](index)) for index in range(5)]
    loader = DataLoader(Stream(kind), batch_size=None, collate_fn=the_same, num_workers=1)
    assert [described(item) for item in loader] == want
