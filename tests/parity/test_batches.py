"""The batches of torch's own loader and of ours are the same: types, dtypes, shapes and bytes, small and large.

Batches from 1 MB on take another way than small ones (shm/place.py), and samples of a tuple another than a dict's.
"""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

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
    if isinstance(value, torch.Tensor):
        dense = value.to_dense() if value.layout is not torch.strided else value
        raw = dense.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        return type(value), value.layout, value.dtype, tuple(value.shape), value.requires_grad, bytes(raw.numpy())
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
    theirs = batches(TorchLoader, kind, SIDES[size], None, workers=2)
    if not isinstance(theirs, list):  # torch cannot send it (conjugated ones) or stack it (gradients) in a worker
        theirs = batches(TorchLoader, kind, SIDES[size], None, workers=0)
    assert batches(DataLoader, kind, SIDES[size], None, workers=2) == theirs


@pytest.mark.parametrize("size", SIDES)
@pytest.mark.parametrize("kind", AS_THEY_ARE)
def test_as_they_are(kind, size):
    theirs = batches(TorchLoader, kind, SIDES[size], the_same, workers=0)
    assert isinstance(theirs, list)
    assert batches(DataLoader, kind, SIDES[size], the_same, workers=2) == theirs
