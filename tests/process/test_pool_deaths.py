"""A task of a pool that ends its worker fails alone, and its end is named."""

import os
import pickle
import signal
import threading
from concurrent.futures.process import BrokenProcessPool

import pytest

from holdfast import Pool, TaskLost

from ..conftest import METHODS, until
from . import calls
from .calls import At


def test_a_task_that_kills_its_worker_fails_alone(pool):
    futures = [pool.submit(calls.die, signal.SIGKILL) if i == 7 else pool.submit(calls.square, i) for i in range(20)]
    with pytest.raises(TaskLost) as caught:
        futures[7].result()
    assert [f.result() for i, f in enumerate(futures) if i != 7] == [i * i for i in range(20) if i != 7]
    error = caught.value
    assert isinstance(error, BrokenProcessPool)
    assert (error.task, error.call) == (7, "die")
    lines = str(error).splitlines()
    assert "was killed by SIGKILL while running task 7 (die, attempt 1 of 1)" in lines[0]
    assert lines[1].startswith("  worker-killed (likely): ")
    assert [line.split()[0] for line in lines[2:6]] == ["seen", "did", "try", "more"]
    stats = pool.stats()
    assert sum(worker["batches"] for worker in stats.pop("per_worker")) == 19
    assert stats == {
        "submitted": 20,
        "done": 20,
        "raised": 0,
        "lost": 1,
        "cancelled": 0,
        "retries": 0,
        "restarts": 1,
        "running": 0,
        "waiting": 0,
        "workers": 2,
    }
    assert "20 of 20 tasks done" in str(pool.report()) and "worker-killed x1" in str(pool.report())
    assert pool.report().to_dict()["incidents"][0]["call"] == "die"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


ENDS = [
    (calls.die, signal.SIGKILL, "worker-killed", "SIGKILL"),
    (calls.die, signal.SIGSEGV, "worker-segfault", "SIGSEGV"),
    (calls.die, signal.SIGABRT, "worker-aborted", "SIGABRT"),
    (calls.leave, 3, "worker-exited", "exited with code 3"),
]


@pytest.mark.parametrize(("fn", "argument", "finding", "words"), ENDS)
def test_every_end_is_named(forked, fn, argument, finding, words):
    with pytest.raises(TaskLost, match=words) as caught:
        forked.submit(fn, argument).result()
    assert finding in str(caught.value)
    assert [i.finding for i in forked.incidents] == [finding]
    assert forked.submit(calls.square, 5).result() == 25


LOST = "lost"
MATRIX = [
    # where it happens, what happens, and what the future has
    ("argument", "pickle", "raise", ValueError),
    ("argument", "pickle", "sys.exit", SystemExit),
    ("argument", "unpickle", "raise", TaskLost),
    ("argument", "unpickle", "sys.exit", TaskLost),
    ("argument", "unpickle", "exit", TaskLost),
    ("argument", "unpickle", "kill", TaskLost),
    ("argument", "unpickle", "segfault", TaskLost),
    ("result", "pickle", "raise", ValueError),
    ("result", "pickle", "sys.exit", SystemExit),
    ("result", "pickle", "exit", TaskLost),
    ("result", "pickle", "kill", TaskLost),
    ("result", "pickle", "segfault", TaskLost),
    ("result", "unpickle", "raise", TaskLost),
    ("result", "unpickle", "sys.exit", TaskLost),
]


@pytest.mark.parametrize(("what", "where", "how", "expected"), MATRIX)
def test_trouble_on_the_way_concerns_one_task(forked, what, where, how, expected):
    before = [forked.submit(calls.square, i) for i in range(5)]
    if what == "argument":
        future = forked.submit(calls.give, At(where, how))
    else:
        future = forked.submit(calls.make_at, where, how)
    after = [forked.submit(calls.square, i) for i in range(5)]
    with pytest.raises(expected):
        future.result(20)
    assert [f.result() for f in before + after] == [0, 1, 4, 9, 16] * 2


def test_what_cannot_be_pickled_is_said_on_its_future(forked):
    with pytest.raises(TypeError) as caught:
        forked.submit(calls.give, threading.Lock()).result()
    assert "task 0 (give) was being pickled" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="pickle"):
        forked.submit(threading.Lock).result()


def test_every_task_may_die(forked):
    """Each fails alone, more often than a loader would start again: the pool goes on."""
    futures = [forked.submit(calls.leave, 1) for _ in range(60)]
    assert all(isinstance(f.exception(), TaskLost) for f in futures)
    assert forked.submit(calls.square, 4).result() == 16
    assert forked.stats()["lost"] == 60


def test_an_idle_worker_may_be_killed(forked):
    forked.submit(calls.square, 1).result()
    victim = forked.submit(calls.pid).result()
    os.kill(victim, signal.SIGKILL)
    until(lambda: forked.stats()["restarts"] == 1, "nobody noticed")
    assert [forked.submit(calls.square, i).result() for i in range(6)] == [0, 1, 4, 9, 16, 25]
    assert forked.stats()["lost"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_the_keeper_may_be_killed(method, tmp_path):
    """What runs is lost, for it may not be run twice; what has retries is run again; nothing else is."""
    with Pool(2, mp_context=method) as pool:
        lost = pool.submit(calls.touch_and_hang, str(tmp_path / "a"))
        again = pool.submit_with(calls.touch_and_wait, str(tmp_path / "b"), str(tmp_path / "go"), retries=1)
        waiting = [pool.submit(calls.square, i) for i in range(10)]
        for name in "ab":
            until((tmp_path / name).exists, f"task {name} never began")
        os.kill(pool._dispatcher._host.keeper_pid, signal.SIGKILL)
        with pytest.raises(TaskLost, match="keeper-lost"):
            lost.result(20)
        (tmp_path / "go").touch()
        assert again.result(20) == str(tmp_path / "go")
        assert [f.result(20) for f in waiting] == [i * i for i in range(10)]


def test_nobody_waits_behind_a_slow_task(forked, tmp_path):
    """Tasks that were sent to a worker and not begun go to another one."""
    forked.submit(calls.square, 0).result()
    slow = forked.submit(calls.wait_for, str(tmp_path / "go"))
    quick = [forked.submit(calls.square, i) for i in range(40)]
    assert [f.result(10) for f in quick] == [i * i for i in range(40)]
    assert not slow.done()
    (tmp_path / "go").touch()
    assert slow.result(10)


def test_a_slow_task_that_dies_takes_nobody_with_it(forked, tmp_path):
    """Those that were sent to the same worker are neither lost nor run twice."""
    forked.submit(calls.square, 0).result()
    dying = [forked.submit(calls.mark_and_die, str(tmp_path), 100) for _ in range(3)]
    folder = tmp_path.parent / "good"
    folder.mkdir()
    good = [forked.submit(calls.mark, str(folder)) for _ in range(50)]
    assert all(isinstance(f.exception(20), TaskLost) for f in dying)
    assert [f.result(20) for f in good] == [None] * 50
    assert calls.marks(folder) == 50
    assert calls.marks(tmp_path) == 3
