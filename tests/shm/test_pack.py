"""Everything that torch's loader carries crosses, with the same bytes."""

import collections
import dataclasses
import os
import warnings

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from holdfast.shm import pack
from holdfast.shm.memory_file import Memory, new_file
from holdfast.shm.pack import SMALL, Packer, unpack
from holdfast.shm.slot_writer import FileSpace, Full, SlotSpace

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Scene:
    image: torch.Tensor
    name: str


class Marked(torch.Tensor):
    """A tensor subclass."""


def memory(size=1 << 24):
    fd = new_file("test", size)
    mapped = Memory(fd, size)
    import os

    os.close(fd)
    return mapped


def cross(batch, size=1 << 24):
    there = memory(size)
    spec = Packer().pack(batch, SlotSpace(there.view, there.address))
    return unpack(there.view, *spec, there.export)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    *(getattr(torch, name) for name in ("float8_e4m3fn", "uint16", "uint32", "uint64") if hasattr(torch, name)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (300, 400)], ids=str)
def test_tensors_of_every_dtype_and_shape(dtype, shape):
    tensor = (torch.rand(shape) * 100).to(dtype)
    again = cross(tensor)
    assert again.dtype is dtype and again.shape == tensor.shape
    flat = (tensor.contiguous().view(-1).view(torch.uint8), again.contiguous().view(-1).view(torch.uint8))
    assert torch.equal(*flat)


def test_arriving_tensors_can_be_written():
    for shape in [(2,), (300, 400)]:
        again = cross(torch.zeros(shape))
        again += 1
        assert again.sum() == again.numel()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.array(["ab", "cde"]),
        np.array([b"ab", b"c"]),
        np.zeros(3, dtype=[("a", "i4"), ("b", "f8", (2,))]),
        np.array([1, "x", None], dtype=object),
        np.array("2026-11-15", dtype="datetime64[D]"),
        np.zeros((0, 3)),
        np.arange(4, dtype=">i4"),
        np.float64(3.5),
        np.arange(20).reshape(4, 5)[::2, 1:3],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.ones((300, 400), dtype=np.complex64),
    ],
    ids=lambda a: str(getattr(a, "dtype", a)),
)
def test_numpy_of_every_kind(array):
    again = cross(array)
    assert type(again) is type(array)
    assert again.dtype == array.dtype and again.shape == array.shape
    assert np.array_equal(again, array)


def test_read_only_arrays_arrive_writable():
    array = np.arange(4)
    array.setflags(write=False)
    assert cross(array).flags.writeable


def test_strided_tensors():
    image = torch.rand(2, 3, 40, 50).contiguous(memory_format=torch.channels_last)
    again = cross(image)
    assert torch.equal(again, image)
    assert again.is_contiguous(memory_format=torch.channels_last)
    for tensor in (torch.rand(6, 4)[::2], torch.rand(3, 1).expand(3, 5), torch.rand(4, 5).t()):
        assert torch.equal(cross(tensor), tensor)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_odd_tensors():
    sparse = torch.eye(4).to_sparse()
    assert torch.equal(cross(sparse).to_dense(), torch.eye(4))
    nested = torch.nested.nested_tensor([torch.rand(2), torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(cross(nested).unbind(), nested.unbind(), strict=True))
    there = memory()
    spec = Packer(spawning=True).pack([sparse, nested], SlotSpace(there.view, there.address))
    assert torch.equal(unpack(there.view, *spec, there.export)[0].to_dense(), torch.eye(4))
    grad = torch.rand(3, requires_grad=True)
    assert cross(grad).requires_grad and torch.equal(cross(grad), grad)
    parameter = torch.nn.Parameter(torch.rand(3))
    assert isinstance(cross(parameter), torch.nn.Parameter)
    marked = torch.rand(3).as_subclass(Marked)
    assert type(cross(marked)) is Marked
    conj = torch.complex(torch.rand(3), torch.rand(3)).conj()
    assert torch.equal(cross(conj), conj)
    if hasattr(torch, "quantize_per_tensor"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, but still there
            quantized = torch.quantize_per_tensor(torch.rand(5), 0.1, 0, torch.quint8)
            assert torch.equal(cross(quantized).dequantize(), quantized.dequantize())


def test_nests():
    batch = {
        "point": Point(torch.rand(2), [1, "two", b"three", None]),
        "scene": Scene(torch.rand(300, 300), "café"),
        "deep": ({"a": (torch.zeros(1),)},),
        3: {4.5, "x"},
    }
    again = cross(batch)
    assert type(again["point"]) is Point
    assert torch.equal(again["scene"].image, batch["scene"].image)
    assert again["deep"][0]["a"][0] == 0
    assert again[3] == {4.5, "x"}
    packed = pack_sequence([torch.rand(3), torch.rand(2)])
    assert torch.equal(cross(packed).data, packed.data)


def test_what_pickle_refuses_goes_by_cloudpickle():
    factor = 3
    assert cross({"f": lambda x: x * factor})["f"](2) == 6


def test_a_flat_batch_of_the_same_shapes_is_packed_by_heart():
    """The second batch of the same shapes takes the remembered spec, with its own bytes."""
    packer, there = Packer(), memory()
    for value in (1.0, 2.0, 3.0):
        batch = {"a": torch.full((4,), value), "b": torch.full((200, 500), -value)}
        spec = packer.pack((None, batch), SlotSpace(there.view, there.address))
        _, again = unpack(there.view, *spec, lambda: None)
        assert torch.equal(again["a"], batch["a"]) and torch.equal(again["b"], batch["b"])


def test_a_batch_that_is_one_tensor_of_the_slot_is_written_whole_each_time():
    """Its table and spec are known after the first time, but may have been written over, or given back."""
    packer, there = Packer(), memory()
    space = SlotSpace(there.view, there.address)
    for value in (1.0, 2.0, 3.0):
        space.clear()
        out = space.tensor(torch.float32, (4, 5))
        out.fill_(value)
        spec = packer.pack((None, out), space)
        assert torch.equal(unpack(there.view, *spec, lambda: None)[1], torch.full((4, 5), value))
        there.view[80:4096] = bytes(4096 - 80)  # all behind the tensor
    space.clear()
    out = space.tensor(torch.float32, (4, 5))
    below = space.tensor(torch.float32, (4, 5)).fill_(5.0)
    for batch in ((None, [out, below]), ("notes", out), (None, below), (None, out), (None, below)):
        notes, got = unpack(there.view, *packer.pack(batch, space), lambda: None)
        assert notes == batch[0]
        pairs = zip(got, batch[1], strict=True) if isinstance(batch[1], list) else [(got, batch[1])]
        assert all(torch.equal(here, sent) for here, sent in pairs)


FLAT = {
    "a tensor": torch.arange(12.0).view(3, 4),
    "a list": [torch.arange(3), torch.ones(2, 2, dtype=torch.bool)],
    "a tuple": (torch.arange(3), torch.tensor(2.5)),
    "a dict": {"b": torch.arange(3), "a": torch.zeros(2, 0)},
    "no list": [],
    "no tuple": (),
    "no dict": {},
    "other keys": {1: torch.arange(3)},
    "one thing that is none": [torch.arange(3), "name"],
    "its own kind": Point(torch.arange(3), torch.arange(2)),
    "ordered": collections.OrderedDict(a=torch.arange(3)),
    "asks for gradients": [torch.ones(2, requires_grad=True)],
    "bfloat16": torch.ones(2, dtype=torch.bfloat16),
    "not dense": torch.arange(12.0).view(3, 4).t(),
}


@pytest.mark.parametrize("batch", FLAT.values(), ids=FLAT)
@pytest.mark.parametrize("times", [1, 2])
def test_what_has_a_short_way_and_what_looks_like_it(batch, times):
    there, packer = memory(), Packer()
    for _ in range(times):  # the second time it is known
        spec = packer.pack((None, batch), SlotSpace(there.view, there.address))
        nothing, got = unpack(there.view, *spec, there.export)
        assert nothing is None
        assert type(got) is type(batch)
        leaves = got.values() if isinstance(got, dict) else [got] if isinstance(got, torch.Tensor) else got
        wanted = batch.values() if isinstance(batch, dict) else [batch] if isinstance(batch, torch.Tensor) else batch
        assert not isinstance(got, dict) or list(got) == list(batch)
        for leaf, want in zip(leaves, wanted, strict=True):
            assert type(leaf) is type(want)
            if isinstance(want, torch.Tensor):
                assert (leaf.dtype, leaf.shape, leaf.requires_grad) == (want.dtype, want.shape, want.requires_grad)
                assert torch.equal(leaf, want)
            else:
                assert leaf == want


def test_batches_of_ever_new_shapes_do_not_fill_the_memory():
    there, packer = memory(), Packer()
    for length in range(1, 1200):
        spec = packer.pack((None, torch.full((length,), float(length))), SlotSpace(there.view, there.address))
        assert torch.equal(unpack(there.view, *spec, there.export)[1], torch.full((length,), float(length)))
    assert len(packer._specs) <= pack._MOST_SPECS
    assert pack._read_flat.cache_info().currsize <= pack._MOST_SPECS


def test_batches_of_ever_so_many_leaves_do_not_either():
    """Nothing is kept of them."""
    there, packer, known = memory(), Packer(), pack._read_flat.cache_info().currsize
    batch = [torch.tensor([float(n)]) for n in range(pack._MOST_LEAVES + 1)]
    spec = packer.pack((None, batch), SlotSpace(there.view, there.address))
    assert torch.equal(torch.cat(unpack(there.view, *spec, there.export)[1]), torch.cat(batch))
    assert not packer._specs
    assert pack._read_flat.cache_info().currsize == known


def test_a_tensor_twice_in_a_batch_arrives_twice():
    packer, there = Packer(), memory()
    one = torch.arange(4)
    for pair in ([one, one], [one, one.clone()], [one, one]):
        spec = packer.pack((None, pair), SlotSpace(there.view, there.address))
        _, again = unpack(there.view, *spec, lambda: None)
        assert torch.equal(again[0], one) and torch.equal(again[1], one)
        assert (again[0] is again[1]) == (pair[0] is pair[1])


def test_small_leaves_are_copied_and_large_ones_are_not():
    there = memory()
    small, large = torch.zeros(4), torch.zeros(SMALL)
    spec = Packer().pack([small, large], SlotSpace(there.view, there.address))
    small, large = unpack(there.view, *spec, there.export)
    inside = range(there.address, there.address + there.size)
    assert small.data_ptr() not in inside
    assert large.data_ptr() in inside


def test_a_full_slot_says_so_and_a_file_takes_it():
    import os

    tight = memory(1 << 16)
    batch = torch.rand(100, 1000)
    with pytest.raises(Full):
        Packer().pack(batch, SlotSpace(tight.view, tight.address))
    fd = new_file("own", 0)
    space = FileSpace(fd)
    spec = Packer().pack(batch, space)
    own = Memory(fd, space.size)
    os.close(fd)
    assert torch.equal(unpack(own.view, *spec, own.export), batch)


def test_a_view_keeps_its_mapping_alive():
    import gc

    again = cross(torch.arange(SMALL))[5:9]
    gc.collect()
    assert again.tolist() == [5, 6, 7, 8]


def test_what_only_cloudpickle_can_send_still_goes_out_of_band():
    """A lambda beside a tensor: the bytes of the tensor lie in the space, not in the pickle."""
    tensor = torch.arange(1 << 16)
    fd = new_file("test", 0)
    _, buffers, spec_bytes = Packer().pack((lambda: 1, tensor), FileSpace(fd))
    os.close(fd)
    assert buffers == 1
    assert spec_bytes < tensor.nbytes
