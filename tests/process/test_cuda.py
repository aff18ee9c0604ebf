"""The way to a CUDA device, on a real one: right bytes, right order, faults."""

import gc
import os
import signal
import warnings

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence

from holdfast import DataLoader

from .data import Images, Numbers
from .on_cuda import (  # noqa: F401  (two of them are fixtures that each test here uses)
    SIDE,
    Mixed,
    boxed,
    busy,
    cuda_is_up,
    labels_of,
    mixed,
    needs_cuda,
    packed,
    registered,
    what_is_held_is_let_go,
)

pytestmark = needs_cuda


# device= -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_batch_arrives_once_in_order_with_its_bytes(method, workers):
    loader = DataLoader(Images(60), batch_size=4, num_workers=workers, multiprocessing_context=method, device="cuda")
    place = 0
    for images, labels in loader:
        assert images.device.type == labels.device.type == "cuda"
        assert torch.equal(images[:, 0, 0, 0].long(), labels)
        assert torch.equal(images.amin((1, 2, 3)), images.amax((1, 2, 3)))
        assert labels.tolist() == list(range(place, place + 4))
        place += 4
    assert place == 60
    assert loader.stats()["batches"] == 15 and loader.stats()["samples"] == 60


def test_the_slots_are_read_in_place():
    iterator = iter(DataLoader(Images(40), batch_size=4, num_workers=2, device="cuda:0"))
    for _ in range(4):
        next(iterator)
    assert all(registered(iterator))


def test_nested_batches():
    """Tensors cross whatever they are in; all else stays on the host, and every type stays what it is."""
    loader = DataLoader(Mixed(), batch_size=2, num_workers=2, collate_fn=mixed, device="cuda")
    kept = list(loader)
    for number, batch in enumerate(kept):
        want = mixed([2 * number, 2 * number + 1])
        assert list(batch) == list(want)
        for name in ("large", "channels last", "half", "empty", "scalar"):
            assert batch[name].device.type == "cuda"
            assert batch[name].dtype is want[name].dtype and batch[name].stride() == want[name].stride()
            assert torch.equal(batch[name].cpu(), want[name])
        for got, wanted in zip([*batch["small"], batch["pair"][0]], [*want["small"], want["pair"][0]], strict=True):
            assert got.device.type == "cuda" and torch.equal(got.cpu(), wanted)
        assert batch["names"] == want["names"] and batch["pair"][1] is None
        for name in ("array", "large array"):
            assert isinstance(batch[name], np.ndarray) and np.array_equal(batch[name], want[name])


def test_small_tensors_share_one_copy_and_large_ones_do_not():
    loader = DataLoader(Mixed(), batch_size=2, num_workers=1, collate_fn=mixed, device="cuda")
    batch = next(iter(loader))
    small = {tensor.untyped_storage().data_ptr() for tensor in (*batch["small"], batch["half"], batch["scalar"])}
    assert len(small) == 1
    assert batch["large"].untyped_storage().nbytes() == batch["large"].nbytes


def test_what_knows_how_to_go_is_asked():
    loader = DataLoader(Numbers(12), batch_size=3, num_workers=2, collate_fn=packed, device="cuda")
    for number, (sequence, labels) in enumerate(loader):
        assert isinstance(sequence, PackedSequence)
        assert sequence.data.device.type == labels.device.type == "cuda"
        assert sequence.batch_sizes.device.type == "cpu"
        assert labels.tolist() == list(range(3 * number, 3 * number + 3))
        assert sequence.data[:3].tolist() == sorted(labels.tolist()) or set(sequence.data.tolist()) == set(
            labels.tolist()
        )


def test_batches_are_right_on_whatever_stream_is_current():
    """Also when it is another one each time, and busy; and dropped at once, while the work on them is queued."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    sums = []
    loader = DataLoader(Images(96), batch_size=4, num_workers=2, device="cuda")
    iterator = iter(loader)
    for number in range(24):
        with torch.cuda.stream(streams[number % 3]):
            busy(3)
            images, labels = next(iterator)
            busy(1)
            sums.append((images.double().mean(), labels.double().mean()))
            del images, labels
    torch.cuda.synchronize()
    assert [float(image) for image, _ in sums] == [4.0 * n + 1.5 for n in range(24)]
    assert [float(label) for _, label in sums] == [4.0 * n + 1.5 for n in range(24)]


def test_device_memory_is_bounded_when_the_trainer_runs_ahead():
    """The device takes 5 ms for a batch, the trainer nothing: dropped batches are used again in stream order."""
    batch_bytes = 4 * 3 * SIDE * SIDE * 4
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    total = torch.zeros((), dtype=torch.float64, device="cuda")
    for images, _ in DataLoader(Images(400), batch_size=4, num_workers=2, device="cuda"):
        busy(5)
        total += images[:, 0, 0, 0].double().sum()
    peak = torch.cuda.max_memory_allocated() - before
    assert float(total) == sum(range(400))
    assert peak < 7 * batch_bytes, f"{peak / batch_bytes:.1f} batches"


def test_a_kept_batch_stays_as_it_is():
    kept = list(DataLoader(Images(80), batch_size=4, num_workers=2, device="cuda"))
    assert labels_of(kept) == list(range(80))
    assert all(torch.equal(images[:, 1, 2, 3].long(), labels) for images, labels in kept)


def test_persistent_workers_and_an_epoch_that_is_left():
    loader = DataLoader(Images(40), batch_size=4, num_workers=2, device="cuda", persistent_workers=True)
    for _ in range(3):
        for images, labels in loader:
            assert torch.equal(images[:, 0, 0, 0].long(), labels)
            if int(labels[0]) == 12:
                break
    assert labels_of(loader) == list(range(40))


def test_an_error_comes_at_its_turn_and_the_next_batch_after_it():
    class Once(Images):
        def __getitem__(self, index):
            if index == 9:
                raise KeyError(index)
            return super().__getitem__(index)

    iterator = iter(DataLoader(Once(40), batch_size=4, num_workers=2, device="cuda"))
    seen = []
    for number in range(10):
        if number == 2:
            with pytest.raises(KeyError):
                next(iterator)
        else:
            seen += next(iterator)[1].tolist()
    assert seen == [i for i in range(40) if not 8 <= i < 12]


def test_an_exception_in_the_trainer_between_batches_loses_nothing():
    iterator = iter(DataLoader(Images(40), batch_size=4, num_workers=2, device="cuda"))
    seen = []
    while True:
        try:
            for _, labels in iterator:
                seen += labels.tolist()
                if len(seen) % 12 == 0:
                    raise ValueError("the step failed")
            break
        except ValueError:
            gc.collect()
    assert seen == list(range(40))


@pytest.mark.parametrize("way", ["device", "pin_memory"])
def test_workers_that_die_while_their_slots_are_copied(way):
    """The device is held up, so that their memory is still being read when they are gone."""
    options = {"device": "cuda"} if way == "device" else {"pin_memory": True}
    loader = DataLoader(Images(240), batch_size=4, num_workers=3, **options)
    side = torch.cuda.Stream()
    sums = []
    iterator = iter(loader)
    for number, (images, labels) in enumerate(iterator):
        busy(4, side)
        with torch.cuda.stream(side):
            if way == "device":
                side.wait_stream(torch.cuda.default_stream())
                images.record_stream(side)
                labels.record_stream(side)
            sums.append((images.to("cuda", non_blocking=True).double().mean(), labels.to("cuda", non_blocking=True)))
        if number % 10 == 5:
            worker = iterator._workers[number // 10 % 3]
            os.kill(worker.pid, signal.SIGKILL)
        del images, labels
    torch.cuda.synchronize()
    assert [label for _, labels in sums for label in labels.tolist()] == list(range(240))
    assert [float(mean) for mean, _ in sums] == [4.0 * n + 1.5 for n in range(60)]
    assert loader.stats()["restarts"] >= 4


def test_no_memory_for_a_batch_ahead_means_fewer_ahead_and_none_lost():
    loader = DataLoader(Images(64), batch_size=16, num_workers=2, device="cuda")
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (40 << 20)) / total)
    try:
        seen = []
        iterator = iter(loader)
        for _ in range(4):
            images, labels = next(iterator)  # two batches of 12.6 MB fit beside what there is, more do not
            seen += labels.tolist()
            assert torch.equal(images[:, 0, 0, 0].long(), labels)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert seen == list(range(64))


def test_no_memory_for_the_batch_itself_is_said_and_the_same_batch_comes_again():
    iterator = iter(DataLoader(Images(64), batch_size=16, num_workers=2, device="cuda"))
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (4 << 20)) / total)
    try:
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError) as caught:
                next(iterator)
            assert any("holdfast explain gpu-memory-full" in note for note in caught.value.__notes__)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    caught = None
    assert labels_of(iterator) == list(range(64))


def test_how_long_the_device_waited():
    quick = DataLoader(Images(200), batch_size=4, num_workers=3, device="cuda")
    for _ in quick:
        busy(10)
    torch.cuda.synchronize()
    stats = quick.stats()
    assert stats["device_ran_s"] > 0.2
    slow = DataLoader(Numbers(40, 0.03), batch_size=1, num_workers=1, device="cuda")
    for _ in slow:
        busy(5)
        torch.cuda.synchronize()
    assert slow.stats()["device_waited_share"] > 0.5
    assert "the device waited for data" in str(slow.report())


# pin_memory=True ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_pinned_batches_are_pinned_and_not_copied(method):
    loader = DataLoader(Images(40), batch_size=4, num_workers=2, pin_memory=True, multiprocessing_context=method)
    iterator = iter(loader)
    place = 0
    for images, labels in iterator:
        assert images.is_pinned() and labels.is_pinned()
        if place == 8:
            assert all(registered(iterator))
            memories = [line.slots.memory for line in iterator._host._channels]
            assert any(m.address <= images.data_ptr() < m.address + m.size for m in memories)
        assert torch.equal(images[:, 0, 0, 0].long(), labels)
        assert labels.tolist() == list(range(place, place + 4))
        place += 4
    assert place == 40


def test_a_batch_type_that_pins_itself_is_asked():
    for batch in DataLoader(Numbers(12), batch_size=3, num_workers=2, collate_fn=boxed, pin_memory=True):
        assert batch.pinned and batch.tensor.is_pinned()


def test_pin_memory_device_is_accepted():
    loader = DataLoader(Images(8), batch_size=4, num_workers=1, pin_memory=True, pin_memory_device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch say that it is not needed
        batches = list(loader)
    assert all(images.is_pinned() for images, _ in batches)
