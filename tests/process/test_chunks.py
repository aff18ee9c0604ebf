"""Chunks of a map: items travel together, and each has an outcome of its own, whatever happens to their worker."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from holdfast import Policy, Pool, TaskLost, TaskTimeout

from ..conftest import until
from . import calls

ITEMS = range(30)


def outcomes(pool, fn, chunksize=10):
    """What came of each: its result, or the type of its exception."""
    got = pool.map(fn, ITEMS, chunksize=chunksize, return_exceptions=True)
    return [type(x) if isinstance(x, Exception) else x for x in got]


def squares_but(at, kind):
    return [kind if x == at else x * x for x in ITEMS]


def folders(tmp_path):
    """One for each item."""
    for x in ITEMS:
        (tmp_path / str(x)).mkdir()
    return tmp_path


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ValueError("this one")


def hang():
    time.sleep(100)


class Unsendable:
    def __reduce__(self):
        raise RuntimeError("not for you")


class Deadly:
    def __reduce__(self):
        kill()


class Unreadable:
    def __reduce__(self):
        return fail, ()


class DeadlyToOpen:
    def __reduce__(self):
        return kill, ()


def give(x, what, at):
    return what() if x == at else x * x


@pytest.mark.parametrize("at", [0, 4, 9, 10, 29], ids=lambda at: f"item{at}")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_death_costs_the_item_that_was_begun_and_no_other(method, at, tmp_path):
    """Those that were done are not lost with their worker, those that were not begun are done; nobody runs twice."""
    folder = folders(tmp_path)
    with Pool(2, mp_context=method) as pool:
        assert outcomes(pool, partial(calls.square_or, what=kill, at=at, folder=folder)) == squares_but(at, TaskLost)
        assert pool.stats()["lost"] == 1
    assert [calls.marks(folder / str(x)) for x in ITEMS] == [1] * len(ITEMS)


def test_the_error_names_the_item():
    with Pool(2, mp_context="fork") as pool:
        got = pool.map(partial(calls.square_or, what=kill, at=14), ITEMS, chunksize=10, return_exceptions=True)
        error = list(got)[14]
    assert "(square_or, item 14, attempt 1 of 1)" in str(error)
    assert "worker-killed" in str(error)
    assert [incident.call for incident in pool.incidents] == ["square_or, item 14"]
    assert "the others of its chunk go on" in pool.incidents[0].did


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (partial(calls.square_or, what=fail, at=14), ValueError),
        (partial(give, what=Unsendable, at=14), RuntimeError),
        (partial(give, what=Deadly, at=14), TaskLost),
        (partial(give, what=Unreadable, at=14), TaskLost),
    ],
    ids=["raises", "cannot-be-pickled", "dies-when-pickled", "cannot-be-unpickled"],
)
def test_trouble_of_an_item_is_its_own(fn, kind):
    with Pool(2, mp_context="fork") as pool:
        assert outcomes(pool, fn) == squares_but(14, kind)


@pytest.mark.parametrize(
    ("bad", "kind"),
    [(Unsendable, RuntimeError), (Unreadable, TaskLost), (DeadlyToOpen, TaskLost)],
    ids=["cannot-be-pickled", "cannot-be-unpickled", "kills-when-unpickled"],
)
def test_trouble_of_an_argument_is_its_own(bad, kind):
    """Items are pickled together, and opened together; but none has begun then."""
    items = [bad() if x == 14 else x for x in ITEMS]
    with Pool(2, mp_context="fork") as pool:
        got = list(pool.map(calls.square, items, chunksize=10, return_exceptions=True))
    assert [type(x) if isinstance(x, Exception) else x for x in got] == squares_but(14, kind)


def test_each_item_has_the_whole_time():
    """Ten items that take 0.1 s each are not past a deadline of half a second; one that hangs is."""
    with Pool(2, mp_context="fork", policy=Policy(sample_timeout=0.5)) as pool:
        assert list(pool.map(calls.nap, [0.1] * 20, chunksize=10)) == [0.1] * 20
        assert outcomes(pool, partial(calls.square_or, what=hang, at=14)) == squares_but(14, TaskTimeout)


@pytest.mark.parametrize("deaths", [1, 2])
def test_an_item_has_its_own_retries(deaths, tmp_path):
    """With two attempts it may die once; the others are begun once all the same."""
    folder = folders(tmp_path)
    once = tmp_path / "deaths"
    once.mkdir()
    fn = partial(calls.square_or, what=partial(calls.mark_and_die, once, deaths), at=14, folder=folder)
    with Pool(2, mp_context="fork", policy=Policy(retries=1)) as pool:
        assert outcomes(pool, fn) == (squares_but(14, TaskLost) if deaths == 2 else [x * x for x in ITEMS])
        assert pool.stats()["retries"] == 1
    assert [calls.marks(folder / str(x)) for x in ITEMS] == [2 if x == 14 else 1 for x in ITEMS]


def test_an_item_that_raises_is_tried_again_alone(tmp_path):
    folder = folders(tmp_path)
    fn = partial(calls.raise_at_first, folder)
    with Pool(2, mp_context="fork", policy=Policy(retries=2, retry_delay=0.001)) as pool:
        assert list(pool.map(fn, ITEMS, chunksize=10)) == list(ITEMS)
        assert pool.stats()["retries"] == 1
    assert [calls.marks(folder / str(x)) for x in ITEMS] == [2 if x == 14 else 1 for x in ITEMS]


def test_a_map_ends_where_the_error_is():
    """As in the standard library; but what comes before it in its chunk is delivered."""
    with Pool(2, mp_context="fork") as pool:
        got = pool.map(partial(calls.square_or, what=kill, at=14), ITEMS, chunksize=10)
        assert [next(got) for _ in range(14)] == [x * x for x in range(14)]
        with pytest.raises(TaskLost):
            next(got)
        assert list(got) == []


def test_large_results_outlive_their_worker():
    with Pool(2, mp_context="fork") as pool:
        fn = partial(calls.many_bytes, size=1 << 20, at=7)
        got = list(pool.map(fn, range(10), chunksize=10, return_exceptions=True))
    assert isinstance(got.pop(7), TaskLost)
    assert all(
        isinstance(array, np.ndarray) and array.nbytes == 1 << 20 and len(set(array[::1000])) == 1 for array in got
    )
    assert [int(array[0]) for array in got] == [0, 1, 2, 3, 4, 5, 6, 8, 9]


def test_every_item_may_die():
    with Pool(2, mp_context="fork") as pool:
        got = list(pool.map(partial(calls.square_or, what=kill, at=3), [3] * 6, chunksize=6, return_exceptions=True))
    assert [type(x) for x in got] == [TaskLost] * 6


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_keeper_may_be_killed_in_the_middle_of_chunks(method, tmp_path):
    """Nothing is begun twice, and at most one item for each worker is lost."""
    folder = folders(tmp_path)
    with Pool(2, mp_context=method) as pool:
        got = pool.map(partial(calls.slow_mark, folder), ITEMS, chunksize=10, return_exceptions=True)
        assert next(got) == 0
        os.kill(pool._dispatcher._host.keeper_pid, signal.SIGKILL)
        rest = [0, *got]
    lost = [x for x in ITEMS if isinstance(rest[x], TaskLost)]
    assert len(lost) <= 2
    assert [rest[x] for x in ITEMS if x not in lost] == [x for x in ITEMS if x not in lost]
    assert [calls.marks(folder / str(x)) for x in ITEMS] == [1] * len(ITEMS)


def test_what_is_left_of_a_chunk_is_cancelled_with_it(tmp_path):
    """Whoever takes no more results ends also what was sent once more."""
    with Pool(1, mp_context="fork") as pool:
        fn = partial(calls.die_or_hang, tmp_path / "hangs")
        got = pool.map(fn, range(2), chunksize=2, return_exceptions=True)
        assert isinstance(next(got), TaskLost)
        until(Path(tmp_path / "hangs").exists, "the second item has not begun")
        got.close()
        assert pool.submit(calls.square, 3).result(20) == 9


def die_when_told(folder, deaths, item):
    """The first item says that it has begun, and dies once the caller has changed all of them."""
    number = int(item[0])
    if number == 0 and calls.marks(folder / "deaths") < deaths:
        calls.touch_and_wait(folder / f"begun {calls.marks(folder / 'deaths')}", folder / "changed")
        calls.mark(folder / "deaths")
        kill()
    return number


@pytest.mark.parametrize("deaths", [1, 2], ids=["dies-once", "dies-twice"])
@pytest.mark.parametrize("size", [1, 100_000], ids=["small", "large"])
def test_what_is_sent_once_more_is_what_was_submitted(tmp_path, size, deaths):
    """The caller uses its items again while the chunk runs: their other contents reach no worker."""
    (tmp_path / "deaths").mkdir()
    items = [np.full(size, x) for x in range(5)]
    with Pool(1, mp_context="fork", policy=Policy(retries=1)) as pool:
        fn = partial(die_when_told, tmp_path, deaths)
        got = pool.map(fn, items, chunksize=5, return_exceptions=True)
        calls.wait_for(tmp_path / "begun 0")
        for item in items:
            item.fill(1000)
        (tmp_path / "changed").touch()
        got = list(got)
    assert [type(x) if isinstance(x, Exception) else x for x in got] == [0 if deaths == 1 else TaskLost, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [1, 100_000], ids=["small", "large"])
def test_what_would_be_sent_once_more_is_cancelled(tmp_path, size):
    """Nothing of it is left open."""
    (tmp_path / "deaths").mkdir()
    pool = Pool(1, mp_context="fork", policy=Policy(retries=1))
    future = pool.submit(calls.touch_and_wait, tmp_path / "busy", tmp_path / "done")
    got = pool.map(partial(die_when_told, tmp_path, 9), [np.full(size, x) for x in range(5)], chunksize=5)
    calls.wait_for(tmp_path / "busy")
    (tmp_path / "done").touch()
    future.result()
    calls.wait_for(tmp_path / "begun 0")
    (tmp_path / "changed").touch()
    calls.wait_for(tmp_path / "begun 1")
    pool.shutdown(cancel_futures=True)
    with pytest.raises(TaskLost):
        list(got)
