"""The gate: no slot is used again while a copy from it may be in flight; no page goes back while it is registered."""

import gc
import os
import threading
from contextlib import nullcontext

import pytest

from holdfast.loader.cuda_slots import MOST_BEHIND, CudaSlots
from holdfast.shm.memory_file import Memory, new_file, states_of, strides_for
from holdfast.shm.slot_writer import SlotClaims
from holdfast.shm.slots import Slots

from ..conftest import mappings
from ..interrupt import Alarm, Interrupt, handler_raises

STRIDE = 1 << 21
COUNT, BUSY = 6, 3


class Device:
    """Stands in for the driver: it does what it was given when told to, and writes down what it was asked."""

    def __init__(self):
        self.done = 0
        self.given = 0
        self.registered = {}
        self.is_capturing = False
        self.refuses = ""
        self.calls = []
        self.threads = set()

    def capturing(self):
        return self.is_capturing

    def relaxed(self):
        return nullcontext()

    def _called(self, what):
        assert not self.is_capturing, f"{what} spoils the capture"
        self.calls.append(what)
        self.threads.add(threading.get_ident())

    def mark(self):
        self._called("mark")
        return [(0, self.given)]

    def passed(self, mark):
        self._called("passed")
        return self.done >= mark[1]

    def register(self, address, size):
        self._called("register")
        if self.refuses:
            return self.refuses
        assert not any(a < address + size and address < a + s for a, s in self.registered.items())
        self.registered[address] = size
        return ""

    def unregister(self, address):
        self._called("unregister")
        del self.registered[address]
        return ""


class Copy:
    """One of our own."""

    def __init__(self):
        self.done = False

    def landed(self):
        return self.done


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def gate(device):
    return CudaSlots(device)


@pytest.fixture
def slots(gate):
    return made(gate)


def made(gate):
    size = strides_for(COUNT, BUSY) * STRIDE
    fd = new_file("test", size)
    memory = Memory(fd, size)
    os.close(fd)
    return Slots(memory, STRIDE, COUNT, BUSY, gate)


def claimed(slots):
    claims = SlotClaims(slots.memory, STRIDE, COUNT, None, lambda: True)
    claims.space()
    return claims.hand_over(0)


def is_free(slots, slot):
    return states_of(slots.memory, COUNT)[slot] == 0


def lent(slots, gate, size=5000):
    """A slot that holds a batch, and a view of it."""
    slot = claimed(slots)
    slots.used(slot, size)
    view = slots.lend(slot)
    assert view is not None
    gate.register(slots, slot, size)
    return slot, view


def test_a_slot_is_free_when_the_device_is_past_what_it_had_been_given(slots, gate, device):
    slot, view = lent(slots, gate)
    device.given = 1
    del view
    gate.step()
    assert not is_free(slots, slot)
    gate.step()
    assert not is_free(slots, slot)
    device.done = 1
    gate.step()
    assert is_free(slots, slot)
    assert not slots.lent


def test_a_view_that_dies_in_another_thread_calls_nothing_there(slots, gate, device):
    slot, view = lent(slots, gate)
    views = [view]
    del view
    before = list(device.calls)
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert device.calls == before
    gate.step()
    assert is_free(slots, slot)
    assert device.threads == {threading.get_ident()}


def test_nothing_is_called_during_a_capture(slots, gate, device):
    """Neither for a slot that comes back, nor for one to be registered; afterwards all is caught up with."""
    slot, view = lent(slots, gate)
    device.is_capturing = True
    del view
    gate.step()
    gate.pace()
    other = claimed(slots)
    assert not gate.register(slots, other, 100)
    assert not is_free(slots, slot)
    device.is_capturing = False
    gate.step()
    assert is_free(slots, slot)


def test_only_the_used_length_is_registered_and_only_once(slots, gate, device):
    for _ in range(3):
        _, view = lent(slots, gate, 5000)
        del view
        gate.step()
    assert list(device.registered.values()) == [8192]
    assert device.calls.count("register") == 1


def test_a_larger_batch_is_registered_anew(slots, gate, device):
    slot, view = lent(slots, gate, 5000)
    del view
    gate.step()
    assert lent(slots, gate, 80_000)[0] == slot
    ((_, size),) = device.registered.items()
    assert 80_000 <= size <= 110_000
    assert device.calls.count("unregister") == 1


def test_pages_are_unregistered_before_they_go_back(slots, gate, device, monkeypatch):
    """A hole in a registered range: the device would go on reading the old bytes."""
    given_back = []

    def give_back(memory, start, end):
        address = memory.address + start
        assert not any(a < memory.address + end and address < a + s for a, s in device.registered.items())
        given_back.append((start, end))

    monkeypatch.setattr(Memory, "give_back", give_back)
    monkeypatch.setattr("holdfast.shm.slots.LOCKED_SURPLUS", 1 << 20)
    slot, view = lent(slots, gate, STRIDE)
    del view
    slots.used(1, 10)
    for _ in range(100):
        slots.used(1, 10)  # batches are small now
    gate.step()
    assert given_back and slot not in slots.registered
    slot, view = lent(slots, gate, 5000)
    free, other = lent(slots, gate, 5000)
    del other
    gate.step()
    given_back.clear()
    slots.retire()
    assert (free * STRIDE, (free + 1) * STRIDE) not in given_back  # not yet: we are not inside a next()
    gate.step()
    assert (free * STRIDE, (free + 1) * STRIDE) in given_back
    assert (slot * STRIDE, (slot + 1) * STRIDE) not in given_back
    del view
    gate.step()
    assert (slot * STRIDE, (slot + 1) * STRIDE) in given_back
    assert not device.registered


def test_our_own_copies_are_waited_for_and_nothing_else(slots, gate, device):
    device.given = 5
    slot, view = lent(slots, gate)
    copy = Copy()
    gate.copying(slots, slot, copy)
    del view
    gate.shown(slots, slot)
    gate.step()
    assert not is_free(slots, slot)
    copy.done = True
    gate.step()
    assert is_free(slots, slot)
    assert device.done == 0


def test_what_the_user_still_looks_at_is_not_ours_alone(slots, gate, device):
    """They may copy from it on a stream of their own, after ours has landed."""
    slot, view = lent(slots, gate)
    copy = Copy()
    gate.copying(slots, slot, copy)
    gate.shown(slots, slot)
    copy.done = True
    device.given = 1
    del view
    gate.step()
    gate.step()
    assert not is_free(slots, slot)
    device.done = 1
    gate.step()
    assert is_free(slots, slot)


def test_a_dropped_loader_keeps_its_memory_mapped_until_it_is_unregistered(gate, device):
    gc.collect()
    slots = made(gate)
    before = mappings()
    _, view = lent(slots, gate)
    del view
    gate.step()
    slots.retire()
    del slots
    gc.collect()
    assert device.registered and mappings() == before
    gate.step()
    gc.collect()
    assert not device.registered and mappings() == before - 1


def test_what_a_worker_had_claimed_again_is_unregistered_when_its_slots_are_gone(gate, device):
    """Nobody will open that batch: its loader was dropped."""
    slots = made(gate)
    slot, view = lent(slots, gate)
    del view
    gate.step()
    assert claimed(slots) == slot
    slots.retire()
    gate.step()
    assert device.registered
    before = list(device.calls)
    del slots
    gc.collect()
    assert device.calls == before
    gate.step()
    assert not device.registered


def test_a_refusal_is_remembered_and_nothing_is_lost(slots, gate, device):
    device.refuses = "CUDA_ERROR_OUT_OF_MEMORY (2)"
    slot, view = lent(slots, gate)
    assert gate.refused.why == device.refuses and gate.refused.bytes == 8192
    assert not gate.register(slots, claimed(slots), 10)
    assert device.calls.count("register") == 1
    del view
    gate.step()
    assert is_free(slots, slot)


def test_the_trainer_does_not_run_far_ahead_but_does_not_wait_for_ever(slots, gate, device, monkeypatch):
    monkeypatch.setattr("holdfast.loader.cuda_slots.PATIENCE_S", 0.05)
    copies = [Copy() for _ in range(MOST_BEHIND + 2)]
    for number, copy in enumerate(copies):
        gate.copying(slots, 100 + number, copy)
    gate.pace()  # in vain, and only once
    gate.pace()
    assert gate._behind == MOST_BEHIND + 2
    for copy in copies[:3]:
        copy.done = True
    gate.step()
    gate.pace()
    assert gate._behind == MOST_BEHIND - 1
    extra = [Copy(), Copy()]
    for number, copy in enumerate(extra):
        gate.copying(slots, 200 + number, copy)
    timer = threading.Timer(0.01, lambda: setattr(extra[0], "done", True))
    timer.start()
    gate.pace()
    assert gate._behind == MOST_BEHIND
    timer.join()


def test_a_mark_that_is_refused_is_tried_again(slots, gate, device, monkeypatch):
    slot, view = lent(slots, gate)
    monkeypatch.setattr(device, "mark", lambda: None)
    del view
    gate.step()
    gate.step()
    assert not is_free(slots, slot)
    monkeypatch.undo()
    gate.step()
    assert is_free(slots, slot)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_step_that_a_signal_handler_cuts_short_loses_no_slot(slots, gate):
    """The next step goes on with it."""
    for moment in range(1, 2000):
        pairs = [lent(slots, gate), lent(slots, gate)]
        copy = Copy()
        gate.copying(slots, pairs[0][0], copy)
        copy.done = True
        names = [slot for slot, _ in pairs]
        with handler_raises(Alarm):
            try:
                with Interrupt(moment) as interrupt:
                    del pairs
                    gate.step()
            except Alarm:
                pass
        slots._reclaim()
        gate.step()
        gate.step()
        assert all(is_free(slots, slot) for slot in names) and not slots.lent and not gate._behind
        assert not gate._unseen and not gate._back
        if interrupt.seen < moment:
            break
    assert moment > 100
