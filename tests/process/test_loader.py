"""The loader on real processes: what works with torch's loader works with ours."""

import gc
import multiprocessing
import os
import pickle
import random
import resource
import signal
import threading
import time

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, get_worker_info

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
