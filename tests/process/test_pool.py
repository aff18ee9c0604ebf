"""The pool on real processes: an executor as the standard library's, but that only the guilty task suffers."""

import asyncio
import os
import signal
import threading
from functools import partial
from itertools import repeat

import numpy as np
import pytest
import torch

from holdfast import Pool, TaskLost

from . import calls

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
