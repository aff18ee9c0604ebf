"""Going through a batch: every structure comes out as it went in, with its tensors moved."""

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from holdfast.loader.tree import kept, mapped, moved, tensors_of
from holdfast.shm.pack import SMALL

Pair = namedtuple("Pair", "left right")
META = torch.device("meta")


class Encoding(UserDict):
    """As tokenizers make them."""

    def to(self, device):
        raise AssertionError("its values are moved one by one")


class Movable:
    """A batch type of the user's."""

    def __init__(self, where="host"):
        self.where = where

    def to(self, device):
        return Movable(device)


@pytest.mark.parametrize(
    "batch",
    [
        [torch.ones(2), 3, "x", None, b"y", 1.5],
        (torch.ones(2), (torch.ones(1),)),
        {"a": torch.ones(2), "b": {"c": [torch.ones(1)]}},
        OrderedDict(a=torch.ones(2), b=1),
        defaultdict(list, a=torch.ones(2)),
        Encoding({"a": torch.ones(2)}),
        Pair(torch.ones(2), "x"),
        deque([torch.ones(2), 1]),
        torch.ones(2),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_the_structure_stays(batch):
    seen = []

    def leaf(value):
        seen.append(value)
        return value

    out = mapped(batch, leaf)
    assert type(out) is type(batch)
    assert repr(out) == repr(batch)
    assert any(isinstance(value, torch.Tensor) for value in seen)
    assert repr(moved(batch, META)).count("device='meta'") == sum(isinstance(v, torch.Tensor) for v in seen)


def test_the_batch_itself_is_not_changed():
    batch = OrderedDict(a=[torch.ones(1)])
    moved(batch, META)
    assert batch["a"][0].device.type == "cpu"


def test_a_mapping_that_cannot_be_changed_becomes_a_dict():
    assert moved(MappingProxyType({"a": torch.ones(1)}), META)["a"].device == META


def test_what_knows_how_to_go_is_asked():
    """A packed sequence keeps its sizes on the host; only it knows that."""
    packed = moved([pack_sequence([torch.ones(3), torch.ones(2)])], META)[0]
    assert isinstance(packed, PackedSequence)
    assert packed.data.device == META
    assert packed.batch_sizes.device.type == "cpu"
    assert moved(Movable(), META).where == META


def test_a_batch_of_more_than_plain_tensors_is_not_copied_ahead():
    plain = torch.ones(2)
    assert list(tensors_of([plain, plain, {"a": 1}]).values()) == [plain]
    for odd in (Movable(), torch.ones(2).to_sparse(), torch.nn.Parameter(torch.ones(2))):
        assert tensors_of([plain, odd]) is None


def test_small_arrays_leave_the_slot_large_ones_stay():
    small, large = np.zeros(4), np.zeros(SMALL, np.uint8)
    assert kept(small) is not small
    assert kept(large) is large
    assert kept("text") == "text"
