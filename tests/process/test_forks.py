"""A child that the trainer forks has no part in what it inherits: it can damage nothing, and is told so."""

import concurrent.futures
import gc
import multiprocessing
import os
import pickle
import select
import signal
import threading

import pytest
from torch.utils.data import Dataset

import holdfast
from holdfast import CachedDataset, DataLoader, FileCache, Pool
from holdfast.errors import WrongProcess
from holdfast.local.protocol.pulse import FLOOR, WANTED
from tests.conftest import METHODS
from tests.process import calls, ranks
from tests.process.data import Images, Numbers

# Newer Pythons warn of each fork of a process with threads, and a pool has one.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
# A child that says nothing for this long hangs.
PATIENCE_S = 60


class Child:
    """A fork of this process that does something; what came of it: a result, or an exception."""

    def __init__(self, do):
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            try:
                said = do()
            except BaseException as error:
                said = error
            try:
                with os.fdopen(writing, "wb") as to:
                    to.write(pickle.dumps(said))
            finally:
                os._exit(0)
        os.close(writing)
        self._reading = reading

    def said(self):
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        silent = not poll.poll(PATIENCE_S * 1000)
        if silent:
            os.kill(self.pid, signal.SIGKILL)
        with os.fdopen(self._reading, "rb") as words:
            data = words.read()
        os.waitpid(self.pid, 0)
        assert not silent, "the child hangs"
        return pickle.loads(data)


def firsts(batches):
    """The first number of each batch of images; each image is full of its own."""
    found = []
    for images, labels in batches:
        array = images.numpy()
        found.append(int(labels[0]))
        assert all((array[i] == labels[i].item()).all() for i in range(len(labels))), found[-1]
    return found


# Loaders -------------------------------------------------------------------------------------------------------------


def take_next(loader, iterator):
    return firsts([next(iterator)])


def go_on(loader, iterator):
    return firsts(iterator)


def begin_again(loader, iterator):
    return firsts(loader)


def reset(loader, iterator):
    iterator._reset(loader)


def shut_down(loader, iterator):
    iterator._shutdown_workers()


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("use", [take_next, go_on, reset])
def test_a_child_that_uses_an_inherited_iterator_is_told_so(use, persistent):
    """And the parent gets every batch as it is."""
    loader = DataLoader(Images(160, 128), batch_size=4, num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    found = firsts(next(iterator) for _ in range(5))
    held = next(iterator)
    found.append(int(held[1][0]))
    for _ in range(3):
        error = Child(lambda: use(loader, iterator)).said()
        assert isinstance(error, WrongProcess)
        assert isinstance(error, RuntimeError)
        assert f"process {os.getpid()}" in str(error)
        assert "iter(loader)" in str(error)
        found += firsts([next(iterator)])
    found += firsts(iterator)
    assert found == list(range(0, 160, 4))
    assert firsts([held]) == [20]


@pytest.mark.parametrize(("method", "persistent"), [*((method, True) for method in METHODS), ("fork", False)])
def test_a_loop_in_a_child_has_workers_of_its_own(method, persistent):
    """Nothing of it reaches the parent, which is in the middle of its epoch."""
    loader = DataLoader(
        Images(80, 128), batch_size=4, num_workers=2, persistent_workers=persistent, multiprocessing_context=method
    )
    iterator = iter(loader)
    found = firsts(next(iterator) for _ in range(3))
    child = Child(lambda: [begin_again(loader, iterator), begin_again(loader, iterator)])
    found += firsts(next(iterator) for _ in range(3))
    assert child.said() == [list(range(0, 80, 4))] * 2
    found += firsts(iterator)
    assert found == list(range(0, 80, 4))
    assert firsts(loader) == list(range(0, 80, 4))
    assert loader.stats()["restarts"] == 0


def test_a_child_that_drops_all_ends_nothing():
    """Nor does one that shuts the iterator down, or ends as programs do."""
    loader = DataLoader(Images(80, 128), batch_size=4, num_workers=2, persistent_workers=True)
    held = [loader, iter(loader)]
    found = firsts(next(held[1]) for _ in range(3))
    assert Child(lambda: (shut_down(*held), held.clear(), gc.collect())[0]).said() is None
    found += firsts(held[1])
    assert found == list(range(0, 80, 4))
    assert loader.stats()["restarts"] == 0


def test_pages_that_a_child_inherits_are_closed_to_writing():
    """Whatever way leads there: pulses, states of slots, letter boxes; and no order reaches a keeper or a worker."""
    iterator = iter(DataLoader(Images(40, 128), batch_size=4, num_workers=2))
    held = next(iterator)
    host = iterator._host
    line = next(line for line in host._channels if line.slots.lent)

    def attack():
        ways = {
            "want": lambda: host.want(1 << 40),
            "abandon": lambda: host.abandon_below(1 << 40),
            "free": lambda: line.slots.put_back(0),
            "letter": lambda: line.slots.memory.view.__setitem__(slice(0, 4), b"none"),
            "pulse": lambda: host.pulses[0].words.__setitem__(WANTED, 7),
        }
        refused = []
        for name, way in ways.items():
            try:
                way()
            except TypeError:
                refused.append(name)
        line.slots.memory.give_back(0, line.slots.memory.size)
        host._keeper_process.kill()
        line.send(5, b"letter")
        return refused

    assert Child(attack).said() == ["want", "abandon", "free", "letter", "pulse"]
    assert [pulse.words[FLOOR] for pulse in host.pulses] == [0, 0]
    assert firsts([held]) == [0]
    assert firsts(iterator) == list(range(4, 40, 4))
    assert iterator._record.counts["restarts"] == 0


def test_totals_of_a_child_are_its_own(tmp_path, monkeypatch):
    """In the run folder, what a forked child writes of the loader that it inherited is not taken for the parent's."""
    monkeypatch.setenv("HOLDFAST_RUN_DIR", str(tmp_path))
    loader = DataLoader(Numbers(8), batch_size=4, num_workers=1)
    list(loader)
    mine = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert Child(lambda: len(list(loader))).said() == 2
    assert {path: path.read_bytes() for path in mine} == mine
    assert len(list(tmp_path.glob("trainer-*.jsonl"))) == 2


# Workers -------------------------------------------------------------------------------------------------------------


class Forking(Images):
    """Forks a process that goes on as if it were the worker: it returns another sample, or raises."""

    def __init__(self, raises):
        super().__init__(40, 128)
        self.raises = raises

    def __getitem__(self, index):
        if index % 10 == 3 and os.fork() == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what it says of its end
            if self.raises:
                raise ValueError("in a child of the worker")
            return -super().__getitem__(index)[0], index
        return super().__getitem__(index)


@pytest.mark.parametrize("raises", [False, True])
def test_a_process_that_a_dataset_forks_does_not_answer_for_the_worker(raises):
    """Each batch comes once, from the worker, whatever the other one brings back."""
    assert firsts(DataLoader(Forking(raises), batch_size=4, num_workers=2)) == list(range(0, 40, 4))


def test_a_process_that_a_task_forks_does_not_answer_for_the_worker(tmp_path):
    """Neither for a single call, nor for an item of a chunk."""
    with Pool(1, mp_context="fork") as pool:
        assert pool.submit(calls.fork_and_return, 5).result() == 5
        assert list(pool.map(calls.fork_and_return, range(8), chunksize=4)) == list(range(8))
        assert pool.stats()["restarts"] == 0


# Pools ---------------------------------------------------------------------------------------------------------------


USES = {
    "submit": lambda pool, future, results: pool.submit(calls.square, 1),
    "map": lambda pool, future, results: list(pool.map(calls.square, [1, 2])),
    "map with progress": lambda pool, future, results: list(pool.map(calls.square, [1], progress=print)),
    "result": lambda pool, future, results: future.result(),
    "exception": lambda pool, future, results: future.exception(),
    "callback": lambda pool, future, results: future.add_done_callback(print),
    "wait": lambda pool, future, results: concurrent.futures.wait([future]),
    "as_completed": lambda pool, future, results: list(concurrent.futures.as_completed([future])),
    "results of a map": lambda pool, future, results: list(results),
}


@pytest.mark.parametrize("use", list(USES))
def test_a_child_that_uses_an_inherited_pool_is_told_so(use, tmp_path):
    """It neither waits for what nobody will tell it, nor costs the parent a task."""
    go = str(tmp_path / "go")
    with Pool(2, mp_context="fork") as pool:
        done, future = pool.submit(calls.square, 7), pool.submit(calls.wait_for, go)
        results = pool.map(calls.wait_for, [go] * 4)
        assert done.result() == 49
        try:
            error = Child(lambda: USES[use](pool, future, results)).said()
            ended = Child(lambda: (done.result(), pool.kill_workers(), pool.shutdown())).said()
        finally:
            (tmp_path / "go").touch()
        assert isinstance(error, WrongProcess)
        assert f"process {os.getpid()}" in str(error)
        assert ended == (49, None, None)
        assert [future.result(), *results] == [go] * 5
        assert pool.stats()["restarts"] == 0


def test_a_child_may_look_at_a_future_that_another_thread_has_locked():
    """What is settled is there, also in a child that was forked while it was being settled."""
    with Pool(1, mp_context="fork") as pool:
        future, locked, go = pool.submit(calls.square, 3), threading.Event(), threading.Event()
        assert future.result(PATIENCE_S) == 9

        def lock():
            with future._condition:
                locked.set()
                go.wait(PATIENCE_S)

        thread = threading.Thread(target=lock)
        thread.start()
        locked.wait(PATIENCE_S)
        try:
            assert Child(lambda: (future.result(), future.done(), future.cancel())).said() == (9, True, False)
        finally:
            go.set()
            thread.join()


def test_a_child_has_pools_of_its_own():
    """Its futures are settled, waited for and shown as anywhere; those of its parent are shown."""
    with Pool(1, mp_context="fork") as pool:
        future = pool.submit(calls.nap, 60)

        def use():
            with Pool(1, mp_context="fork") as mine:
                done, _ = concurrent.futures.wait([mine.submit(calls.square, number) for number in (3, 4)])
                return sorted(each.result() for each in done), repr(future), future.cancel()

        assert Child(use).said() == ([9, 16], f"<PoolFuture of process {os.getpid()}>", False)
        pool.kill_workers()


def test_a_child_may_end_a_pool_while_another_thread_has_its_lock():
    """Nothing is locked there that nobody will unlock."""
    with Pool(1, mp_context="fork") as pool:
        pool.submit(calls.square, 1).result()
        with pool._lock:
            assert Child(lambda: (pool.kill_workers(), pool.shutdown())).said() == (None, None)


# Caches --------------------------------------------------------------------------------------------------------------


class Lines(Dataset):
    def __init__(self, path):
        self.path = path
        self.files = FileCache(4)

    def __len__(self):
        return 40

    def __getitem__(self, index):
        file = self.files[self.path]
        file.seek(9 * index)
        return file.read(8)


def test_children_and_parent_use_a_cache_at_once(tmp_path):
    """Caches are for all processes: no handle and no claim of the parent is used, or lost, by its child."""
    path = tmp_path / "lines"
    path.write_text("".join(f"line {i:03}\n" for i in range(40)))
    expected = [f"line {i:03}" for i in range(40)]
    cached = CachedDataset(Lines(str(path)), "4MiB")
    assert [cached[i] for i in range(10)] == expected[:10]
    loader = DataLoader(cached, batch_size=4, num_workers=2)
    iterator = iter(loader)
    found = next(iterator)
    children = [Child(lambda: [cached[i] for i in range(40)]) for _ in range(3)]
    assert [cached[i] for i in range(40)] == expected
    assert [child.said() for child in children] == [expected] * 3
    assert found + [line for batch in iterator for line in batch] == expected
    assert cached.figures()["samples"] == 40


# Ranks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_child_that_uses_inherited_ranks_is_told_so(method, tmp_path):
    """It does not wait for ever, and neither reaps nor ends the ranks of its parent, which are daemons."""
    go, owner = tmp_path / "go", os.getpid()
    context = holdfast.spawn(ranks.wait_for_file, (str(go),), 2, join=False, daemon=True, start_method=method)

    def ask():
        for act in (lambda: context.join(0.1), context.join, context.stop):
            with pytest.raises(WrongProcess, match=str(owner)):
                act()
        return multiprocessing.active_children()

    try:
        assert Child(ask).said() == []
        assert context.join(0.1) is False
    finally:
        go.touch()
    assert context.join() is True


def test_a_child_does_not_take_the_status_of_a_rank(tmp_path):
    """The fork server says it once, to whoever reads it."""
    go = tmp_path / "go"
    context = holdfast.spawn(ranks.wait_for_file, (str(go),), 1, join=False, start_method="forkserver")
    (process,) = context.processes
    popen = process._popen
    with popen._lock:  # the thread that watches is slow
        go.touch()
        poll = select.poll()
        poll.register(process.sentinel, select.POLLIN)
        assert poll.poll(PATIENCE_S * 1000), "the rank does not return"
        Child(lambda: (popen._lock.release(), process.exitcode)).said()
    assert context.join() is True
    assert process.exitcode == 0


@pytest.mark.parametrize("how", [0, 3, "raise"])
def test_a_process_that_a_rank_forks_does_not_speak_for_it(how):
    """How it ends is not how the rank ends."""
    assert holdfast.spawn(ranks.fork_and_exit, (how,), nprocs=2, start_method="fork") is None
