"""What is closed is never used again: other files have its numbers now, and they stay as they are."""

import copy
import gc
import os
import pickle
import signal
from contextlib import suppress
from functools import partial

import pytest

from holdfast import DataLoader, LoaderTorn, Pool
from holdfast.errors import HoldfastError, PoolBroken

from ..conftest import until
from .data import Numbers
from .streams import GoesOn, Stays


class Strangers:
    """Files of somebody else, which take every free number: pipes that hold a word, and have room for more."""

    def __init__(self, count=64):
        self.pipes = []
        self.count = count

    def arrive(self):
        for number in range(self.count):
            read, write = os.pipe()
            os.write(write, b"word %d" % number)
            os.set_blocking(read, False)
            self.pipes.append((read, write))

    def leave(self):
        """Nobody has read them, written to them or closed them."""
        found = []
        for read, write in self.pipes:
            try:
                found.append(os.read(read, 1000))
                os.close(read)
                os.close(write)
            except OSError as error:
                found.append(error)
        expected = [b"word %d" % number for number in range(len(self.pipes))]
        self.pipes = []
        assert found == expected


@pytest.fixture
def strangers():
    there = Strangers()
    yield there
    for pipe in there.pipes:
        for fd in pipe:
            os.close(fd)


class FailsOnce:
    """A worker_init_fn that raises the first time."""

    def __init__(self, directory):
        self.mark = os.path.join(directory, "raised")

    def __call__(self, worker):
        if worker == 0 and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            raise ConnectionError("the service is not up yet")


@pytest.mark.parametrize("kind", [Numbers, GoesOn])
@pytest.mark.parametrize("how", ["iterated", "left at once"])
def test_an_epoch_after_a_fatal_stop_has_new_workers(kind, how, strangers, tmp_path):
    """Persistent workers of which one could not start: torch recovers in the next epoch, and so do we."""
    init = FailsOnce(str(tmp_path))
    loader = DataLoader(kind(24), batch_size=4, num_workers=2, persistent_workers=True, worker_init_fn=init)
    if how == "iterated":
        with pytest.raises(ConnectionError, match="not up yet"):
            list(loader)
    else:
        iterator = iter(loader)
        until(lambda: os.path.exists(init.mark), "no worker has started", 30)
        del iterator
        if kind is Numbers:  # nobody has asked yet whether all is well
            with pytest.raises(ConnectionError, match="not up yet"):
                list(loader)
    strangers.arrive()
    for _ in range(2):
        assert sorted(x for batch in loader for x in batch.tolist()) == list(range(24))
    assert [incident.finding for incident in loader.incidents] == ["worker-init-raised"]
    loader._iterator._shutdown_workers()
    strangers.leave()


def use_everything(loader):
    """Whatever is public, and what third parties use."""
    iterator = loader._iterator
    loader.report().to_json()
    str(loader.report())
    loader.stats()
    copy.copy(loader)
    for handle in iterator._workers:
        assert handle.pid is None and not handle.is_alive()
        handle.terminate()
        handle.join(1)
        assert handle.exitcode is not None
    assert iterator._workers_status == [False, False]
    iterator._shutdown_workers()
    with pytest.raises(NotImplementedError):  # it holds its iterator; nor can torch's be pickled
        pickle.dumps(loader)
    gc.collect()


@pytest.mark.parametrize("kind", [Numbers, Stays])
@pytest.mark.parametrize("batches", [0, 1, 5])
def test_a_loader_that_was_shut_down_uses_none_of_its_old_numbers(kind, batches, strangers):
    """Also in the middle of an epoch: what is ready may come, then an error says what happened; iter() begins anew."""
    loader = DataLoader(kind(80, 0.0005), batch_size=4, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    iterator._shutdown_workers()
    strangers.arrive()
    use_everything(loader)
    with pytest.raises(LoaderTorn, match="were shut down"):
        list(iterator)
    use_everything(loader)
    assert sorted(x for batch in loader for x in batch.tolist()) == list(range(80))
    loader._iterator._shutdown_workers()
    with pytest.raises(StopIteration):
        next(loader._iterator)
    use_everything(loader)
    del loader, iterator
    gc.collect()
    strangers.leave()


def test_a_worker_that_is_killed_after_the_keeper_leaves_no_old_number_in_use(strangers):
    """A new keeper's socket has another number than the old one's, which somebody else has now."""
    loader = DataLoader(Numbers(60, 0.005), batch_size=2, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    os.kill(iterator._host.keeper_pid, signal.SIGKILL)
    strangers.arrive()
    assert len(list(iterator)) == 29
    os.kill(iterator._host.keeper_pid, signal.SIGKILL)
    assert len(list(loader)) == 30
    iterator._shutdown_workers()
    strangers.leave()


def refuses():
    raise ValueError("no licence")


@pytest.mark.parametrize("end", ["shutdown", "kill", "broken"])
def test_a_pool_that_has_ended_uses_none_of_its_old_numbers(end, strangers):
    """submit, map, shutdown, kill_workers and what others look at."""
    pool = Pool(2, initializer=refuses if end == "broken" else None)
    if end == "broken":
        with pytest.raises(PoolBroken, match="no licence"):
            pool.submit(abs, -1).result(60)
        pool._dispatcher.join()
    else:
        assert pool.submit(abs, -1).result(60) == 1
        pool.shutdown() if end == "shutdown" else pool.kill_workers()
    strangers.arrive()
    for _ in range(2):
        for use in (partial(pool.submit, abs, -2), partial(pool.map, abs, [-1, -2]), pool._dispatcher.kill):
            with suppress(RuntimeError, HoldfastError):
                use()
        assert all(not handle.is_alive() for handle in pool._processes.values())
        pool.stats()
        str(pool.report())
        pool._dispatcher._host.ring()
        pool.shutdown(wait=True, cancel_futures=True)
        pool.kill_workers()
    del pool
    gc.collect()
    strangers.leave()
