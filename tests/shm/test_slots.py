"""Slots: who has which, and that nobody's bytes are written while somebody looks."""

import gc
import os

import pytest

from holdfast.shm.memory_file import SMALLEST_STRIDE, Memory, new_file, stride_for, strides_for
from holdfast.shm.slot_writer import SlotClaims
from holdfast.shm.slots import ForkGuard, Slots

from ..interrupt import Alarm, Interrupt, handler_raises

STRIDE = 1 << 21


@pytest.fixture
def slots():
    size = strides_for(6, 4) * STRIDE
    fd = new_file("test", size)
    memory = Memory(fd, size)
    os.close(fd)
    made = Slots(memory, STRIDE, 6, 4)
    claims = SlotClaims(memory, STRIDE, 6, None, lambda: True)
    made.take = lambda: (made._reclaim(), claims.space(), claims.hand_over(0))[2]  # as the worker does, after a next()
    return made


def test_the_lowest_free_one_is_claimed(slots):
    """So as few as possible are ever touched."""
    assert [slots.take() for _ in range(3)] == [0, 1, 2]
    slots.put_back(1)
    slots.put_back(0)
    assert slots.take() == 0


def test_letter_boxes(slots):
    boxes = [slots.take_box() for _ in range(4)]
    assert boxes == [6, 7, 8, 9]
    slots.free_box(7)
    assert slots.take_box() == 7


def test_a_lent_slot_comes_back_when_its_last_view_is_gone(slots):
    slot = slots.take()
    view = slots.lend(slot)
    part = view[10:20]
    del view
    gc.collect()
    assert slots.lent
    taken = [slots.take() for _ in range(4)]
    assert slot not in taken
    del part
    assert slots.take() == slot
    assert not slots.lent


def test_more_than_may_be_kept_is_not_lent(slots, monkeypatch):
    """Of six, say, two: the rest is for tasks. The caller copies instead."""
    monkeypatch.setattr("holdfast.shm.slots.KEEPABLE", 2)
    kept = [slots.lend(slots.take()) for _ in range(2)]
    assert all(k is not None for k in kept)
    assert slots.lend(slots.take()) is None


def test_a_slot_seen_by_a_forked_child_waits_for_its_end(slots):
    slot = slots.take()
    view = slots.lend(slot)
    view[0] = 7
    guard = ForkGuard()
    slots.guard(guard)
    pid = os.fork()
    if pid == 0:
        guard.in_child()
        os.read(0, 0)
        import time

        time.sleep(0.3)
        os._exit(0 if view[0] == 7 else 1)
    guard.in_parent()
    del view
    others = [slots.take() for _ in range(5)]
    assert slot not in others
    assert os.waitpid(pid, 0)[1] == 0
    assert slots.take() == slot


def test_pages_of_an_unusually_large_batch_are_given_back(slots):
    slot = slots.take()
    slots.memory.view[slot * STRIDE : slot * STRIDE + STRIDE] = b"x" * STRIDE
    slots.used(slot, STRIDE)
    for _ in range(200):
        slots.used(slot, 1000)
    slots._usual = 1000.0
    slots._used[slot] = STRIDE
    slots.put_back(slot)
    assert slots.memory.view[slot * STRIDE + STRIDE - 1] == 0


def test_retiring_gives_back_all_but_what_is_lent(slots):
    kept, free = slots.take(), slots.take()
    for slot in (kept, free):
        slots.memory.view[slot * STRIDE : slot * STRIDE + 3] = b"abc"
    view = slots.lend(kept)
    slots.put_back(free)
    slots.retire()
    assert bytes(view[:3]) == b"abc"
    assert slots.memory.view[free * STRIDE] == 0
    del view
    assert slots.memory.view[kept * STRIDE] == 0


@pytest.mark.parametrize("count", [1, 40, 1000, 10**6])
def test_strides_fit_the_room(count):
    stride = stride_for(count)
    assert stride >= SMALLEST_STRIDE
    assert stride * count <= 1 << 40


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_slot_is_found_again_whose_way_back_a_signal_handler_cut_short(slots):
    """Python prints what is raised in a weak reference's callback, and nobody is told of that slot a second time."""
    cut = 0
    for moment in range(1, 200):
        slot = slots.take()
        views = [slots.lend(slot)]
        with handler_raises(Alarm):
            try:
                with Interrupt(moment) as interrupt:
                    views.clear()
            except Alarm:
                pass
        cut += bool(slots.lent)
        assert slots.take() == slot, "it is lost"
        slots.put_back(slot)
        assert not slots.lent
        if interrupt.seen < moment:
            break
    assert cut > 5
