"""Memory that a CUDA device reads: never overwritten, given back, also in captures, limits and forks."""

import gc
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from holdfast import DataLoader
from holdfast.loader import device as ferrying
from holdfast.loader.cuda_slots import CudaSlots, Driver, gate

from ..conftest import mappings
from .data import Images
from .on_cuda import (  # noqa: F401  (two of them are fixtures that each test here uses)
    SIDE,
    Mixed,
    busy,
    cuda_is_up,
    labels_of,
    mixed,
    needs_cuda,
    what_is_held_is_let_go,
)

pytestmark = needs_cuda


def copied_late(monkeypatch, guard):
    """Labels of batches against what copies of them, queued behind 30 ms of other work and dropped at once, read."""
    if guard == "none":
        monkeypatch.setattr(CudaSlots, "hold", lambda self, slots, slot: slots.let_go(slot))
    elif guard == "current stream":

        def mark(driver):
            event = torch.cuda.Event()
            event.record()
            return [event]

        monkeypatch.setattr("holdfast.loader.cuda_slots.Driver.mark", mark)
        monkeypatch.setattr("holdfast.loader.cuda_slots.Driver.passed", lambda driver, event: event.query())
    side = torch.cuda.Stream()
    target = [torch.zeros(4, 3, SIDE, SIDE, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    want = []
    for place, (images, labels) in enumerate(DataLoader(Images(32), batch_size=4, num_workers=1, pin_memory=True)):
        want.append(labels.tolist())
        busy(30, side)
        with torch.cuda.stream(side):
            target[place].copy_(images, non_blocking=True)
        del images, labels
        time.sleep(0.01)  # the worker has all the time to write a slot that it may write
    torch.cuda.synchronize()
    got = [[float(x) for x in t.amax((1, 2, 3)).tolist()] for t in target]
    return want, got


def test_a_copy_in_flight_on_any_stream_is_never_overwritten(monkeypatch):
    want, got = copied_late(monkeypatch, "all streams")
    assert got == want


@pytest.mark.parametrize("guard", ["none", "current stream"])
def test_without_the_guard_it_is(monkeypatch, guard):
    """The test above can fail: with a weaker rule the same copies read what was written later."""
    want, got = copied_late(monkeypatch, guard)
    assert got != want


# Captures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["device", "pin_memory"])
def test_batches_may_be_taken_and_dropped_while_a_graph_is_captured(way):
    options = {"device": "cuda"} if way == "device" else {"pin_memory": True}
    iterator = iter(DataLoader(Images(80), batch_size=4, num_workers=2, **options))
    seen = [next(iterator)[1].tolist() for _ in range(3)]
    data = torch.zeros(8, device="cuda")
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        data + 1
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    inside = []
    with torch.cuda.graph(graph):
        data.add_(1)
        for _ in range(4):
            images, labels = next(iterator)
            inside.append(labels)
            del images, labels  # slots come back
        gc.collect()
        data.add_(1)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert data.tolist() == [4.0] * 8
    seen += [labels.tolist() for labels in inside]
    for images, label in iterator:
        assert torch.equal(images[:, 0, 0, 0].long(), label)
        seen.append(label.tolist())
    assert [x for part in seen for x in part] == list(range(80))


@pytest.mark.parametrize("own", [False, True], ids=["usual stream", "stream of its own"])
@pytest.mark.parametrize("way", ["device", "pin_memory"])
def test_a_capture_in_another_thread_is_not_spoilt(way, own):
    options = {"device": "cuda"} if way == "device" else {"pin_memory": True}
    iterator = iter(DataLoader(Images(400), batch_size=4, num_workers=2, **options))
    seen = next(iterator)[1].tolist()
    data = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    begun, done, errors = threading.Event(), threading.Event(), []
    stream = torch.cuda.Stream() if own else None

    def capture():
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                data.add_(1)
                begun.set()
                assert done.wait(30), "the main thread took no batches"
                data.add_(1)
            graph.replay()
        except Exception as error:
            errors.append(error)
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    assert begun.wait(30), "no capture began"
    taken = [next(iterator)[1] for _ in range(12)]
    done.set()
    thread.join(30)
    torch.cuda.synchronize()
    seen += [x for labels in taken for x in labels.tolist()]
    assert not errors and data.tolist() == [2.0] * 8
    for _, labels in iterator:
        seen += labels.tolist()
    assert seen == list(range(400))


# Limits and ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["device", "pin_memory"])
def test_memory_that_cuda_will_not_lock(way, monkeypatch):
    """A finding, once; and torch's own pinned copy."""
    options = {"device": "cuda"} if way == "device" else {"pin_memory": True}
    monkeypatch.setattr(gate(), "refused", None)
    monkeypatch.setattr("holdfast.loader.cuda_slots.Driver.register", lambda *a: "CUDA_ERROR_OUT_OF_MEMORY (2)")
    loader = DataLoader(Images(40), batch_size=4, num_workers=2, **options)
    batches = list(loader)
    assert labels_of(batches) == list(range(40))
    assert all(torch.equal(images[:, 0, 0, 0].long(), labels) for images, labels in batches)
    assert all(images.is_cuda or images.is_pinned() for images, _ in batches)
    assert [incident.finding for incident in loader.incidents] == ["memory-not-locked"]
    assert "RLIMIT_MEMLOCK" in str(loader.report())


@pytest.mark.parametrize("way", ["device", "pin_memory"])
def test_a_driver_that_cannot_mark_all_streams(way, monkeypatch):
    """torch's own pinned copy, without a word."""
    options = {"device": "cuda"} if way == "device" else {"pin_memory": True}
    monkeypatch.setattr(ferrying, "gate", lambda: None)
    batches = list(DataLoader(Images(40), batch_size=4, num_workers=2, **options))
    assert labels_of(batches) == list(range(40))
    assert all(torch.equal(images[:, 0, 0, 0].long(), labels) for images, labels in batches)
    assert all(images.is_cuda or images.is_pinned() for images, _ in batches)


@pytest.mark.parametrize("way", ["device", "pin_memory"])
def test_what_a_dropped_loader_had_registered_is_taken_back_by_the_next(way, monkeypatch):
    options = {"device": "cuda"} if way == "device" else {"pin_memory": True}
    calls = []
    for name in ("register", "unregister"):
        real = getattr(Driver, name)
        monkeypatch.setattr(Driver, name, lambda *a, real=real, name=name: calls.append(name) or real(*a))
    before = mappings()
    for batch in DataLoader(Images(80), batch_size=4, num_workers=2, **options):
        del batch
        break
    gc.collect()
    torch.cuda.synchronize()
    assert "register" in calls and "unregister" not in calls, "called outside of next()"
    assert mappings() > before, "unmapped while it was registered"
    for batch in DataLoader(Images(8), batch_size=4, num_workers=1, **options):
        torch.cuda.synchronize()
        del batch
    gc.collect()
    gate().step()
    gate().step()
    assert calls.count("register") == calls.count("unregister")
    assert mappings() == before


@pytest.mark.parametrize("way", ["device", "pin_memory"])
def test_a_forked_child_sees_registered_batches_unchanged(way):
    """Registered memory is still shared memory: a child has it, and may read it while the trainer goes on."""
    options = {"device": "cuda"} if way == "device" else {"pin_memory": True}
    collate = mixed if way == "device" else None
    dataset = Mixed() if way == "device" else Images(80)
    iterator = iter(DataLoader(dataset, batch_size=4, num_workers=1, collate_fn=collate, **options))
    batch = next(iterator)
    on_host = batch["large array"] if way == "device" else batch[0].numpy()
    want = on_host.copy()
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(tell)
        os.read(told, 1)
        os._exit(0 if np.array_equal(on_host, want) else 1)
    os.close(told)
    del batch, on_host
    for _ in range(4):
        next(iterator)
    os.close(tell)
    assert os.waitpid(pid, 0)[1] == 0


AFTER = """
import torch
from holdfast import DataLoader
from tests.process.data import Images
loader = DataLoader(Images(40), batch_size=4, num_workers=2, multiprocessing_context=METHOD, OPTIONS)
iterator = iter(loader)
assert not torch.cuda.is_initialized(), "the loader has initialised CUDA before it forked"
seen = [x for images, labels in iterator for x in labels.tolist()]
assert seen == list(range(40)), seen
assert torch.cuda.is_initialized()
seen = [x for images, labels in loader for x in labels.tolist()]
assert seen == list(range(40)), seen
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("options", ["device='cuda'", "pin_memory=True"])
def test_cuda_may_come_up_after_the_loader(method, options):
    """And before it, in the second epoch. Nothing is called at the end of the interpreter."""
    script = AFTER.replace("METHOD", repr(method)).replace("OPTIONS", options)
    if method == "spawn":
        script = "if __name__ == '__main__':\n" + "\n".join(f"    {line}" for line in script.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=os.getcwd(), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
