"""What may lie in a slot while a batch is made: only what torch's own functions see; and only while it is unchanged."""

import collections
import os
import typing

import numpy as np
import pytest
import torch
import torch.utils.data._utils.collate as torch_collate
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.loader.loader_job import SlotStack
from holdfast.shm import pack, slot_writer
from holdfast.shm.memory_file import Memory, new_file
from holdfast.shm.pack import Packer, unpack
from holdfast.shm.slot_writer import SlotSpace

SIZE = 1 << 20
registry = torch_collate.default_collate_fn_map
Named = collections.namedtuple("Named", "image label")


class Typed(typing.NamedTuple):
    image: torch.Tensor
    label: int


class Constructed(Named):
    """With a constructor of the user's."""

    def __new__(cls, image, label):
        return super().__new__(cls, image, label)


class Mapping(collections.UserDict):
    """A class of the user's."""


class Marked(torch.Tensor):
    """A tensor subclass."""


class Lender:
    """A desk with one slot."""

    def __init__(self):
        fd = new_file("test", SIZE)
        self.memory = Memory(fd, SIZE)
        os.close(fd)
        self.slot = SlotSpace(self.memory.view, self.memory.address)

    def space(self):
        return self.slot


@pytest.fixture
def claims():
    return Lender()


@pytest.fixture
def stack():
    """Installed in this process, which is no worker."""
    before = dict(registry)
    stack = SlotStack()
    stack.install()
    yield stack
    registry.clear()
    registry.update(before)


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def way(request, monkeypatch):
    """As it is compiled, and without a compiler."""
    if request.param == "plain":
        monkeypatch.setattr(slot_writer, "stack", None)
        monkeypatch.setattr(pack, "is_same", slot_writer._same)
        monkeypatch.setattr(slot_writer, "looks_of", slot_writer._looks)
    elif slot_writer.stack is None:
        pytest.skip("without shm/_stream.c, or a torch that describes its tensors: only the plain way is tested")


def collated(stack, claims, samples):
    """The batch, and how many tensors of it lie in the slot."""
    claims.slot.clear()
    stack.open(claims, samples)
    try:
        return stack.collate(samples), len(claims.slot.placed)
    finally:
        stack.close()


def image(index=0):
    return torch.arange(9.0).view(3, 3) + index


PLAIN = {
    "a tensor": lambda i: image(i),
    "a tuple": lambda i: (image(i), i),
    "a list": lambda i: [image(i), "word"],
    "a dict": lambda i: {"a": image(i), "b": {"c": (i, 1.5, True, b"bytes")}},
    "an ordered dict": lambda i: collections.OrderedDict(a=image(i)),
    "a named tuple": lambda i: Named(image(i), i),
    "a typed one": lambda i: Typed(image(i), i),
    "an array": lambda i: (image(i).numpy(), np.float32(i)),
    "beside a tensor subclass": lambda i: (image(i), image(i).as_subclass(Marked)),
}
# A class of the user's is given the parts of a batch.
GIVEN = {
    "a mapping": lambda i: Mapping(a=image(i)),
    "inside a plain one": lambda i: {"a": [image(i), Mapping(a=i)]},
    "a constructor": lambda i: Constructed(image(i), i),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_samples_are_stacked_in_the_slot(stack, claims, kind):
    """What most programs load takes the fast way: one tensor of each of these."""
    for _ in range(2):
        assert collated(stack, claims, [PLAIN[kind](i) for i in range(3)])[1] == 1


@pytest.mark.parametrize("kind", GIVEN)
def test_samples_of_a_class_of_the_users_are_not(stack, claims, kind):
    """Its methods are given the parts of the batch."""
    assert collated(stack, claims, [GIVEN[kind](i) for i in range(3)])[1] == 0


def test_a_function_of_the_users_counts_where_its_type_is_there(stack, claims):
    """Where it is not, the others lose nothing by it."""
    registry[Mapping] = lambda batch, *, collate_fn_map=None: batch
    assert collated(stack, claims, [PLAIN["a dict"](i) for i in range(3)])[1] == 1
    assert collated(stack, claims, [GIVEN["a mapping"](i) for i in range(3)])[1] == 0
    registry[str] = lambda batch, *, collate_fn_map=None: batch
    assert collated(stack, claims, [PLAIN["a dict"](i) for i in range(3)])[1] == 1
    assert collated(stack, claims, [PLAIN["a list"](i) for i in range(3)])[1] == 0
    del registry[Mapping], registry[str]
    assert collated(stack, claims, [PLAIN["a dict"](i) for i in range(3)])[1] == 1


def test_code_of_the_users_that_raises_is_no_matter(stack, claims):
    """The batch is made in memory of its own, and torch says what is to be said."""

    class Raises(type):
        def __instancecheck__(cls, instance):
            raise ValueError("of the user's")

    registry[Raises("Raising", (), {})] = lambda batch, *, collate_fn_map=None: batch
    stack.open(claims, [{"a": image()}])
    assert stack.space is None


def test_a_sample_that_holds_itself(stack, claims):
    endless = [image()]
    endless.append(endless)
    stack.open(claims, [endless, endless])
    assert stack.space is None


CHANGES = {
    "unsqueeze_": lambda t: t.unsqueeze_(1),
    "transpose_": lambda t: t.transpose_(1, 2),
    "transpose_ of two alike": lambda t: t.transpose_(0, 1),
    "resize_": lambda t: t.resize_(2, 4),
    "requires_grad_": lambda t: t.requires_grad_(),
    "another memory": lambda t: setattr(t, "data", torch.full((3, 3, 3), 7.0)),
    "another dtype": lambda t: setattr(t, "data", t.view(torch.int32)),
    "another place": lambda t: t.as_strided_((2, 3, 3), (9, 3, 1), 9),
    "set_": lambda t: t.set_(torch.ones(2, 2)),
}


@pytest.mark.parametrize("whole", [lambda t: t, lambda t: [t], lambda t: {"a": t, "b": {"c": t}}])
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_packed_as_it_is(stack, claims, change, whole):
    """And is not used for the next batch."""
    packer = Packer()

    def crossed(batch):
        spec = packer.pack((None, whole(batch)), claims.slot)
        got = unpack(claims.memory.view, *spec, lambda: None)[1]
        return got if isinstance(got, torch.Tensor) else got[0] if isinstance(got, list) else got["b"]["c"]

    for number in range(3):
        samples = [image(number), image(number + 1), image(number + 2)]
        assert torch.equal(crossed(collated(stack, claims, samples)[0]), torch.stack(samples))
        batch, placed = collated(stack, claims, samples)
        assert placed == 1
        CHANGES[change](batch)
        got = crossed(batch)
        assert (got.dtype, got.shape, got.requires_grad) == (batch.dtype, batch.shape, batch.requires_grad)
        assert torch.equal(got, batch)
        assert not claims.slot.placed


class Watches(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_nothing_lies_in_the_slot_while_a_mode_of_the_users_is_told(stack, claims):
    """Torch's own, for the default device, does no harm."""
    samples = [image(0), image(1)]
    with Watches():
        assert collated(stack, claims, samples)[1] == 0
    with torch.device("cpu"):
        assert collated(stack, claims, samples)[1] == 1


def test_samples_of_mixed_dtypes_become_the_firsts(stack, claims):
    """In the slot and elsewhere, as torch has it in a worker."""
    samples = [image().bfloat16(), image()]
    assert collated(stack, claims, samples)[0].dtype is torch.bfloat16
    samples = [image(), image().double()]
    assert collated(stack, claims, samples)[0].dtype is torch.float32
    assert torch_collate.default_collate(samples).dtype is torch.float32
