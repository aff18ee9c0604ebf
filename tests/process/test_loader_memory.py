"""Memory of a loader: batches that are kept, or large, or where the system gives little."""

import gc
import os
import time

import pytest
import torch

from holdfast import DataLoader

from .data import Images
from .scripts import run_child


def test_kept_batches_never_change():
    """All of them, slices of them, and in a child that is forked meanwhile."""
    loader = DataLoader(Images(160), batch_size=2, num_workers=2)
    kept = []
    for images, labels in loader:
        kept.append((images[1, :, ::2], labels))
    for images, labels in kept:
        assert (images == float(labels[1])).all()


def test_a_forked_child_sees_its_batch_unchanged():
    loader = DataLoader(Images(120), batch_size=2, num_workers=2)
    iterator = iter(loader)
    children = []
    for _ in range(6):
        images, labels = next(iterator)
        # numpy, because torch's OpenMP threads do not live on in a forked child
        array, first = images.numpy(), int(labels[0])
        pid = os.fork()
        if pid == 0:
            ok = True
            for _ in range(20):
                time.sleep(0.02)
                ok = ok and bool((array[0] == first).all()) and bool((array[1] == first + 1).all())
            os._exit(0 if ok else 1)
        del array
        children.append(pid)
        del images, labels
    rest = sum(1 for _ in iterator)
    assert rest == 54
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 6


def test_labels_alone_keep_only_labels():
    """A kept label does not hold on to its batch."""
    loader = DataLoader(Images(80), batch_size=4, num_workers=2)
    iterator = iter(loader)
    labels = [next(iterator)[1] for _ in range(10)]
    slots = [line.slots for line in iterator._host._channels]
    gc.collect()
    [s._reclaim() for s in slots]
    assert not any(s.lent for s in slots)
    assert torch.cat(labels).tolist() == list(range(40))


def test_batches_larger_than_a_slot():
    """They get a file of their own."""
    from holdfast.shm import memory_file

    before = memory_file.stride_for
    memory_file.stride_for = lambda slots: 1 << 20
    try:
        kept = list(DataLoader(Images(12), batch_size=4, num_workers=2))
    finally:
        memory_file.stride_for = before
    for i, (images, labels) in enumerate(kept):
        assert labels.tolist() == list(range(4 * i, 4 * i + 4))
        assert all((images[j] == float(labels[j])).all() for j in range(4))


def test_few_descriptors_and_all_batches_kept():
    """nofile 256, a consumer that keeps every batch of 40 tensors."""
    body = """
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
class Forty(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, i): return {str(k): torch.full((8,), i) for k in range(40)}
kept = list(holdfast.DataLoader(Forty(), batch_size=4, num_workers=2))
assert len(kept) == 100 and all(b["39"][3, 0] == 4 * i + 3 for i, b in enumerate(kept))
print("fine")
"""
    done = run_child(body)
    assert done.stdout == "fine\n", done.stderr


def test_a_small_address_space_or_file_size_still_works():
    """RLIMIT_FSIZE and RLIMIT_AS forbid the sparse stride; smaller files do."""
    for limit in ("resource.RLIMIT_FSIZE, (64 << 20, 64 << 20)", "resource.RLIMIT_AS, (24 << 30, 24 << 30)"):
        body = f"""
resource.setrlimit({limit})
for i, (images, labels) in enumerate(holdfast.DataLoader(Images(24), batch_size=8, num_workers=2)):
    assert (images[7] == float(8 * i + 7)).all()
print("fine")
"""
        done = run_child(body)
        assert done.stdout == "fine\n", (limit, done.stderr)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount namespace")
def test_a_small_dev_shm_is_not_used():
    """16 MB of /dev/shm, 24 MB batches."""
    body = """
for i, (images, labels) in enumerate(holdfast.DataLoader(Images(64), batch_size=32, num_workers=2)):
    assert (images[31] == float(32 * i + 31)).all()
import os
assert not os.listdir("/dev/shm")
print("fine")
"""
    script = 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"'
    done = run_child(body, prefix=("unshare", "-m", "sh", "-c", script, "sh"))
    assert done.stdout == "fine\n", done.stderr
