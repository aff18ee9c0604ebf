"""SlotClaims: when a slot is claimed, and how long a worker waits for one that was used before."""

import itertools
import os
from types import SimpleNamespace

import pytest

from holdfast.shm import slot_writer as module
from holdfast.shm.memory_file import CLAIMED, FREE, Memory, new_file, states_of, strides_for
from holdfast.shm.slot_writer import HUGE, LARGE, MOMENT_S, NO_SLOT, SlotClaims

STRIDE, COUNT = 1 << 21, 6


class Bench:
    """A desk under a clock of its own, and a trainer that puts a slot back when it is told to."""

    def __init__(self, monkeypatch, enough):
        size = strides_for(COUNT, 1) * STRIDE
        fd = new_file("test", size)
        self.memory = Memory(fd, size)
        os.close(fd)
        self.states = states_of(self.memory, COUNT)
        self.now = 1000.0
        self.due = []  # (when, slot)
        self.may_wait = True
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        self.claims = SlotClaims(self.memory, STRIDE, COUNT, enough, lambda: self.may_wait)

    def sleep(self, seconds):
        self.now += seconds
        for when, slot in list(self.due):
            if when <= self.now:
                self.states[slot] = FREE
                self.due.remove((when, slot))

    def batch(self, size, writing=0.002, held=None):
        """One is written, and put back after a while; or kept. Its slot, and how long the worker waited for it."""
        began = self.now
        self.claims.space()
        waited = self.now - began
        self.sleep(writing)
        slot = self.claims.hand_over(size)
        if held is not None:
            self.due.append((self.now + held, slot))
        return slot, waited

    @property
    def touched(self):
        return len(self.claims._spaces)


@pytest.fixture
def crowded(monkeypatch):
    return Bench(monkeypatch, 1)


@pytest.fixture
def roomy(monkeypatch):
    return Bench(monkeypatch, 2)


def test_a_task_that_sends_nothing_needs_no_slot(roomy):
    assert roomy.claims.hand_over(0) == NO_SLOT
    assert bytes(roomy.states) == bytes(COUNT)


def test_one_task_has_one_slot(roomy):
    assert roomy.claims.space() is roomy.claims.space()
    assert bytes(roomy.states) == bytes([CLAIMED, FREE, FREE, FREE, FREE, FREE])
    assert roomy.claims.hand_over(10) == 0
    assert roomy.claims.space().slot == 1


@pytest.mark.parametrize("size", [10, LARGE])
def test_small_batches_are_not_worth_a_wait(crowded, size):
    assert [crowded.batch(size) for _ in range(COUNT)] == [(i, 0.0) for i in range(COUNT)]


def test_large_batches_get_two_slots_and_then_wait_for_one_of_these(roomy):
    assert roomy.batch(HUGE + 1, held=0.01) == (0, 0.0)
    assert roomy.batch(HUGE + 1) == (1, 0.0)
    slot, waited = roomy.batch(HUGE + 1)
    assert slot == 0 and waited == pytest.approx(0.008, abs=0.001)


@pytest.mark.parametrize(("size", "touched"), [(LARGE + 1, 2), (HUGE, 2), (HUGE + 1, 1)])
def test_where_workers_fill_the_processors_a_huge_batch_has_one_slot(crowded, size, touched):
    for _ in range(500):
        crowded.batch(size, writing=0.002, held=0.003)
    assert crowded.touched == touched


def test_a_hiccup_does_not_cost_a_slot(crowded):
    """Once in a second somebody is not scheduled for a while."""
    for round_ in range(3000):
        crowded.batch(HUGE + 1, writing=0.002, held=0.08 if round_ % 250 == 0 else 0.003)
    assert crowded.touched == 1


def test_where_the_trainer_takes_its_time_the_next_one_is_made_meanwhile(crowded):
    crowded.batch(HUGE + 1)
    slot, waited = crowded.batch(HUGE + 1)
    assert slot == 1
    assert MOMENT_S <= waited < MOMENT_S + 0.01


def test_waits_in_vain_become_shorter(crowded):
    """Somebody who keeps every batch shall not pay for each."""
    waits = [crowded.batch(HUGE + 1)[1] for _ in range(COUNT)]
    assert waits[0] == 0
    assert all(later < 0.6 * sooner + 0.005 for sooner, later in itertools.pairwise(waits[1:]))
    assert sum(waits) < 2 * MOMENT_S + 0.05


def test_a_trainer_that_always_looks_longer_gets_more_slots(crowded):
    """A tenth of the worker's time may go into waiting for the trainer, not a half."""
    began = crowded.now
    waits = [crowded.batch(HUGE + 1, writing=0.002, held=0.016)[1] for _ in range(2000)]
    assert 1 < crowded.touched < COUNT
    assert sum(max(0.0, waited - 0.004) for waited in waits) < 0.15 * (crowded.now - began)


def test_nobody_waits_when_the_trainer_waits_for_this_very_batch(crowded):
    """It looks at the last one until it has the next; perhaps for good. And that is no wait in vain."""
    crowded.batch(HUGE + 1)
    crowded.may_wait = False
    assert crowded.batch(HUGE + 1) == (1, 0.0)
    crowded.may_wait = True
    slot, waited = crowded.batch(HUGE + 1)
    assert slot == 2 and waited >= MOMENT_S


def test_some_never_wait(monkeypatch):
    """Results of a pool, batches in any order: nobody can tell for which one the trainer waits."""
    bench = Bench(monkeypatch, None)
    assert [bench.batch(HUGE + 1) for _ in range(COUNT)] == [(i, 0.0) for i in range(COUNT)]


def test_when_every_slot_is_taken_it_waits_for_the_next_that_comes_back(monkeypatch):
    """Not even then does a worker end: the trainer is about to put one back."""
    bench = Bench(monkeypatch, None)
    for i in range(COUNT):
        bench.batch(10, held=1.0 if i == 3 else None)
    slot, waited = bench.batch(10)
    assert slot == 3 and waited > 0.9


def test_what_was_waited_is_known(crowded):
    """It is not work: whoever counts how busy a worker is takes it off."""
    crowded.batch(HUGE + 1, held=0.01)
    _, waited = crowded.batch(HUGE + 1)
    assert crowded.claims.waited_ns == pytest.approx(1e9 * waited)
