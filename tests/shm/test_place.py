"""Samples stacked into a slot: the same bytes as torch.stack, whatever way they are copied."""

import numpy as np
import pytest
import torch

from holdfast.shm import place
from holdfast.shm.memory import Memory, new_file
from holdfast.shm.place import MOST_MADE, STREAMED, Full, SlotSpace, stack_arrays, stack_tensors

SIZE = 8 << 20


@pytest.fixture(params=["streamed", "plain"])
def way(request, monkeypatch):
    """With the compiled copy and without it."""
    if request.param == "plain":
        monkeypatch.setattr(place, "copy_all", None)
    elif place.copy_all is None:
        pytest.skip("built without a compiler")


@pytest.fixture
def space():
    import os

    fd = new_file("test", SIZE)
    memory = Memory(fd, SIZE)
    os.close(fd)
    space = SlotSpace(memory.view, memory.address)
    space.memory = memory  # or it would be unmapped
    return space


def samples(count, shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 100, shape, generator=generator).to(dtype) for _ in range(count)]


# Sizes that are no multiple of 16 make every second sample begin at an odd address.
@pytest.mark.parametrize("shape", [(3, 64, 64), (5, 1031), (4099,), (1, 1 << 19)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64, torch.bool, torch.complex64])
def test_tensors(way, space, shape, dtype):
    size = torch.empty(shape, dtype=dtype).nbytes
    count = min(SIZE // size - 1, STREAMED // size + 2)
    batch = samples(count, shape, dtype)
    space.room(17)  # whatever lies before
    out = space.tensor(dtype, (count, *shape))
    stack_tensors(batch, out)
    assert torch.equal(out, torch.stack(batch))


def test_tensors_with_gaps_and_in_other_orders(way, space):
    batch = samples(40, (100, 100))
    batch[3] = samples(1, (100, 200))[0][:, ::2]
    batch[7] = batch[7].t()
    out = space.tensor(torch.float32, (40, 100, 100))
    stack_tensors(batch, out)
    assert torch.equal(out, torch.stack(batch))


def test_tensors_of_another_dtype_or_shape_are_torchs_business(way, space):
    batch = samples(40, (100, 100))
    out = space.tensor(torch.float32, (40, 100, 100))
    batch[39] = batch[39].double()
    stack_tensors(batch, out)  # torch casts into `out`
    assert torch.equal(out, torch.stack([sample.float() for sample in batch]))
    batch[39] = batch[39].to(torch.complex64)
    with pytest.raises((RuntimeError, TypeError), match="cast"):
        stack_tensors(batch, out)
    batch[39] = torch.ones(100, 99)
    with pytest.raises(RuntimeError, match="equal size"):
        stack_tensors(batch, out)
    batch[39] = torch.ones(100, 100, device="meta")
    with pytest.raises(RuntimeError):
        stack_tensors(batch, out)


@pytest.mark.parametrize("shape", [(224, 224, 3), (4099,)])
def test_arrays(way, space, shape):
    count = STREAMED // int(np.prod(shape)) + 3
    batch = [sample.numpy() for sample in samples(count, shape, torch.uint8)]
    batch[1].flags.writeable = False
    out = space.tensor(torch.uint8, (count, *shape))
    assert stack_arrays(batch, out)
    assert np.array_equal(out.numpy(), np.stack(batch))
    batch[2] = batch[2].reshape(-1)[::-1].reshape(shape)
    space.clear()
    assert stack_arrays(batch, space.tensor(torch.uint8, (count, *shape)))
    assert np.array_equal(out.numpy(), np.stack(batch))
    batch[2] = batch[2].astype(np.int16)
    assert not stack_arrays(batch, out)


def test_a_tensor_is_made_once_for_a_place(space):
    first = space.tensor(torch.float32, (4, 5))
    second = space.tensor(torch.float32, (4, 5))
    assert first.data_ptr() != second.data_ptr()
    space.clear()
    assert not space.placed
    assert space.tensor(torch.float32, (4, 5)) is first
    assert space.placed[id(first)].offset == 0


def test_tensors_of_ever_new_shapes_are_not_kept(space):
    for length in range(1, 5 * MOST_MADE):
        space.clear()
        space.tensor(torch.float32, (length,))
    assert len(space._made) <= MOST_MADE + 1


def test_too_small(space):
    with pytest.raises(Full):
        space.tensor(torch.float32, (SIZE,))


@pytest.mark.parametrize("side", [4, 1000])
def test_what_torch_refuses_is_refused_at_any_size(side):
    """One tensor of all samples (a `__getitems__` may give that) is no list of tensors: torch.stack says so."""
    samples = torch.zeros(8, side, side)
    with pytest.raises(TypeError):
        stack_tensors(samples, torch.zeros(8, side, side))
