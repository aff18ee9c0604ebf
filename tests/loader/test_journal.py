"""Journals: what is loaded of a batch survives the life that loaded it."""

import os
import random

import pytest

from holdfast.core.host import POSITION
from holdfast.core.messages import Place, Stage
from holdfast.loader.journal import Journal
from holdfast.local.protocol.pulse import PAGE, Pulse
from holdfast.local.trainer.worker_channel import Journals
from holdfast.shm.memory_file import Memory, new_file, strides_for
from holdfast.shm.pack import Packer
from holdfast.shm.slot_writer import SlotClaims
from holdfast.shm.slots import Slots

STRIDE, COUNT, BUSY = 1 << 21, 6, 2


def mapped(size):
    fd = new_file("test", size)
    memory = Memory(fd, size)
    os.close(fd)
    return memory


@pytest.mark.parametrize("taken", [0, 2])
def test_what_a_life_leaves_is_found_in_whatever_slot_it_was(taken):
    memory = mapped(strides_for(COUNT, BUSY) * STRIDE)
    slots = Slots(memory, STRIDE, COUNT, BUSY)
    claims = SlotClaims(memory, STRIDE, COUNT, None, lambda: True)
    for _ in range(taken):  # batches that the trainer looks at
        claims.space()
        claims.hand_over(0)
    pulse = Pulse(mapped(PAGE), 0)
    pulse.enter(Stage.FETCH)
    journal = Journal(Packer(), claims.space(), pulse.words, 4)
    random.seed(5)
    for position, sample in enumerate(({"a": 1}, b"two")):
        pulse.words[POSITION] = position
        random.random()
        journal.add(sample)
    after = random.getstate()
    pulse.words[POSITION] = 2

    kept = Journals(sent=True)
    kept.keep(pulse, slots, Place(7, 2, Stage.FETCH, 0.0))
    saved, count = kept[7]
    random.seed(99)
    next_life = Pulse(mapped(PAGE), 0)
    again = Journal(Packer(), claims.space(), next_life.words, 4)
    assert again.restore(memoryview(saved), count) == [{"a": 1}, b"two"]
    assert random.getstate() == after
