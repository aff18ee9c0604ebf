"""What bounds a pool: deadlines, cancelling, retries, memory, and how many tasks it takes in."""

import concurrent.futures
import signal
import time

import pytest

from holdfast import Policy, Pool, TaskLost, TaskTimeout
from holdfast.pool.mapping import AHEAD

from ..conftest import children, until
from . import calls


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
    monkeypatch.setattr("holdfast.pool.mapping.AHEAD", 10)
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
