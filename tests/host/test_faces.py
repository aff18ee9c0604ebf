"""The loader and the pool on both hosts: what a user sees does not depend on who owns the processes."""

import os
import signal
import time
from itertools import chain

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from holdfast import DataLoader, Policy, Pool, SampleError, TaskLost, WorkerLost
from holdfast.core.host import HasPulses, KeepsJournals, KnowsMemory, LendsSlots
from holdfast.core.messages import Exited, Finished, Gone
from holdfast.errors import LoaderTorn, PoolBroken
from holdfast.loader.iterator import WorkerIterator
from holdfast.local.trainer.local_host import LocalHost
from holdfast.testing.socket_host import SocketHost
from tests.process.data import Images, Noise, Numbers


class LostResult:
    """Nobody can open it any more."""

    failed, worker = False, -1

    def open(self, *_, **__):
        raise AssertionError("it is gone")

    def discard(self):
        pass


def forgetful(maker, every=3):
    """A host that loses every third result after it was told, as a machine that is taken away does."""

    class Forgetful(maker):
        told = lost = 0

        def open(self):
            super().open()
            self.there = set()  # tasks that have a result

        def wait(self, timeout_s):
            return [event for told in super().wait(timeout_s) for event in self.forget(told)]

        def forget(self, event):
            """As it was told; or a result that cannot be opened, and word that it is lost."""
            if not isinstance(event, Finished):
                return [event]
            type(self).told += 1
            turn_has_come = self.there.issuperset(range(event.task))
            if turn_has_come or self.told % every:
                self.there.add(event.task)
                return [event]
            type(self).lost += 1
            event.result.discard()
            return [event._replace(result=LostResult()), Gone(event.task, event.bad)]

    return Forgetful


def blind(maker):
    """A host that does not know what a dead worker was on, as that of a cluster may not."""

    class Blind(maker):
        def wait(self, timeout_s):
            return [e._replace(on=None) if isinstance(e, Exited) else e for e in super().wait(timeout_s)]

    return Blind


@pytest.fixture(params=[LocalHost, SocketHost], ids=["local", "socket"])
def maker(request, monkeypatch):
    """All loaders and pools of this test have such hosts."""
    use(monkeypatch, request.param)
    return request.param


def use(monkeypatch, maker):
    monkeypatch.setattr(WorkerIterator, "_host_maker", maker)
    monkeypatch.setattr(Pool, "_host_maker", maker)


def numbers(loader):
    return [batch.tolist() for batch in loader]


BATCHES = [list(range(n, n + 4)) for n in range(0, 40, 4)]


class Deadly(Numbers):
    """One sample ends its worker each time."""

    def __init__(self, index):
        super().__init__()
        self.index = index

    def __getitem__(self, index):
        if index == self.index:
            os._exit(3)
        return index


class Raising(Numbers):
    def __getitem__(self, index):
        if index in (5, 6):
            raise ValueError(f"number {index}")
        return index


class Count(IterableDataset):
    """0, 1, 2, ... of each worker; kills itself once at some item."""

    def __init__(self, length=20, once=None):
        self.length, self.once = length, once

    def __iter__(self):
        worker = get_worker_info()
        for item in range(worker.id, self.length, worker.num_workers):
            if item == 11 and self.once is not None and not os.path.exists(self.once):
                open(self.once, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            yield item


def test_the_optional_abilities_are_declared():
    """The plain host has none of them, and every other test here passes on it."""
    abilities = (HasPulses, KeepsJournals, KnowsMemory, LendsSlots)
    made = [maker(1, 1, None, fork=True, sample_timeout=None, growth_bytes=None) for maker in (LocalHost, SocketHost)]
    assert [[isinstance(host, ability) for ability in abilities] for host in made] == [[True] * 4, [False] * 4]


def test_an_epoch(maker):
    for _ in range(2):
        assert numbers(DataLoader(Numbers(), batch_size=4, num_workers=3)) == BATCHES


def test_large_batches_can_be_kept_and_written(maker):
    kept = list(DataLoader(Images(16), batch_size=4, num_workers=2))
    for images, indices in kept:
        images.add_(1)
        assert torch.equal(images[:, 0, 0, 0], indices + 1.0)


def test_a_spawned_epoch(maker):
    loader = DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
    assert numbers(loader) == BATCHES


def test_any_order_gives_every_batch(maker):
    loader = DataLoader(Numbers(), batch_size=4, num_workers=3, in_order=False)
    assert sorted(numbers(loader)) == BATCHES


def test_persistent_workers_and_epochs_that_are_left(maker):
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, persistent_workers=True)
    for _, _batch in zip(range(3), loader, strict=False):
        pass
    pids = [worker.pid for worker in loader._iterator._workers]
    assert numbers(loader) == BATCHES
    assert [worker.pid for worker in loader._iterator._workers] == pids
    loader._iterator._shutdown_workers()


def test_seeds_do_not_depend_on_the_host(monkeypatch):
    """Nor on deaths: torch's, numpy's and Python's numbers are the same."""
    seen = []
    for maker in (LocalHost, SocketHost):
        use(monkeypatch, maker)
        torch.manual_seed(3)
        seen.append(list(DataLoader(Noise(24), batch_size=4, num_workers=2)))
    for ours, theirs in zip(*seen, strict=True):
        assert str(ours) == str(theirs)


def test_random_kills_cost_no_batch_and_change_no_number(maker, tmp_path):
    torch.manual_seed(3)
    calm = [str(batch) for batch in DataLoader(Noise(24), batch_size=4, num_workers=2)]
    torch.manual_seed(3)
    stormy = Noise(24, once=str(tmp_path), deadly=(3, 11, 17))
    assert [str(batch) for batch in DataLoader(stormy, batch_size=4, num_workers=2)] == calm
    assert len(os.listdir(tmp_path)) == 3


def test_results_that_are_lost_are_made_again(maker, monkeypatch):
    lossy = forgetful(maker)
    use(monkeypatch, lossy)
    limit = time.monotonic() + 60
    while not lossy.lost:  # an epoch whose results all come in their turn loses none
        assert time.monotonic() < limit, "no result came before its turn in a minute of epochs"
        assert numbers(DataLoader(Numbers(), batch_size=4, num_workers=3)) == BATCHES


def test_lost_results_charge_nobody(maker, monkeypatch):
    lossy = forgetful(maker, every=2)
    use(monkeypatch, lossy)
    loader = DataLoader(Raising(), batch_size=4, num_workers=3, policy=Policy(bad_sample="skip", max_bad=0.15))
    assert list(chain.from_iterable(numbers(loader))) == [n for n in range(40) if n not in (5, 6)]


def test_where_nobody_knows_what_a_worker_was_on_no_batch_is_lost(maker, monkeypatch, tmp_path):
    use(monkeypatch, blind(maker))
    loader = DataLoader(Noise(24, once=str(tmp_path), deadly=(3, 11, 17)), batch_size=4, num_workers=2)
    assert [int(index) for batch in loader for index in batch[:, 0]] == list(range(24))
    assert not loader.report().bad_samples


def test_where_nobody_knows_what_a_worker_was_on_poison_ends_the_run(maker, monkeypatch):
    """It blames no sample, and it is not tried for ever."""
    use(monkeypatch, blind(maker))
    loader = DataLoader(Deadly(9), batch_size=4, num_workers=2, policy=Policy(restarts=3))
    with pytest.raises(WorkerLost):
        numbers(loader)


def test_where_nobody_knows_what_a_worker_was_on_no_call_runs_twice(maker, monkeypatch, tmp_path):
    use(monkeypatch, blind(maker))
    for chunksize in (1, 10):
        folder = tmp_path / str(chunksize)
        folder.mkdir()
        with Pool(2) as pool:
            results = list(pool.map(noted, [str(folder)] * 20, range(20), chunksize=chunksize, return_exceptions=True))
        assert isinstance(results[5], TaskLost)
        assert results[10:] == [2 * n for n in range(10, 20)]
        assert {path.read_text() for path in folder.iterdir()} == {"ran\n"}


def test_a_sample_is_tried_again(maker, tmp_path):
    loader = DataLoader(Flaky(str(tmp_path)), batch_size=4, num_workers=2, policy=Policy(retries=2, retry_delay=0.01))
    assert numbers(loader) == BATCHES


class Flaky(Numbers):
    """Each fifth sample cannot be had at first."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __getitem__(self, index):
        path = os.path.join(self.folder, str(index))
        if index % 5 == 0 and not os.path.exists(path):
            open(path, "w").close()
            raise OSError("not yet")
        return index


def test_a_poison_sample_is_left_out(maker):
    loader = DataLoader(Deadly(9), batch_size=4, num_workers=2, policy=Policy(bad_sample="skip"))
    assert list(chain.from_iterable(numbers(loader))) == [n for n in range(40) if n != 9]
    assert [sample.index for sample in loader.report().bad_samples] == [9]


def test_a_poison_sample_is_raised_for(maker):
    loader = DataLoader(Deadly(9), batch_size=4, num_workers=2)
    with pytest.raises(WorkerLost, match="index 9"):
        numbers(loader)


def test_bad_samples_are_raised_skipped_and_replaced(maker):
    with pytest.raises(ValueError, match="number 5"):
        numbers(DataLoader(Raising(), batch_size=4, num_workers=2))
    skipped = DataLoader(Raising(), batch_size=4, num_workers=2, policy=Policy(bad_sample="skip"))
    assert numbers(skipped)[1] == [4, 7]
    replaced = DataLoader(Raising(), batch_size=4, num_workers=2, policy=Policy(bad_sample="replace"))
    assert [len(batch) for batch in numbers(replaced)] == [4] * 10


def test_a_hang_is_ended(maker):
    policy = Policy(sample_timeout=1.0, bad_sample="skip", strikes=1)
    loader = DataLoader(Sleeper(), batch_size=4, num_workers=2, policy=policy)
    assert list(chain.from_iterable(numbers(loader))) == [n for n in range(40) if n != 22]


class Sleeper(Numbers):
    def __getitem__(self, index):
        if index == 22:
            time.sleep(600.0)
        return index


def test_a_worker_that_cannot_start_ends_the_run(maker):
    def init(worker):
        raise KeyError("no licence")

    with pytest.raises(KeyError, match="no licence"):
        numbers(DataLoader(Numbers(), batch_size=4, num_workers=2, worker_init_fn=init))


def test_streams_go_on_where_a_worker_died(maker, tmp_path):
    calm = numbers(DataLoader(Count(), batch_size=4, num_workers=2))
    once = str(tmp_path / "once")
    assert numbers(DataLoader(Count(once=once), batch_size=4, num_workers=2)) == calm
    assert os.path.exists(once)


def test_workers_that_are_shut_down_are_missed(maker):
    iterator = iter(DataLoader(Numbers(), batch_size=4, num_workers=2))
    next(iterator)
    iterator._shutdown_workers()
    with pytest.raises(LoaderTorn):
        for _ in iterator:
            pass


# The pool ---------------------------------------------------------------------------------------------------------


def double(n):
    return 2 * n


def die_at(n, bad=5):
    if n == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * n


def once(path, n):
    """Ends its worker the first time."""
    if not os.path.exists(path):
        open(path, "w").close()
        os._exit(3)
    return n


def refuse():
    raise RuntimeError("not here")


def test_a_pool(maker):
    with Pool(3) as pool:
        assert list(pool.map(double, range(200))) == [2 * n for n in range(200)]
        assert list(pool.map(double, range(200), chunksize=16)) == [2 * n for n in range(200)]
        assert torch.equal(pool.submit(torch.ones, 1 << 20).result(), torch.ones(1 << 20))


def test_a_call_that_kills_its_worker_fails_alone(maker):
    with Pool(2) as pool:
        futures = [pool.submit(die_at, n) for n in range(10)]
        with pytest.raises(TaskLost, match="task 5"):
            futures[5].result()
        assert [f.result() for n, f in enumerate(futures) if n != 5] == [2 * n for n in range(10) if n != 5]


def test_an_item_that_kills_its_worker_fails_alone(maker):
    """Items that had begun are not run again, whatever became of their results, unless they may be."""
    with Pool(2, policy=Policy(retries=1)) as pool:
        results = list(pool.map(die_at, range(20), chunksize=10, return_exceptions=True))
        assert isinstance(results.pop(5), TaskLost)
        assert results == [2 * n for n in range(20) if n != 5]


def noted(folder, n):
    """Leaves word that it ran; one of them ends its worker."""
    with open(f"{folder}/{n}", "a") as file:
        file.write("ran\n")
    return die_at(n)


def test_no_item_runs_twice_that_may_not(maker, tmp_path):
    """Where a dead worker's results are lost with it, the items before the guilty one are lost, too."""
    with Pool(2) as pool:
        results = list(pool.map(noted, [str(tmp_path)] * 20, range(20), chunksize=10, return_exceptions=True))
    lost = [n for n, result in enumerate(results) if isinstance(result, TaskLost)]
    assert lost == ([5] if issubclass(maker, KeepsJournals) else [0, 1, 2, 3, 4, 5])
    assert {(tmp_path / str(n)).read_text() for n in range(20)} == {"ran\n"}


def test_a_lost_call_is_run_again_if_it_may_be(maker, tmp_path):
    with Pool(2, policy=Policy(retries=1)) as pool:
        assert pool.submit(once, str(tmp_path / "once"), 7).result() == 7


def test_a_call_that_takes_too_long_is_ended(maker):
    with Pool(2) as pool:
        with pytest.raises(TimeoutError):
            pool.submit_with(time.sleep, 600.0, timeout=1.0).result()
        assert pool.submit(double, 4).result() == 8


def test_workers_are_replaced_after_their_share(maker):
    with Pool(2, max_tasks_per_child=2) as pool:
        pids = [pool.submit(os.getpid).result() for _ in range(8)]
        assert len(set(pids)) >= 4


def test_a_pool_that_cannot_start_is_broken(maker):
    with Pool(2, initializer=refuse) as pool, pytest.raises(PoolBroken):
        pool.submit(double, 1).result()


def test_killing_a_pool_ends_what_runs(maker):
    pool = Pool(2)
    future = pool.submit(time.sleep, 600.0)
    while not future.running():
        time.sleep(0.01)
    pool.kill_workers()
    with pytest.raises(TaskLost):
        future.result()


def test_what_raises_in_a_call_comes_back_as_itself(maker):
    with Pool(1) as pool, pytest.raises(ValueError, match="invalid literal"):
        pool.submit(int, "x").result()
    with pytest.raises((SampleError, ValueError)):
        numbers(DataLoader(Raising(), batch_size=4, num_workers=1))
