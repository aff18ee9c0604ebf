"""Samples stacked into a slot: the same bytes as torch.stack, whatever way they are copied."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from holdfast.loader.loader_job import SlotStack
from holdfast.shm import slot_writer
from holdfast.shm.memory_file import Memory, new_file
from holdfast.shm.slot_writer import MOST_MADE, STREAMED, Full, SlotSpace, stack_arrays, stack_tensors

SIZE = 8 << 20


@pytest.fixture(params=["described", "streamed", "plain"])
def way(request, monkeypatch):
    """With all that is compiled; as with a torch that does not describe its tensors; and without a compiler."""
    if request.param == "plain":
        monkeypatch.setattr(slot_writer, "copy_all", None)
    elif slot_writer.copy_all is None:
        pytest.skip("without shm/_stream.c: only the plain copy is tested")
    if request.param != "described":
        monkeypatch.setattr(slot_writer, "stack", None)
    elif slot_writer.stack is None:
        pytest.skip("this torch does not describe its tensors")
    return request.param


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
@pytest.mark.parametrize("shape", [(3, 64, 64), (5, 1031), (4099,), (1, 1 << 19), (2,), (1,), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64, torch.bool, torch.complex64])
def test_tensors(way, space, shape, dtype):
    size = torch.empty(shape, dtype=dtype).nbytes
    count = min(SIZE // size - 1, STREAMED // size + 2, 300)
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


class Own(torch.Tensor):
    pass


ODD = {
    "negated": torch.tensor([[1 + 2j]]).conj().imag,
    "negated and dense": torch.tensor([1 + 2j, 3 + 4j, 5, 6]).conj().imag.as_strided((4,), (1,)),
    "negated, dense and large": torch.full((100_000,), 1 + 2j).conj().imag.as_strided((100_000,), (1,)),
    "conjugated": torch.tensor([[1 + 2j, 3]]).conj(),
    "of one element": torch.ones(1, 1),
    "a slice": torch.arange(12.0).view(3, 4)[1:, 1:3],
    "a view of its own": torch.arange(12.0).view(3, 4)[1],
    "expanded": torch.ones(1, 1).expand(3, 5),
    "a subclass": torch.arange(6.0).as_subclass(Own),
    "wants a gradient": torch.ones(3, 4, requires_grad=True),
    "of a graph": torch.ones(3, 4, requires_grad=True) * 2,
    "sparse": torch.eye(3).to_sparse(),
    "quarters": torch.ones(4, dtype=torch.float16),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("place_of_it", [0, 7, None])
def test_odd_tensors_are_stacked_as_torch_does(way, kind, place_of_it):
    """Alone among plain ones of the same shape, or all of them."""
    odd = ODD[kind]
    plain = torch.full(odd.shape, 3, dtype=odd.dtype)
    batch = [odd if place_of_it in (number, None) else plain for number in range(8)]
    out = torch.zeros(8, *odd.shape, dtype=odd.dtype)
    try:
        expected = torch.stack(batch, 0, out=out.clone())
    except (RuntimeError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            stack_tensors(batch, out)
    else:
        stack_tensors(tuple(batch), out)
        assert torch.equal(out, expected)


def test_an_address_is_not_kept(way, space):
    """Samples may be gone, and others lie in their place, when the next batch comes."""
    out = space.tensor(torch.float32, (50, 64, 64))
    for value in range(20):
        stack_tensors([torch.full((64, 64), float(value)) for _ in range(50)], out)
        assert (out == value).all()


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


def collated(space, batch):
    """As the default collate has it, twice in a slot: into what the last batch left, or anew."""
    stack = SlotStack()
    stack.space = space
    return stack.tensors_in_slot(batch)


NEXT = {
    "the same again": lambda: samples(6, (3, 40)),
    "one more": lambda: samples(7, (3, 40)),
    "another shape": lambda: samples(6, (40, 3)),
    "another dtype": lambda: samples(6, (3, 40), torch.int32),
    "one is of another dtype": lambda: [*samples(5, (3, 40)), samples(1, (3, 40), torch.float64)[0]],
    "the first is": lambda: [samples(1, (3, 40), torch.float64)[0], *samples(5, (3, 40))],
    "with gaps": lambda: [sample[:, ::2] for sample in samples(6, (3, 80))],
    "negated": lambda: [torch.full((240,), 1 + 2j).conj().imag.as_strided((3, 40), (40, 1)) for _ in range(6)],
    "of a graph": lambda: [sample.requires_grad_() * 2 for sample in samples(6, (3, 40))],
    "a subclass": lambda: [sample.as_subclass(Own) for sample in samples(6, (3, 40))],
    "a tuple": lambda: tuple(samples(6, (3, 40))),
}


@pytest.mark.parametrize("kind", NEXT)
def test_a_batch_that_follows_others(way, space, kind):
    """What was stacked at this place before is a guess, and no more."""
    for batch in (samples(6, (3, 40)), NEXT[kind](), samples(6, (3, 40)), NEXT[kind]()):
        space.clear()
        first, second = collated(space, batch), collated(space, batch[:3])
        assert torch.equal(first, torch.stack(batch))
        assert torch.equal(second, torch.stack(batch[:3]))
        assert first.dtype == batch[0].dtype  # as torch's own collate has it in a worker
        assert first.requires_grad == batch[0].requires_grad
        assert type(first) is type(torch.stack(batch))


def test_batches_that_are_alike_are_stacked_into_the_same_tensor(space):
    first = collated(space, samples(6, (3, 40)))
    space.clear()
    assert collated(space, samples(6, (3, 40))) is first
    assert space.placed[id(first)].offset == 0
    assert space.end == first.nbytes


@pytest.mark.parametrize("nothing", [[], ()])
def test_no_samples_are_no_batch(way, space, nothing):
    """Least of all the last one. A function of the user's may ask for that."""
    collated(space, samples(2, (3, 4)))
    space.clear()
    with pytest.raises(IndexError):
        collated(space, nothing)


def test_tensors_of_ever_new_shapes_are_not_kept(space):
    for length in range(1, 5 * MOST_MADE):
        space.clear()
        space.tensor(torch.float32, (length,))
    assert len(space._made) <= MOST_MADE + 1
    assert len(space._last) <= MOST_MADE + 1


def test_too_small(space):
    with pytest.raises(Full):
        space.tensor(torch.float32, (SIZE,))


@pytest.mark.parametrize("side", [4, 1000])
def test_what_torch_refuses_is_refused_at_any_size(side):
    """One tensor of all samples (a `__getitems__` may give that) is no list of tensors: torch.stack says so."""
    samples = torch.zeros(8, side, side)
    with pytest.raises(TypeError):
        stack_tensors(samples, torch.zeros(8, side, side))


@pytest.mark.parametrize("kind", ["tensors", "arrays"])
@pytest.mark.parametrize(("count", "size"), [(1, 17 << 20), (3, (6 << 20) + 7), (40, 500_003), (4097, 4100)])
def test_two_threads_write_what_one_would(way, kind, count, size):
    """Pieces, their remainders and samples smaller than a piece, in whatever order they are taken."""
    samples = [np.random.default_rng(i).integers(0, 256, size, np.uint8) for i in range(min(count, 7))]
    batch = [samples[i % len(samples)] for i in range(count)]
    out = torch.zeros((count, size), dtype=torch.uint8)
    if kind == "arrays":
        assert stack_arrays(batch, out, by_two=True)
    else:
        stack_tensors([torch.from_numpy(sample) for sample in batch], out, by_two=True)
    assert np.array_equal(out.numpy(), np.stack(batch))


@pytest.mark.parametrize("lack", ["one processor", "no room for a thread"])
def test_without_help_one_thread_writes_all(lack):
    """In a process of its own: what it may use cannot be given back."""
    body = """
import os, resource, sys, torch
torch.set_num_threads(1)  # torch itself asks for threads
from holdfast.shm.slot_writer import stack_tensors
if sys.argv[1] == "one processor":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
else:
    os.setuid(65534)  # root may have as many as it likes
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
batch = [torch.full((1 << 20,), i, dtype=torch.uint8) for i in range(40)]
out = torch.zeros(40, 1 << 20, dtype=torch.uint8)
stack_tensors(batch, out, by_two=True)
assert torch.equal(out, torch.stack(batch))
"""
    if lack != "one processor" and os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    subprocess.run([sys.executable, "-c", body, lack], check=True, timeout=100)


def test_a_crash_of_either_thread_leaves_the_stack():
    """A sample may lie in a file that was cut short; now the one thread comes to it, now the other."""
    body = """
import faulthandler, mmap, os, torch
from holdfast.shm.slot_writer import stack_tensors
faulthandler.enable()
size = 256 << 10
file = os.memfd_create("gone")
os.truncate(file, size)
gone = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
there = torch.zeros(size, dtype=torch.uint8)
os.truncate(file, 0)
stack_tensors([there] * 79 + [gone], torch.zeros(80, size, dtype=torch.uint8), by_two=True)
"""
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", body], check=False, capture_output=True, text=True, timeout=100)
        assert done.returncode == -signal.SIGBUS
        assert "in stack_tensors" in done.stderr
