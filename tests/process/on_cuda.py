"""What tests of a CUDA device share: they need one, they hold nothing when they end, and what they load."""

import gc

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from holdfast.loader.cuda_slots import gate
from holdfast.loader.iterator import WorkerIterator

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")

SIDE = 256


@pytest.fixture(autouse=True, scope="module")
def cuda_is_up():
    """Its descriptors and threads stay for the interpreter's life."""
    torch.zeros(1, device="cuda")
    torch.zeros(1).pin_memory()
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def what_is_held_is_let_go(cuda_is_up):
    """Dropped loaders leave registered memory to the next call of any other; here that is us."""
    yield
    gc.collect()
    torch.cuda.synchronize()
    the_gate = gate()
    if the_gate is not None:
        for _ in range(3):
            the_gate.step()
        assert not the_gate._copies and not the_gate._marked and not the_gate._leaving


def busy(milliseconds, stream=None):
    """Keeps a stream busy for about that long (2 GHz at most)."""
    with torch.cuda.stream(stream or torch.cuda.current_stream()):
        torch.cuda._sleep(int(milliseconds * 2_000_000))


def registered(iterator: WorkerIterator):
    return [line.slots.registered for line in iterator._host._channels if line is not None]


class Mixed(torch.utils.data.Dataset):
    """Large and small tensors, an array that no tensor can be, text."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index


class Box:
    """A batch type of the user's."""

    def __init__(self, tensor, pinned=False):
        self.tensor = tensor
        self.pinned = pinned

    def pin_memory(self):
        return Box(self.tensor.pin_memory(), True)


def mixed(indices):
    first = float(indices[0])
    return {
        "large": torch.full((4, 300, 300), first),
        "channels last": torch.full((2, 3, 256, 256), first).contiguous(memory_format=torch.channels_last),
        "small": [torch.full((3,), indices[0]), torch.full((5,), indices[0], dtype=torch.uint8)],
        "half": torch.full((7,), first, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(first, dtype=torch.float64),
        "names": [f"sample {i}" for i in indices],
        "array": np.full((2, 2), first),
        "large array": np.full((300, 300), first),
        "pair": (torch.full((1,), indices[0]), None),
    }


def boxed(indices):
    return Box(torch.full((400, 400), float(indices[0])))


def packed(indices):
    return [pack_sequence([torch.full((4,), float(i)) for i in indices]), torch.tensor(indices)]


def labels_of(batches):
    return [int(label) for _, labels in batches for label in labels.cpu()]
