"""The loader on real processes: what works with torch's loader works with ours."""

import copy
import gc
import multiprocessing
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, TensorDataset, get_worker_info

import holdfast
from holdfast import DataLoader, Policy
from holdfast.shm.slots import Slots

from ..conftest import METHODS, children
from .data import Epochs, Getitems, Images, Noise, Numbers, Reopens, Shared, Stream, flat


@pytest.mark.parametrize("method", METHODS)
def test_every_start_method_gives_every_sample_in_order(method):
    loader = DataLoader(Numbers(30), batch_size=4, num_workers=2, multiprocessing_context=method)
    assert flat(loader) == list(range(30))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_dataset_that_opens_files_in_setstate_has_its_own_in_each_worker(method, tmp_path):
    """Unpickled once and forked, the workers would share one file offset."""
    path = tmp_path / "numbers"
    path.write_bytes(b"".join(i.to_bytes(8, "little") for i in range(400)))
    dataset = Reopens(str(path), 400)
    loader = DataLoader(dataset, batch_size=8, num_workers=2, multiprocessing_context=method)
    assert flat(loader) == list(range(400))
    dataset.file.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_datasets_with_shared_things(method):
    """A multiprocessing Value and a shared tensor stay shared; a plain tensor arrives."""
    context = multiprocessing.get_context(method)
    dataset = Shared(context.Value("i", 0))
    loader = DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context=context)
    assert flat(loader) == [i * 1000 for i in range(8)]
    assert dataset.counter.value == 8
    assert dataset.shared.sum() == 8


def test_a_dataset_changed_between_epochs_takes_effect():
    dataset = Epochs()
    loader = DataLoader(dataset, batch_size=4, num_workers=2)
    assert flat(loader)[0] == 0
    dataset.epoch = 3
    assert flat(loader)[0] == 300


def test_epochs_that_are_left_at_once_do_not_pile_up():
    """Each asks for batches that a slow worker has not even looked at when the next one begins."""
    loader = DataLoader(Numbers(12, 0.05), batch_size=1, num_workers=2, persistent_workers=True)
    for _ in range(30):
        iter(loader)
    assert flat(loader) == list(range(12))


@pytest.mark.parametrize("in_order", [True, False])
def test_batches_that_were_ready_when_an_epoch_was_left_give_their_memory_back(in_order):
    loader = DataLoader(
        Images(24, 64), batch_size=2, num_workers=2, persistent_workers=True, prefetch_factor=4, in_order=in_order
    )
    for _ in range(25):
        iterator = iter(loader)
        next(iterator)
        while len(iterator._ready) < 3:  # finished, and nobody will take them
            iterator._supervisor.step(5)
    assert len(list(loader)) == 12
    assert loader.stats()["restarts"] == 0
    claimed = [sum(line.slots._states) for line in loader._iterator._host._channels]
    assert max(claimed) <= 4, claimed


def test_a_batch_stays_as_it_is_when_a_forked_child_drops_it():
    """Also when its loader has ended: its memory would be given back then."""
    for batch, _ in DataLoader(Images(4), batch_size=4, num_workers=1):
        kept = batch
    del batch
    pid = os.fork()
    if pid == 0:
        del kept
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert kept[3, 0, 0, 0] == 3


class Fat:
    """Its bytes travel out of band, and are copied when it is rebuilt: nothing looks at the slot afterwards."""

    def __init__(self, data):
        self.data = bytes(data)

    def __reduce_ex__(self, protocol):
        return Fat, (pickle.PickleBuffer(self.data),)


class Fats(Numbers):
    def __getitem__(self, index):
        return Fat(bytes([index % 256]) * (1 << 19))


def test_a_slot_is_freed_once(monkeypatch):
    """Its last view may be gone before the batch is whole: freed twice, it would be written over."""
    freed = []
    put_back = Slots.put_back
    monkeypatch.setattr(Slots, "put_back", lambda self, slot: (freed.append(slot), put_back(self, slot))[1])
    loader = DataLoader(Fats(20), batch_size=None, num_workers=1)
    assert [fat.data[:1] for fat in loader] == [bytes([i]) for i in range(20)]
    assert len(freed) == 20


def test_a_kept_batch_costs_no_descriptor_per_epoch():
    """Each new iterator forks, and each fork must know what was lent."""
    loader = DataLoader(Images(4), batch_size=4, num_workers=1)
    kept = next(iter(loader))[0]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(12):
        next(iter(loader))
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert kept[3, 0, 0, 0] == 3


class OddShape:
    shape = 3


class OddShapes(Numbers):
    def __getitem__(self, index):
        return OddShape()


class ManyShared(Numbers):
    """More shared tensors than a fork server takes descriptors."""

    def __init__(self):
        super().__init__(300)
        self.tensors = [torch.tensor(float(i)).share_memory_() for i in range(300)]

    def __getitem__(self, index):
        return self.tensors[index]


def test_an_error_of_collate_is_the_users_whatever_the_samples_are():
    with pytest.raises(TypeError, match="default_collate"):
        next(iter(DataLoader(OddShapes(4), batch_size=4, num_workers=1)))


def test_a_dataset_of_many_shared_tensors_can_be_spawned():
    loader = DataLoader(ManyShared(), batch_size=50, num_workers=1, multiprocessing_context="spawn")
    assert flat(loader) == list(range(300))


class Surrounded(Numbers):
    """Tells what it finds around it."""

    def __getitem__(self, index):
        print(f"sample {index}", flush=True)
        return os.environ.get("AROUND"), len(os.sched_getaffinity(0)), resource.getrlimit(resource.RLIMIT_CORE)[0]


def test_a_spawned_worker_has_what_the_trainer_has_now(monkeypatch, capfd):
    """Its interpreter may be older than these."""
    loader = DataLoader(Surrounded(1), batch_size=None, num_workers=1, multiprocessing_context="spawn")
    processors, (soft, hard) = os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_CORE)
    list(loader)
    monkeypatch.setenv("AROUND", "here")
    try:
        os.sched_setaffinity(0, [min(processors)])
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
        assert [tuple(sample) for sample in loader] == [("here", 1, 0)]
    finally:
        os.sched_setaffinity(0, processors)
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    assert capfd.readouterr().out.count("sample 0") == 2


def test_persistent_workers_are_kept():
    loader = DataLoader(Numbers(12), batch_size=2, num_workers=2, persistent_workers=True)
    assert flat(loader) == list(range(12))
    pids = [w.pid for w in loader._iterator._workers]
    assert flat(loader) == list(range(12))
    assert [w.pid for w in loader._iterator._workers] == pids


def test_persistent_workers_after_a_break():
    """What was asked for and not taken is abandoned; the next epoch is whole."""
    loader = DataLoader(Numbers(40, 0.001), batch_size=2, num_workers=2, persistent_workers=True)
    for epoch in range(4):
        for i, _ in enumerate(loader):
            if i == epoch:
                break
    assert flat(loader) == list(range(40))


def test_persistent_workers_survive_a_death_in_one_epoch():
    loader = DataLoader(Numbers(40, 0.001), batch_size=2, num_workers=2, persistent_workers=True)
    assert len(flat(loader)) == 40
    os.kill(loader._iterator._workers[0].pid, signal.SIGKILL)
    assert flat(loader) == list(range(40))
    assert flat(loader) == list(range(40))


def test_two_iterators_at_once():
    loader = DataLoader(Numbers(20), batch_size=2, num_workers=2)
    pairs = zip(loader, loader, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_in_a_thread():
    loader = DataLoader(Numbers(40, 0.001), batch_size=4, num_workers=2)
    got = []

    def work():
        iterator = iter(loader)
        for i, batch in enumerate(iterator):
            got.extend(batch.tolist())
            if i == 2:
                os.kill(iterator._workers[0].pid, signal.SIGKILL)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert got == list(range(40))


def test_break_ends_all_processes_at_once():
    """Not when the garbage collector comes round."""
    gc.disable()
    try:
        loader = DataLoader(Numbers(1000, 0.01), batch_size=4, num_workers=2)
        before = children()
        for _ in loader:
            break
        assert children() == before
    finally:
        gc.enable()


def test_an_exception_in_the_loop_ends_all_processes():
    loader = DataLoader(Numbers(1000, 0.01), batch_size=4, num_workers=2)
    try:
        for _ in loader:
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    gc.collect()


def test_iterable_datasets():
    loader = DataLoader(Stream(41), batch_size=4, num_workers=2)
    expected = list(torch.utils.data.DataLoader(Stream(41), batch_size=4, num_workers=2))
    assert [b.tolist() for b in loader] == [b.tolist() for b in expected]


def test_iterable_batch_size_none_and_persistent():
    loader = DataLoader(Stream(11), batch_size=None, num_workers=3, persistent_workers=True)
    for _ in range(3):
        assert sorted(flat(loader)) == list(range(11))


@pytest.mark.parametrize("workers", [0, 2])
def test_batch_size_none(workers):
    loader = DataLoader(Numbers(7), batch_size=None, num_workers=workers)
    assert list(loader) == list(range(7))


@pytest.mark.parametrize("workers", [0, 2])
def test_samplers(workers):
    sampler = BatchSampler(RandomSampler(Numbers(20), generator=torch.Generator().manual_seed(3)), 3, True)
    got = [b.tolist() for b in DataLoader(Numbers(20), batch_sampler=sampler, num_workers=workers)]
    sampler = BatchSampler(RandomSampler(Numbers(20), generator=torch.Generator().manual_seed(3)), 3, True)
    assert got == [list(b) for b in sampler]


def test_the_sampler_is_not_drawn_further_than_torch_draws_it():
    drawn = []

    class Counting:
        def __iter__(self):
            for i in range(40):
                drawn.append(i)
                yield i

        def __len__(self):
            return 40

    counts = {}
    for kind in (torch.utils.data.DataLoader, DataLoader):
        drawn.clear()
        loader = kind(Numbers(40), sampler=Counting(), num_workers=2, prefetch_factor=3)
        iterator = iter(loader)
        counts[kind] = [len(drawn)]
        for _ in range(10):
            next(iterator)
            counts[kind].append(len(drawn))
        del iterator
    theirs, ours = counts.values()
    assert all(a <= b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


def test_in_order_false_gives_each_once():
    loader = DataLoader(Numbers(60, 0.001), batch_size=3, num_workers=3, in_order=False)
    assert sorted(flat(loader)) == list(range(60))


def test_a_death_is_noticed_while_the_others_keep_the_trainer_busy():
    """in_order=False, and a trainer slower than the workers: there is always a batch ready."""
    loader = DataLoader(Numbers(800), batch_size=8, num_workers=2, in_order=False)
    iterator = iter(loader)
    noticed = None
    for step, _ in enumerate(iterator):
        time.sleep(0.01)
        if step == 10:
            os.kill(iterator._workers[0].pid, signal.SIGKILL)
        if noticed is None and loader.stats()["restarts"]:
            noticed = step
    assert noticed is not None and noticed < 40


def test_getitems():
    assert flat(DataLoader(Getitems(), batch_size=5, num_workers=2)) == list(range(24))


def test_a_failing_getitems_is_tried_one_by_one():
    loader = DataLoader(Getitems(bad=7), batch_size=5, num_workers=2, policy=Policy(bad_sample="skip"))
    assert flat(loader) == [i for i in range(24) if i != 7]
    assert [b.index for b in loader.report().bad_samples] == [7]


def test_a_death_in_getitems_is_found():
    policy = Policy(bad_sample="skip")
    loader = DataLoader(Getitems(bad=7, how="kill"), batch_size=5, num_workers=2, policy=policy)
    assert flat(loader) == [i for i in range(24) if i != 7]


def test_worker_info_and_init():
    class Info(Numbers):
        def __getitem__(self, index):
            info = get_worker_info()
            assert info.dataset is self and info.num_workers == 2
            return info.id, info.seed, torch.get_num_threads(), self.marked

    def init(worker):
        get_worker_info().dataset.marked = worker + 10

    loader = DataLoader(Info(8), batch_size=None, num_workers=2, worker_init_fn=init)
    seen = {tuple(int(x) for x in item) for item in loader}
    assert {(w, m) for w, _, _, m in seen} == {(0, 10), (1, 11)}
    seeds = {w: seed for w, seed, _, _ in seen}
    assert seeds[1] == seeds[0] + 1
    assert {threads for _, _, threads, _ in seen} == {1}


def test_custom_collate_and_its_state():
    """A collate_fn that keeps what it made must not see it change."""

    class Keeping:
        last = None

        def __call__(self, samples):
            made = torch.utils.data.default_collate(samples)
            before = -1.0 if self.last is None else float(self.last[0, 0, 0, 0])
            self.last = made[0]
            return made[0].clone(), before

    loader = DataLoader(Images(24), batch_size=4, num_workers=1, collate_fn=Keeping())
    firsts = [(float(image[0, 0, 0, 0]), before) for image, before in loader]
    assert [b for _, b in firsts] == [-1.0, *(f for f, _ in firsts[:-1])]


def test_the_trainers_generators_are_left_alone_and_the_base_seed_is_torchs():
    states = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        torch.manual_seed(5)
        list(kind(Numbers(8), num_workers=2, shuffle=True))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_the_order_of_a_shuffle_is_torchs():
    orders = []
    for kind in (torch.utils.data.DataLoader, DataLoader):
        torch.manual_seed(5)
        orders.append(flat(kind(Numbers(50), num_workers=2, shuffle=True, batch_size=7)))
    assert orders[0] == orders[1]


def test_same_bytes_with_any_number_of_workers_with_kills_and_retries(tmp_path):
    """Random numbers depend on (base seed, batch) alone."""
    runs = []
    for workers, deadly in [(1, ()), (2, ()), (4, ()), (2, (5, 17, 30)), (4, (4, 8, 33))]:
        once = tmp_path / f"{workers}{deadly}"
        once.mkdir()
        torch.manual_seed(11)
        policy = Policy(retries=2, retry_delay=0.001)
        loader = DataLoader(Noise(48, str(once), deadly), batch_size=6, num_workers=workers, policy=policy)
        runs.append(torch.cat(list(loader)))
        assert loader.stats()["restarts"] == sum(i % 2 for i in deadly)
    assert all(torch.equal(runs[0], run) for run in runs[1:])
    assert len({tuple(row) for row in runs[0][:, 1:].tolist()}) == 48


def test_num_workers_zero_never_touches_the_generators():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    ours = torch.cat(list(DataLoader(Noise(12), batch_size=4)))
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    theirs = torch.cat(list(torch.utils.data.DataLoader(Noise(12), batch_size=4)))
    assert torch.equal(ours, theirs)


# Memory --------------------------------------------------------------------------------------------------------------


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
    from holdfast.local.trainer import worker_channel as host

    before = host.stride_for
    host.stride_for = lambda slots: 1 << 20
    try:
        kept = list(DataLoader(Images(12), batch_size=4, num_workers=2))
    finally:
        host.stride_for = before
    for i, (images, labels) in enumerate(kept):
        assert labels.tolist() == list(range(4 * i, 4 * i + 4))
        assert all((images[j] == float(labels[j])).all() for j in range(4))


CHILD = """
import resource, sys, torch, holdfast
sys.path.insert(0, {root!r})
from tests.process.data import *
{body}
"""


def run_child(body, *, prefix=(), timeout=90):
    import pathlib

    root = str(pathlib.Path(__file__).parents[2])
    code = CHILD.format(root=root, body=body)
    return subprocess.run(
        [*prefix, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        start_new_session=True,
        check=False,
    )


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


# Ends ----------------------------------------------------------------------------------------------------------------


def descendants_by_name(marker):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if marker.encode() in file.read():
                    found.append(int(pid))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("method", METHODS)
def test_no_process_outlives_a_killed_trainer(method):
    """One second after SIGKILL of the trainer, nothing of it is left."""
    marker = f"HOLDFAST_TEST_MARK={os.getpid()}-{method}-{time.monotonic_ns()}"
    body = f"""
if __name__ == "__main__":
    loader = holdfast.DataLoader(Numbers(10000, 0.05), batch_size=4, num_workers=2, multiprocessing_context={method!r})
    for i, _ in enumerate(loader):
        if i == 0: print("going", flush=True)
"""
    import pathlib

    root = str(pathlib.Path(__file__).parents[2])
    env = {**os.environ, marker.split("=", maxsplit=1)[0]: marker.split("=")[1]}
    trainer = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(root=root, body=body)],
        stdout=subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
    assert trainer.stdout.readline() == b"going\n"
    assert len(descendants_by_name(marker)) >= 4
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    deadline = time.monotonic() + (1.0 if method == "fork" else 3.0)
    while time.monotonic() < deadline and descendants_by_name(marker):
        time.sleep(0.05)
    left = [
        p for p in descendants_by_name(marker) if b"resource_tracker" not in open(f"/proc/{p}/cmdline", "rb").read()
    ]
    assert not left


@pytest.mark.parametrize(
    "end",
    ["pass", "raise SystemExit(3)", "1/0", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"],
    ids=["end", "exit", "error", "ctrl-c"],
)
def test_the_interpreters_end_is_quiet_and_quick(end):
    """An iterator left open at exit: no hang, no traceback but the user's own."""
    body = f"""
loader = holdfast.DataLoader(Numbers(10000, 0.01), batch_size=4, num_workers=2, persistent_workers=True)
iterator = iter(loader)
next(iterator)
{end}
"""
    began = time.monotonic()
    done = run_child(body)
    assert time.monotonic() - began < 30
    expected = {"pass": 0, "raise SystemExit(3)": 3, "1/0": 1}.get(end, -signal.SIGINT)
    assert done.returncode == expected, done.stderr
    assert done.stderr.count("Traceback") == (0 if end in ("pass", "raise SystemExit(3)") else 1), done.stderr


def test_ctrl_c_in_the_whole_group_stops_the_trainer_alone():
    """The terminal signals everybody; workers note it and make no noise."""
    body = """
loader = holdfast.DataLoader(Numbers(10000, 0.01), batch_size=4, num_workers=2)
for i, _ in enumerate(loader):
    if i == 2: print("going", flush=True)
"""
    import pathlib

    root = str(pathlib.Path(__file__).parents[2])
    trainer = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(root=root, body=body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert trainer.stdout.readline() == "going\n"
    os.killpg(trainer.pid, signal.SIGINT)
    _, err = trainer.communicate(timeout=30)
    assert err.count("Traceback") == 1 and "KeyboardInterrupt" in err, err


def test_an_interrupt_in_next_leaves_a_usable_iterator():
    """Ctrl-C while waiting; the user catches it and goes on: nothing is lost."""
    loader = DataLoader(Numbers(24, 0.02), batch_size=4, num_workers=2)
    iterator = iter(loader)
    got = []
    interrupts = 0
    for _ in range(3):
        threading.Timer(0.02, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start()
        try:
            got += next(iterator).tolist()
            time.sleep(0.1)
        except KeyboardInterrupt:
            interrupts += 1
    for batch in iterator:
        got += batch.tolist()
    assert interrupts >= 1
    assert got == list(range(24))


def test_timeout_is_torchs():
    loader = DataLoader(Numbers(8, 5.0), num_workers=2, timeout=1)
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 1 seconds"):
        next(iter(loader))


# Third parties -------------------------------------------------------------------------------------------------------


def test_lightning_can_rebuild_it():
    """`type(loader)(**kwargs)` from public attributes that are also parameters."""
    import inspect

    policy = Policy(bad_sample="skip", retries=2)
    loader = DataLoader(Numbers(8), batch_size=2, num_workers="auto", policy=policy)
    names = set(inspect.signature(DataLoader.__init__).parameters) - {"self"}
    kwargs = {k: v for k, v in vars(loader).items() if not k.startswith("_") and k in names}
    kwargs["multiprocessing_context"] = loader.multiprocessing_context
    kwargs |= {"batch_size": 1, "sampler": None, "drop_last": False}
    again = type(loader)(**kwargs)
    assert again.policy == loader.policy and again.policy.auto_workers and again.policy.retries == 2
    assert isinstance(again.num_workers, int) and again.num_workers >= 1
    assert flat(again) == list(range(8))


def test_attributes_that_others_use():
    loader = DataLoader(Numbers(8), batch_size=2, num_workers=2, persistent_workers=True)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert DataLoader[int] is not None
    assert loader._auto_collation and loader._index_sampler is loader.batch_sampler and loader._dataset_kind == 0
    iterator = iter(loader)
    next(iterator)
    assert loader._iterator is iterator and len(iterator) == 4
    worker = iterator._workers[0]
    assert worker.pid > 0 and worker.is_alive() and worker.exitcode is None
    iterator._shutdown_workers()
    worker.join(5)
    assert not worker.is_alive()
    with pytest.raises(NotImplementedError):
        pickle.dumps(iterator)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_in_use_can_be_copied(persistent):
    """Frameworks copy loaders, and spawned ranks get them pickled; the workers stay with the one that has them."""
    loader = DataLoader(Numbers(40), batch_size=4, num_workers=2, persistent_workers=persistent)
    batches = iter(loader)
    next(batches)
    copies = [copy.copy(loader)]
    if not persistent:  # one that holds its iterator cannot be pickled; nor can torch's
        copies += [copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
    flat(batches)
    for made in copies:
        assert flat(made) == list(range(40))
        assert sum(row["samples"] for row in made.stats()["per_worker"]) >= 40


def test_a_collate_that_gives_none_after_a_retry(tmp_path):
    """None is a batch like any other, also where a sample was loaded at its second attempt."""
    loader = DataLoader(
        Shaky(tmp_path), batch_size=2, num_workers=1, collate_fn=nothing, policy=Policy(retries=1, retry_delay=0.01)
    )
    assert list(loader) == [None, None, None]
    assert loader.stats()["retries"] == 1


class Shaky(Numbers):
    """Sample 2 raises once."""

    def __init__(self, folder):
        super().__init__(6)
        self.mark = folder / "raised"

    def __getitem__(self, index):
        if index == 2 and not self.mark.exists():
            self.mark.touch()
            raise OSError("once")
        return index


def nothing(samples):
    return None


def test_torchs_own_checks_stand():
    for wrong in (
        {"num_workers": -1},
        {"num_workers": "many"},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"num_workers": 2, "prefetch_factor": 0},
        {"persistent_workers": True},
        {"shuffle": True, "sampler": [1]},
        {"batch_size": 2, "batch_sampler": [[1]]},
    ):
        with pytest.raises(ValueError):
            DataLoader(Numbers(8), **wrong)
    with pytest.raises(TypeError, match=r"holdfast\.Policy"):
        DataLoader(Numbers(8), policy="skip")
    with pytest.raises(ValueError, match="map-style"):
        DataLoader(Stream(8), policy=Policy(bad_sample="replace"))


def test_it_is_subclassed_and_tensordatasets_work():
    class Mine(holdfast.DataLoader):
        pass

    data = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    assert [b[1].tolist() for b in Mine(data, batch_size=5, num_workers=1)] == [[0, 2, 4, 6, 8], [10, 12, 14, 16, 18]]


def test_a_worker_may_have_children_that_can_be_terminated():
    """Signals that workers note do not reach the programs that the dataset starts."""

    class Starts(Numbers):
        def __getitem__(self, index):
            process = subprocess.Popen(["sleep", "30"])
            process.terminate()
            code = process.wait(5)
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
            child.start()
            child.terminate()
            child.join(5)
            return code, child.exitcode

    loader = DataLoader(Starts(2), batch_size=None, num_workers=1)
    assert [tuple(map(int, pair)) for pair in loader] == [(-15, -15)] * 2


class Leaving:
    """Cannot be pickled: it tries to end whoever does."""

    def __reduce__(self):
        raise SystemExit("in __reduce__")


class DeadlyOnce(Numbers):
    """Ends its process at index 2, the first time."""

    def __init__(self, flag):
        super().__init__(4)
        self.flag = flag

    def __getitem__(self, index):
        if index == 2 and not self.flag.exists():
            self.flag.touch()
            os._exit(1)
        return Leaving()


def how_many(samples):
    return torch.tensor(len(samples))


def test_samples_that_cannot_be_pickled_are_loaded_again_all_the_same(tmp_path):
    """The second attempt at a batch keeps what it has loaded, for a third; what cannot be kept is no fault."""
    loader = DataLoader(DeadlyOnce(tmp_path / "died"), batch_size=4, num_workers=1, collate_fn=how_many)
    assert [int(batch) for batch in loader] == [4]
    assert loader.stats()["restarts"] == 1
