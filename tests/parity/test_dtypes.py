"""Every dtype of this torch, in every form a tensor may have, crosses as it does with torch's loader."""

import functools

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset

from holdfast import DataLoader

COUNT = 24


@functools.cache
def dtypes():
    """Those of which a tensor can be made out of bytes."""
    every = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    bits = [f"torch.{sign}int{count}" for sign in ("", "u") for count in range(1, 8)]
    return [
        dtype for dtype in sorted(every, key=str) if str(dtype) not in bits and not str(dtype).startswith("torch.q")
    ]


def numbers(dtype, index):
    """`COUNT` of them; other ones for another index."""
    if dtype is torch.bool:
        return (torch.arange(COUNT) + index) % 3 == 0
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.arange(1 + index, 1 + index + COUNT * size, dtype=torch.int64)
    return raw.to(torch.uint8).view(dtype)


def named(tensor):
    tensor.mark = "of the user's"
    return tensor


FORMS = {
    "plain": lambda t: t.view(4, 6),
    "with an attribute": lambda t: named(t),
    "with a gradient": lambda t: t.requires_grad_(),
    "transposed": lambda t: t.view(4, 6).t(),
    "with gaps": lambda t: t[::2],
    "one of a column": lambda t: t.view(4, 6)[:1, 2],
    "a column of one": lambda t: t.view(4, 6)[:1, 2:3].t(),
    "with gaps and an attribute": lambda t: named(t.view(4, 6)[:, ::2]),
    "without dimensions": lambda t: t[3],
    "empty": lambda t: t[:0],
    "expanded": lambda t: t[:1].expand(50),
    "expanded both ways": lambda t: t[0].expand(7, 9),
    "conjugated": lambda t: t.conj(),
    "conjugated with gaps": lambda t: t.conj()[::2],
    "imaginary": lambda t: t.conj().imag,
    "negated": lambda t: t._neg_view(),
    "a parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
}


def can(dtype, form):
    try:
        FORMS[form](numbers(dtype, 0))
    except (RuntimeError, TypeError):
        return False
    return dtype.is_complex or "conj" not in form


@functools.cache
def cases():
    return [(dtype, form) for dtype in dtypes() for form in FORMS if can(dtype, form)]


def sample(case, index=0):
    dtype, form = cases()[case]
    return FORMS[form](numbers(dtype, index))


class Cases(Dataset):
    """By number of the case; odd numbers behind the last are the same again, with other values."""

    def __len__(self):
        return len(cases())

    def __getitem__(self, index):
        case, variant = index if isinstance(index, tuple) else (index, 0)
        return sample(case, variant)


class Stream(IterableDataset):
    def __iter__(self):
        return (sample(case) for case in range(len(cases())))


def the_same(batch):
    return batch


def described(tensor):
    """Its values as bytes, whatever its dtype can do."""
    if isinstance(tensor, list):
        return [described(part) for part in tensor]
    dense = tensor.detach()
    marks = ()
    try:
        dense = dense.resolve_conj().resolve_neg()
    except RuntimeError:
        marks = dense.is_conj(), dense.is_neg()
        dense = dense._neg_view() if dense.is_neg() else dense
    if dense.element_size() in (1, 2, 4, 8):
        dense = dense.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dense.element_size()])
    raw = bytes(dense.contiguous().as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy())
    return type(tensor), tensor.dtype, tuple(tensor.shape), tensor.requires_grad, marks, raw


def outcomes(loader, count):
    """Each batch, or the type of the exception in its place."""
    batches = iter(loader)
    found = []
    for _ in range(count):
        try:
            found.append(described(next(batches)))
        except StopIteration:
            found.append("the end")
        except Exception as error:
            found.append(type(error))
    return found


def check(make, count):
    """As torch has it with workers; or without, where a worker of torch's cannot, or changes the values."""
    theirs = [outcomes(make(TorchLoader, workers), count) for workers in (1, 0)]
    loader = make(DataLoader, 1)
    ours = outcomes(loader, count)
    wrong = [
        f"{dtype} {form}: {got} instead of {with_workers}, or without workers {without}"
        for (dtype, form), got, with_workers, without in zip(cases(), ours, *theirs, strict=True)
        if got not in (with_workers, without)
    ]
    assert wrong == []
    gone = [incident.headline for incident in loader.report().incidents if incident.signal or incident.exit_code]
    assert gone == []


pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support", "ignore:TypedStorage is deprecated", "ignore:torch.quantize_per_tensor"
)


def test_there_are_all_of_them():
    """So that the sweep does not pass because it is empty."""
    assert {torch.float32, torch.bool, torch.complex64, torch.complex32, torch.uint16, torch.bfloat16} <= {*dtypes()}
    assert any("float8" in str(dtype) for dtype in dtypes())
    assert len(cases()) > 10 * len(dtypes())


def test_as_they_are():
    """Samples of a map-style dataset, each a batch of one that nothing is done to."""
    check(lambda kind, n: kind(Cases(), batch_size=1, collate_fn=the_same, num_workers=n), len(cases()))


def test_collated():
    """Two of a kind, stacked."""
    pairs = [[(case, 0), (case, 1)] for case in range(len(cases()))]
    check(lambda kind, n: kind(Cases(), batch_sampler=pairs, num_workers=n), len(cases()))


def test_items_of_a_stream():
    """Each is looked at, so that a replay can be compared: that ends no worker."""
    check(lambda kind, n: kind(Stream(), batch_size=None, collate_fn=the_same, num_workers=n), len(cases()))


def test_items_of_a_stream_collated():
    check(lambda kind, n: kind(Stream(), batch_size=1, num_workers=n), len(cases()))


class Bits(Dataset):
    """Of these torch can do no more than send their memory."""

    def __getitem__(self, index):
        quantized = torch.quantize_per_tensor(torch.arange(8.0), 0.5, 1, torch.quint8)
        return [torch.arange(8, dtype=torch.uint8).view(torch.int4)[::2], quantized, quantized[::2]][index]


def test_what_cannot_be_copied_is_sent_with_all_its_memory():
    """As torch sends it."""
    got = list(DataLoader(Bits(), sampler=range(3), batch_size=None, num_workers=1))
    assert [(part.dtype, part.shape, part.stride()) for part in got] == [
        (torch.int4, (4,), (2,)),
        (torch.quint8, (8,), (1,)),
        (torch.quint8, (4,), got[2].stride()),
    ]
    assert got[0].untyped_storage().tolist() == list(range(8))
    assert [part.dequantize().tolist() for part in got[1:]] == [[*range(8)], [0, 2, 4, 6]]
