"""Slots of large batches on real processes: when workers claim one, and that waiting for one costs nothing else."""

import os
import signal
import struct
import time
from itertools import islice

import pytest
import torch

from holdfast import DataLoader, Policy
from holdfast.core.host import STAGE
from holdfast.core.messages import Stage
from holdfast.local.protocol.pulse import TASK
from holdfast.shm import slot_writer
from holdfast.shm.slot_writer import SlotClaims

WORKERS = 2
# Of four samples 20 MB.
SIDE = 1 << 20


class Large(torch.utils.data.Dataset):
    def __init__(self, length, notes=-1):
        self.length = length
        self.notes = notes

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        note(self.notes, 0, index)
        return torch.full((5, SIDE), index, dtype=torch.uint8)


def note(fd, what, index=0):
    if fd >= 0:
        os.write(fd, struct.pack("<iii", os.getpid(), what, index))


@pytest.fixture(autouse=True)
def crowded(monkeypatch):
    """As many processors as workers."""
    monkeypatch.setattr("holdfast.loader.epochs.usable_cpus", lambda: WORKERS)


@pytest.fixture
def patient(monkeypatch):
    """Workers that wait for a slot as long as they may: nobody else shall have to wait until they give up."""
    monkeypatch.setattr(slot_writer, "MOMENT_S", 240.0)


def firsts(loader):
    return [int(batch[0, 0, 0]) for batch in loader]


def touched(iterator):
    return [sum(map(bool, line.slots._used)) for line in iterator._host._channels]


def test_samples_are_loaded_before_a_slot_is_claimed(monkeypatch):
    """While the trainer looks at the last batch, there is something to do that needs no slot."""
    reading, writing = os.pipe()
    claim = SlotClaims.space

    def noted(self):
        if self._space is None:
            note(writing, 1)
        return claim(self)

    monkeypatch.setattr(SlotClaims, "space", noted)
    assert firsts(DataLoader(Large(12, writing), batch_size=4, num_workers=WORKERS)) == [0, 4, 8]
    os.close(writing)
    with os.fdopen(reading, "rb") as notes:
        said = list(struct.iter_unpack("<iii", notes.read()))
    for worker in {pid for pid, _, _ in said}:
        mine = [what for pid, what, _ in said if pid == worker]
        assert mine == [0, 0, 0, 0, 1] * (len(mine) // 5)
    assert len(said) == 15


def test_where_workers_fill_the_processors_each_has_one_slot(patient):
    iterator = iter(DataLoader(Large(4 * 40), batch_size=4, num_workers=WORKERS))
    assert firsts(islice(iterator, 30)) == list(range(0, 120, 4))
    assert touched(iterator) == [1] * WORKERS


def test_where_they_do_not_each_has_two(patient, monkeypatch):
    monkeypatch.setattr("holdfast.loader.epochs.usable_cpus", lambda: 99)
    iterator = iter(DataLoader(Large(4 * 40), batch_size=4, num_workers=WORKERS))
    assert firsts(islice(iterator, 30)) == list(range(0, 120, 4))
    assert max(touched(iterator)) == 2


def test_whoever_keeps_all_batches_gets_them_all(patient):
    """No worker waits with a batch for which the trainer waits: the slots in its hands will not come back."""
    began = time.monotonic()
    batches = list(DataLoader(Large(4 * 12), batch_size=4, num_workers=WORKERS))
    assert time.monotonic() - began < 60
    assert [int(batch[0, 0, 0]) for batch in batches] == list(range(0, 48, 4))
    assert all(bool((sample == 4 * i + j).all()) for i, batch in enumerate(batches) for j, sample in enumerate(batch))


class Streams(torch.utils.data.IterableDataset):
    """The first worker's is long, the other's short."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info().id
        for i in range(2 if worker else 12):
            yield torch.full((20 * SIDE,), 100 * worker + i, dtype=torch.uint8)


def test_a_stream_that_goes_on_alone_is_not_held_up(patient):
    batches = [int(batch[0, 0]) for batch in DataLoader(Streams(), batch_size=1, num_workers=WORKERS)]
    assert batches == [0, 100, 1, 101, *range(2, 12)]


def test_an_epoch_that_is_left_does_not_hold_up_the_next(patient):
    loader = DataLoader(Large(4 * 12), batch_size=4, num_workers=WORKERS, persistent_workers=True)
    iterator = iter(loader)
    held = next(iterator)
    waiting(iterator)
    assert firsts(loader) == list(range(0, 48, 4))
    assert bool((held[0] == 0).all())


class Small(torch.utils.data.Dataset):
    """Views are lent from 256 KiB on; these are too small to be waited for."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.full((3 * SIDE,), index, dtype=torch.uint8)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_never_runs_out_of_slots(workers):
    """More batches are kept than may be lent, and all the others are on their way."""
    loader = DataLoader(Small(), batch_size=1, num_workers=workers, policy=Policy(strikes=1))
    kept = []
    for batch in loader:
        kept.append(batch)
        time.sleep(0.02)  # so all that may be ready is
    assert [int(batch[0, -1]) for batch in kept] == list(range(60))
    assert not loader.incidents


def waiting(iterator):
    """A worker that waits for the slot in the trainer's hands: long in one stage that takes no time."""
    give_up = time.monotonic() + 60
    before = {}
    while time.monotonic() < give_up:
        time.sleep(0.5)
        for worker, pulse in zip(iterator._workers, iterator._host.pulses, strict=True):
            now = pulse.words[STAGE], pulse.words[TASK]
            if now[0] == Stage.SEND and before.get(worker.name) == now:
                return worker
            before[worker.name] = now
    raise AssertionError("nobody waits")


def test_a_worker_that_is_killed_while_it_waits_takes_nothing_with_it(patient):
    loader = DataLoader(Large(4 * 20), batch_size=4, num_workers=WORKERS, policy=Policy(strikes=1))
    iterator = iter(loader)
    batches = [int(next(iterator)[0, 0, 0]) for _ in range(3)]
    held = next(iterator)
    os.kill(waiting(iterator).pid, signal.SIGKILL)
    batches.append(int(held[0, 0, 0]))
    del held
    assert batches + firsts(iterator) == list(range(0, 80, 4))
    assert [incident.signal for incident in loader.incidents] == ["SIGKILL"]


def test_a_loop_that_is_left_while_a_worker_waits_ends_at_once(patient):
    """Its last batch is in the trainer's hands, and may be for ever."""
    iterator = iter(DataLoader(Large(4 * 20), batch_size=4, num_workers=WORKERS))
    held = next(iterator)
    waiting(iterator)
    began = time.monotonic()
    iterator._shutdown_workers()
    assert time.monotonic() - began < 0.8
    assert bool((held[0] == 0).all())


def test_waiting_is_neither_work_nor_a_slow_sample(patient):
    """It does not count as busy, and no sample is charged for it."""
    policy = Policy(sample_timeout=1.0)
    loader = DataLoader(Large(4 * 12), batch_size=4, num_workers=WORKERS, policy=policy)
    iterator = iter(loader)
    held = next(iterator)
    waiting(iterator)
    time.sleep(2.5)
    assert int(held[0, 0, 0]) == 0
    del held
    assert firsts(iterator) == list(range(4, 48, 4))
    assert not loader.incidents
    busy = sum(worker["busy_s"] for worker in loader.stats()["per_worker"])
    assert busy < 2.5
