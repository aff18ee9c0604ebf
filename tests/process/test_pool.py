"""The pool on real processes: an executor as the standard library's, but that only the guilty task suffers."""

import asyncio
import concurrent.futures
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import repeat

import numpy as np
import pytest
import torch

from holdfast import Policy, Pool, PoolBroken, TaskLost, TaskTimeout
from holdfast.pool.feed import AHEAD

from ..conftest import children, until
from . import calls
from .calls import At

METHODS = ["fork", "spawn", "forkserver"]


@pytest.fixture(params=METHODS)
def pool(request):
    with Pool(2, mp_context=request.param) as made:
        yield made


@pytest.fixture
def forked():
    with Pool(2, mp_context="fork") as made:
        yield made


def script(text, **more):
    """Run it in an interpreter of its own: (exit code, stdout, stderr)."""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=60, **more)
    return done.returncode, done.stdout, done.stderr


# An executor ------------------------------------------------------------------------------------------------------


def test_calls_run_in_other_processes(pool):
    futures = [pool.submit(calls.square, i) for i in range(30)]
    assert [f.result() for f in futures] == [i * i for i in range(30)]
    assert os.getpid() not in {pool.submit(calls.pid).result() for _ in range(4)}


def test_keyword_arguments_and_methods(forked):
    assert forked.submit(int, "ff", base=16).result() == 255
    assert forked.submit("a,b".split, ",").result() == ["a", "b"]


def test_lambdas_and_closures_travel(pool):
    offset = 3
    assert list(pool.map(lambda x: x + offset, range(4))) == [3, 4, 5, 6]
    assert pool.submit(partial(lambda a, b: a - b, 10), 4).result() == 6
    given = pool.submit(lambda: lambda x: x + offset).result()
    assert given(1) == 4


def test_an_exception_comes_as_itself(pool):
    future = pool.submit(calls.fail, "of this kind")
    with pytest.raises(ValueError, match="of this kind") as caught:
        future.result()
    assert "task 0 (fail, attempt 1 of 1)" in caught.value.__notes__[0]
    assert "in fail" in str(caught.value.__cause__)
    assert pool.incidents[0].finding == "task-raised"
    assert pool.submit(calls.square, 3).result() == 9


def test_large_arrays_cross_without_damage(pool):
    array = np.arange(1_000_000, dtype=np.float64)
    assert pool.submit(calls.total, array).result() == array.sum()
    back = pool.submit(calls.give, {"a": array, "t": torch.ones(500_000), "n": 3}).result()
    assert np.array_equal(back["a"], array) and back["t"].sum() == 500_000 and back["n"] == 3
    back["a"][0] = 5  # what comes can be written
    assert array[0] == 0


def test_results_that_are_kept_never_change(forked):
    """Slots are used again only when nobody looks; beyond 32 they are copied."""
    kept = [forked.submit(calls.give, np.full(50_000, i, dtype=np.float64)).result() for i in range(90)]
    assert [float(a[0]) for a in kept] == [float(i) for i in range(90)]
    assert all(a.min() == a.max() for a in kept)


def test_arguments_belong_to_the_task(forked):
    """What it writes into them is not seen here; what it keeps of them does not change."""
    array = np.ones(100_000)
    assert forked.submit(calls.scribble, array).result() == 700_000
    assert array.sum() == 100_000
    with Pool(1, mp_context="fork") as one:
        for i in range(4):
            seen = one.submit(calls.keep, np.full(100_000, i, dtype=np.float64)).result()
        assert seen == [0.0, 1.0, 2.0, 3.0]


def test_initializer(pool):
    with Pool(2, mp_context=pool._method, initializer=calls.set_state, initargs=("ready",)) as mine:
        assert {mine.submit(calls.state).result() for _ in range(6)} == {"ready"}


def test_max_tasks_per_child(pool):
    with Pool(1, mp_context=pool._method, max_tasks_per_child=3) as mine:
        pids = [mine.submit(calls.pid).result() for _ in range(7)]
        assert len(set(pids[:3])) == len(set(pids[3:6])) == 1
        assert len(set(pids)) == 3
        assert mine.incidents == ()


def test_all_results_can_be_kept_whatever_their_size():
    """More than may be lent, of a worker that is sent one task at a time: it never runs out of slots."""
    with Pool(1, max_tasks_per_child=150) as mine:
        kept = list(mine.map(calls.many_bytes, range(140), repeat(3 << 20), repeat(-1), chunksize=1))
        assert [int(result[-1]) for result in kept] == list(range(140))
        assert mine.incidents == ()


@pytest.mark.parametrize("chunksize", [1, 3])
def test_map_keeps_the_order(pool, chunksize):
    assert list(pool.map(calls.square, range(20), chunksize=chunksize)) == [i * i for i in range(20)]
    assert list(pool.map(pow, [2, 3], [3, 2, 9])) == [8, 9]


def test_map_raises_where_the_error_is(forked):
    results = forked.map(divmod, [1, 1, 1], [2, 0, 5])
    assert next(results) == (0, 1)
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_map_gives_exceptions_if_asked(forked):
    results = list(forked.map(divmod, [1, 1, 1], [2, 0, 5], return_exceptions=True))
    assert (results[0], results[2]) == ((0, 1), (0, 1))
    assert isinstance(results[1], ZeroDivisionError)
    with pytest.raises(TimeoutError):  # its own is no result
        list(forked.map(calls.nap, [30], timeout=0.1, return_exceptions=True))


def test_map_timeout(forked):
    with pytest.raises(TimeoutError):
        list(forked.map(calls.nap, [0, 0, 30], timeout=0.3))


def test_wrong_arguments_are_refused():
    for wrong in (
        lambda: Pool(0),
        lambda: Pool(1, max_tasks_per_child=0),
        lambda: Pool(1, mp_context="nothing"),
        lambda: Pool(1).map(abs, [1], chunksize=0),
        lambda: Pool(1).map(abs, [1], buffersize=0),
        lambda: Pool(1).submit_with(abs, 1, timeout=0),
        lambda: Pool(1).submit_with(abs, 1, retries=-1),
        lambda: Pool(1).submit_with(abs, 1, memory="many"),
    ):
        with pytest.raises(ValueError):
            wrong()
    for wrong in (
        lambda: Pool(1, initializer=3),
        lambda: Pool(1, policy="skip"),
        lambda: Pool(1, max_tasks_per_child="1"),
        lambda: Pool(1).map(abs, [1], buffersize="1"),
    ):
        with pytest.raises(TypeError):
            wrong()


def test_asyncio(forked):
    async def main():
        loop = asyncio.get_running_loop()
        many = [loop.run_in_executor(forked, calls.square, i) for i in range(5)]
        lost = loop.run_in_executor(forked, calls.die, signal.SIGKILL)
        with pytest.raises(TaskLost):
            await lost
        return await asyncio.gather(*many)

    assert asyncio.run(main()) == [0, 1, 4, 9, 16]


def test_asyncio_timeout_ends_the_task(forked, tmp_path):
    """wait_for cancels; here that ends what runs."""
    began = tmp_path / "began"

    async def main():
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(forked, calls.touch_and_hang, str(began))
        while not began.exists():
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call, 0.1)

    asyncio.run(main())
    assert forked.submit(calls.square, 2).result(5) == 4
    assert forked.incidents == ()


def test_several_threads_share_a_pool(forked):
    results = {}

    def use(name):
        results[name] = [forked.submit(calls.square, i).result() for i in range(50)]

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[n] == [i * i for i in range(50)] for n in range(4))


# Only the guilty one ------------------------------------------------------------------------------------------------


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
    assert lines[1].startswith("  worker-killed: ")
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


# Limits ------------------------------------------------------------------------------------------------------------


def test_a_task_past_its_deadline(pool):
    pool.submit(calls.square, 1).result()
    began = time.monotonic()
    hung = pool.submit_with(calls.nap, 100, timeout=0.4)
    others = [pool.submit(calls.square, i) for i in range(6)]
    with pytest.raises(TimeoutError) as caught:
        hung.result()
    assert 0.4 < time.monotonic() - began < 10
    assert isinstance(caught.value, TaskTimeout)
    text = str(caught.value)
    assert "was killed for hanging" in text and "task 1 (nap, attempt 1 of 1)" in text
    assert "timeout=0.4" in text and 'calls.py", line' in text and "in nap" in text
    assert [f.result() for f in others] == [0, 1, 4, 9, 16, 25]


def test_the_policy_gives_a_deadline_to_all():
    with Pool(1, policy=Policy(sample_timeout=0.3), mp_context="fork") as pool:
        assert isinstance(pool.submit(calls.nap, 100).exception(), TaskTimeout)
        assert pool.submit_with(calls.nap, 0.5, timeout=5).result() == 0.5


def test_a_running_task_can_be_cancelled(pool, tmp_path):
    hung = pool.submit(calls.touch_and_hang, str(tmp_path / "began"))
    until((tmp_path / "began").exists, "it never began")
    slow = pool.submit(calls.nap, 0.3)
    queued = [pool.submit(calls.square, i) for i in range(10)]
    assert hung.cancel() and hung.cancelled()
    assert hung.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        hung.result()
    assert slow.result() == 0.3
    assert [f.result() for f in queued] == [i * i for i in range(10)]
    assert concurrent.futures.wait([hung, slow], timeout=1).not_done == set()
    assert pool.incidents == ()
    assert pool.stats()["cancelled"] == 1 and pool.stats()["lost"] == 0


def test_cancelling_many_hits_no_other(forked, tmp_path):
    """Running or only sent, whatever it is at that moment: the others all give their result, once."""
    kept, dropped = [], []
    for i in range(300):
        kept.append(forked.submit(calls.mark, str(tmp_path)))
        dropped.append(forked.submit(calls.nap, 0.01))
        if i % 3 == 0:
            dropped[-1 - (i % 7) % len(dropped)].cancel()
    for future in dropped:
        future.cancel()
    assert [f.result(30) for f in kept] == [None] * 300
    assert calls.marks(tmp_path) == 300
    assert all(f.cancelled() or f.result(30) == 0.01 for f in dropped)
    assert forked.incidents == ()


def retire_one(pool):
    """As when memory runs short: one worker is to leave after its task. The dispatcher thinks of it once a second."""
    pool._dispatcher._autoscale.room(1, False)

    def told():
        pool.submit(calls.square, 2)
        return pool._dispatcher._ledger.allowed == 1

    until(told, "it was not told of the room", 10)


def test_a_task_on_a_worker_that_is_to_leave_can_be_cancelled(forked, tmp_path):
    """The worker would leave after its task, whenever that is; the user does not want to wait for it."""
    begun = [tmp_path / "0", tmp_path / "1"]
    futures = [forked.submit(calls.touch_and_hang, path) for path in begun]
    until(lambda: all(path.exists() for path in begun), "not both have begun")
    retire_one(forked)
    workers = {handle.pid for handle in forked._processes.values()}
    assert len(workers) == 2
    for future in futures:
        assert future.cancel()
    assert forked.submit(calls.square, 3).result(20) == 9
    until(lambda: not workers & children(), "a cancelled task runs on", 10)


def test_nobody_waits_behind_a_worker_that_is_to_leave(forked, tmp_path):
    """What it was sent and has not begun goes to the others at once."""
    begun, go_on = [tmp_path / "0", tmp_path / "1"], [tmp_path / "2", tmp_path / "3"]
    slow = [forked.submit(calls.touch_and_wait, *paths) for paths in zip(begun, go_on, strict=True)]
    until(lambda: all(path.exists() for path in begun), "not both have begun")
    behind = [forked.submit(calls.square, i) for i in range(2)]  # one with each
    until(lambda: forked.stats()["waiting"] == 0, "they are not sent")
    retire_one(forked)
    leaving = next(worker for worker in forked._dispatcher._ledger._workers if worker.leaving)
    other = slow[0] if slow[0]._number not in leaving.tasks else slow[1]
    go_on[slow.index(other)].touch()
    assert [future.result(20) for future in behind] == [0, 1]
    assert len([future for future in slow if future.done()]) == 1
    for path in go_on:
        path.touch()
    assert [future.result(20) for future in slow] == go_on


def test_a_finished_task_cannot_be_cancelled(forked):
    future = forked.submit(calls.square, 3)
    assert future.result() == 9
    assert not future.cancel()


def test_nothing_is_run_twice_unless_it_may_be(forked, tmp_path):
    with pytest.raises(TaskLost):
        forked.submit(calls.mark_and_die, str(tmp_path), 1).result()
    assert calls.marks(tmp_path) == 1


def test_the_environment_gives_no_retries(monkeypatch, tmp_path):
    """HOLDFAST_RETRIES is about samples. Whether a call may be run twice is not decided from outside."""
    monkeypatch.setenv("HOLDFAST_RETRIES", "3")
    with Pool(1, mp_context="fork") as pool, pytest.raises(TaskLost):
        pool.submit(calls.mark_and_die, str(tmp_path), 1).result()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_retries_after_a_death(pool, tmp_path, number):
    assert pool.submit_with(calls.mark_and_die, str(tmp_path), 2, number, retries=2).result() == 3
    assert [i.attempt for i in pool.incidents] == [1, 2]
    assert "runs the task again" in pool.incidents[0].did


def test_retries_after_an_exception(tmp_path):
    with Pool(1, policy=Policy(retries=3, retry_delay=0.01), mp_context="fork") as pool:
        assert pool.submit(calls.mark_and_raise, str(tmp_path), 2, OSError("flaky")).result() == 3
        assert pool.stats()["retries"] == 2
        with pytest.raises(ValueError):  # not one of retry_on
            pool.submit(calls.mark_and_raise, str(tmp_path), 99, ValueError("for good")).result()
        assert calls.marks(tmp_path) == 4


def test_a_memory_limit_for_one_task(pool):
    with pytest.raises(MemoryError):
        pool.submit_with(calls.allocate, 2 << 30, memory="512MiB").result()
    assert pool.incidents[0].finding == "allocation-refused"
    assert "past its memory limit" in pool.incidents[0].says
    assert pool.submit_with(calls.allocate, 1 << 20, memory="512MiB").result() == 1 << 20
    assert pool.submit(calls.allocate, 600 << 20).result() == 600 << 20


# Back-pressure -----------------------------------------------------------------------------------------------------


def counted(count, drawn):
    for i in range(count):
        drawn.append(i)
        yield i


def test_buffersize_bounds_what_is_drawn(forked):
    drawn = []
    results = forked.map(calls.square, counted(1_000_000, drawn), buffersize=8)
    assert len(drawn) == 8
    for i in range(100):
        assert next(results) == i * i
    assert len(drawn) == 108
    results.close()


def test_a_generator_is_not_drained_at_once(forked):
    drawn = []
    results = forked.map(calls.square, counted(1_000_000, drawn))
    assert len(drawn) == AHEAD
    assert [next(results) for _ in range(3)] == [0, 1, 4]
    assert len(drawn) == AHEAD + 3
    results.close()


def test_all_of_a_generator_is_run_in_the_end(tmp_path, monkeypatch):
    """Also if nobody takes the results, as with the standard library."""
    monkeypatch.setattr("holdfast.pool.feed.AHEAD", 10)
    drawn = []
    with Pool(2, mp_context="fork") as pool:
        pool.map(calls.mark, (str(tmp_path) for _ in counted(60, drawn)))
        assert len(drawn) < 60
    assert calls.marks(tmp_path) == 60


def test_submit_does_not_block(forked, tmp_path):
    began = time.monotonic()
    futures = [forked.submit(calls.wait_for, str(tmp_path / "go")) for _ in range(500)]
    assert time.monotonic() - began < 5
    assert forked.stats()["waiting"] > 300
    (tmp_path / "go").touch()
    assert len([f.result() for f in futures]) == 500


# Beginning and end -------------------------------------------------------------------------------------------------


def test_no_process_before_the_first_call():
    before = children()
    with Pool(2, mp_context="fork") as pool:
        assert children() == before
        pool.submit(calls.square, 1).result()
        until(lambda: len(children() - before) == 2, "not a keeper and a worker")
        assert [pool.submit(calls.square, i).result() for i in range(5)] == [0, 1, 4, 9, 16]
        assert len(children() - before) == 2
        list(pool.map(calls.nap, [0.1] * 4))
        assert len(children() - before) == 3


def test_a_failing_initializer_breaks_the_pool(pool):
    broken = Pool(2, mp_context=pool._method, initializer=calls.broken_start, initargs=("no model",))
    futures = [broken.submit(calls.square, i) for i in range(3)]
    for future in futures:
        error = future.exception(20)
        assert isinstance(error, PoolBroken) and isinstance(error, BrokenProcessPool)
        assert isinstance(error.__cause__, ValueError) and "no model" in str(error.__cause__)
        assert "worker-init-raised" in str(error)
    with pytest.raises(BrokenProcessPool, match="no model"):
        broken.submit(calls.square, 1)
    broken.shutdown()


@pytest.mark.parametrize("method", METHODS)
def test_what_a_failing_initializer_has_sent_arrives(method):
    """Such as its log: it is there when the future has its error, for the worker has left by itself."""
    said = multiprocessing.get_context(method).Queue()
    broken = Pool(2, mp_context=method, initializer=calls.say_and_fail, initargs=(said,))
    assert isinstance(broken.submit(calls.square, 1).exception(20), PoolBroken)
    broken.shutdown()
    assert said.get(timeout=0) == "sent"
    said.close()
    said.join_thread()


def test_a_failing_initializer_that_does_not_end_is_not_waited_for():
    began = time.monotonic()
    broken = Pool(2, mp_context="fork", initializer=calls.fail_and_stay)
    assert isinstance(broken.submit(calls.square, 1).exception(20), PoolBroken)
    assert time.monotonic() - began < 5
    broken.shutdown()


def test_workers_that_never_come_up_break_the_pool(forked):
    broken = Pool(2, mp_context="fork", initializer=calls.dead_start)
    with pytest.raises(PoolBroken, match="before they are ready"):
        broken.submit(calls.square, 1).result(30)
    broken.shutdown()


def test_shutdown_waits_for_all(forked):
    futures = [forked.submit(calls.nap, 0.02) for _ in range(20)]
    forked.shutdown()
    assert all(f.done() and f.result() == 0.02 for f in futures)
    with pytest.raises(RuntimeError, match="after shutdown"):
        forked.submit(calls.square, 1)


def test_shutdown_without_waiting(forked):
    futures = [forked.submit(calls.nap, 0.02) for _ in range(20)]
    forked.shutdown(wait=False)
    assert [f.result(20) for f in futures] == [0.02] * 20


def test_shutdown_that_cancels(forked):
    futures = [forked.submit(calls.nap, 0.05) for _ in range(200)]
    forked.shutdown(cancel_futures=True)
    assert sum(f.cancelled() for f in futures) > 100
    assert all(f.cancelled() or f.result() == 0.05 for f in futures)


@pytest.mark.parametrize("name", ["kill_workers", "terminate_workers"])
def test_kill_workers(forked, name, tmp_path):
    hung = forked.submit(calls.touch_and_hang, str(tmp_path / "began"))
    until((tmp_path / "began").exists, "it never began")
    waiting = [forked.submit(calls.nap, 100) for _ in range(100)]
    began = time.monotonic()
    getattr(forked, name)()
    assert time.monotonic() - began < 5
    with pytest.raises(TaskLost, match=r"task 0 \(touch_and_hang\)"):
        hung.result()
    assert all(f.cancelled() or isinstance(f.exception(), TaskLost) for f in waiting)
    with pytest.raises(RuntimeError):
        forked.submit(calls.square, 1)


def test_a_pool_that_is_dropped_finishes_and_ends():
    before = children()
    pool = Pool(2, mp_context="fork")
    futures = [pool.submit(calls.nap, 0.05) for _ in range(8)]
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    assert [f.result(20) for f in futures] == [0.05] * 8
    until(lambda: children() == before, "its processes are still there")


END = """
import sys, time
from holdfast import Pool
from tests.process import calls
if __name__ == "__main__":
    pool = Pool(2, mp_context="{method}")
    future = pool.submit(calls.nap, 0.3)
    future.add_done_callback(lambda f: print("done", f.result(), flush=True))
    {last}
"""


@pytest.mark.parametrize("method", METHODS)
def test_the_interpreter_ends_when_all_is_done(method):
    assert script(END.format(method=method, last="")) == (0, "done 0.3\n", "")


def test_the_interpreter_ends_after_an_exception():
    code, out, error = script(END.format(method="fork", last="raise ValueError('mine')"))
    assert (code, out) == (1, "done 0.3\n")
    assert error.endswith("ValueError: mine\n")


MAIN = """
import sys
from holdfast import Pool

def before(x):
    return helper(x) + state

def helper(x):
    return 2 * x

def start(value):
    global state
    state = value

class Thing:
    def __init__(self, x):
        self.x = x

def same(thing):
    assert type(thing).__name__ == "Thing"
    return thing

if __name__ == "__main__":
    with Pool(2, mp_context="{method}", initializer=start, initargs=(100,)) as pool:
        print(list(pool.map({before}, [1, 2])))

        def after(x):
            return helper(x) + 1

        class Late:
            pass

        print(list(pool.map(after, [1, 2])))
        print(type(pool.submit(same, Thing(3)).result()) is Thing)
        print(type(pool.submit(lambda x: x, Late()).result()) is Late)
        print(pool.incidents)
"""


@pytest.mark.parametrize("method", METHODS)
def test_functions_of_main(method, tmp_path):
    """As a file: what workers know, with the globals that the initializer set; what they do not, by value."""
    path = tmp_path / "mine.py"
    path.write_text(MAIN.format(method=method, before="before"))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[102, 104]\n[3, 5]\nTrue\nTrue\n()\n", "")


@pytest.mark.parametrize("method", METHODS)
def test_functions_of_no_file(method):
    """From stdin, as in a notebook: there is no main module to import again."""
    text = MAIN.format(method=method, before="helper")
    done = subprocess.run([sys.executable, "-"], input=text, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[2, 4]\n[3, 5]\nTrue\nTrue\n()\n", "")


def test_a_redefined_function_is_the_new_one():
    """A cell that is run again after the pool was started."""
    text = """
from holdfast import Pool
def f(): return "old"
pool = Pool(1, mp_context="fork")
print(pool.submit(f).result())
def f(): return "new"
print(pool.submit(f).result())
pool.shutdown()
"""
    assert script(text) == (0, "old\nnew\n", "")


def test_a_forked_child_has_no_part_in_it(forked):
    futures = [forked.submit(calls.nap, 0.05) for _ in range(10)]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            futures[-1].cancel()
            forked.shutdown()
            try:
                forked.submit(calls.square, 1)
            except RuntimeError:
                status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [f.result() for f in futures] == [0.05] * 10


def test_nobody_outlives_the_one_who_made_the_pool():
    text = """
import os, signal
from holdfast import Pool
from tests.process import calls
if __name__ == "__main__":
    pool = Pool(2, mp_context="fork")
    print(pool.submit(calls.pid).result(), pool.submit(calls.pid).result(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    code, out, _ = script(text)
    assert code == -signal.SIGKILL
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in out.split()), "a worker is left")


def test_a_pool_within_a_task(forked):
    assert forked.submit(calls.sum_in_a_pool, 5).result(30) == 30


def test_ctrl_c_does_not_wait_for_what_runs():
    text = """
import os, signal, threading, time
from holdfast import Pool
from tests.process import calls
if __name__ == "__main__":
    began = time.monotonic()
    try:
        with Pool(2, mp_context="fork") as pool:
            pool.submit(calls.square, 1).result()
            futures = [pool.submit(calls.nap, 100) for _ in range(10)]
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            futures[0].result()
    except KeyboardInterrupt:
        print("stopped", time.monotonic() - began < 30)
"""
    code, out, error = script(text)
    assert (code, out) == (0, "stopped True\n"), error
