"""spawn on real processes, as torch does it: what works with torch's works with ours, and the cause is named."""

import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import time

import pytest
import torch.multiprocessing as mp

import holdfast
from holdfast import HoldfastError, RankExited, RankRaised
from tests.conftest import until

from . import ranks
from .groups import METHODS, both, every_method, fails, pids_in


@pytest.mark.parametrize("method", METHODS)
def test_all_return(method):
    assert holdfast.spawn(ranks.nothing, nprocs=2, start_method=method) is None


@every_method
def test_the_first_argument_is_the_rank_and_queues_travel(method):
    queue = multiprocessing.get_context(method).SimpleQueue()
    holdfast.spawn(ranks.put, (queue,), nprocs=2, start_method=method)
    assert sorted(queue.get()[0] for _ in range(2)) == [0, 1]
    queue.close()


@every_method
def test_join_false_gives_torchs_context(method):
    context = holdfast.spawn(ranks.nothing, nprocs=2, join=False, start_method=method)
    assert isinstance(context, mp.ProcessContext)
    assert len(context.pids()) == len(context.processes) == 2
    until(context.join, "they did not return", 60)
    assert context.join() is True
    assert [process.exitcode for process in context.processes] == [0, 0]
    assert context.sentinels == {}


def test_join_gives_up_after_its_timeout(tmp_path):
    context = holdfast.spawn(ranks.wait_for_ever, (str(tmp_path),), 2, join=False, start_method="fork")
    pids = pids_in(tmp_path, 2)
    assert context.join(timeout=0.05) is False
    assert all(process.is_alive() for process in context.processes)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    with pytest.raises(mp.ProcessExitedException, match="terminated with signal SIGTERM"):
        context.join()


@pytest.mark.parametrize(("method", "who"), [("fork", 0), ("fork", 1), ("spawn", 1), ("forkserver", 1)])
def test_an_exception_is_raised_with_its_traceback(method, who):
    error = fails(RankRaised, ranks.raise_in, (who,), start_method=method)
    assert isinstance(error, mp.ProcessRaisedException)
    assert error.error_index == who
    assert re.search(rf"\nValueError: legitimate exception from process {who}$", str(error))
    assert "in raise_in" in str(error)
    assert isinstance(error.__cause__, ValueError)
    assert error.incident.finding == "rank-raised"


@pytest.mark.parametrize(
    ("method", "number"),
    [(method, signal.SIGKILL) for method in METHODS] + [("fork", signal.SIGABRT), ("fork", signal.SIGTERM)],
)
def test_a_signal_is_named(method, number):
    error = fails(RankExited, ranks.signal_in, (1, number), start_method=method)
    assert isinstance(error, mp.ProcessExitedException)
    assert str(error).startswith(f"process 1 terminated with signal {number.name} (rank 1 of 2, pid {error.error_pid}")
    assert (error.error_index, error.exit_code, error.signal_name) == (1, -number, number.name)
    assert "then   rank 0 was stopped by Holdfast" in str(error)


@both
def test_a_segfault_comes_with_its_stack(method):
    error = fails(RankExited, ranks.segfault_in, (0,), start_method=method)
    assert error.incident.finding == "worker-segfault"
    assert "in segfault_in" in error.incident.stack
    assert "multiprocessing" not in error.incident.stack


@both
@pytest.mark.parametrize("leave", [ranks.exit_in, ranks.leave_in])
def test_an_exit_code_is_named(method, leave):
    error = fails(RankExited, leave, (0, 123), start_method=method)
    assert "process 0 terminated with exit code 123" in str(error)
    assert (error.exit_code, error.signal_name) == (123, None)
    if leave is ranks.exit_in:
        assert "sys.exit(code)" in error.incident.stack


@pytest.mark.parametrize("fn", [ranks.raise_in, ranks.exit_in])
def test_errors_survive_pickling(fn):
    args = (0,) if fn is ranks.raise_in else (0, 3)
    error = fails(HoldfastError, fn, args, start_method="fork")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.incident == error.incident
    assert (again.error_index, again.error_pid) == (error.error_index, error.error_pid)


def test_daemon_is_passed_on():
    holdfast.spawn(ranks.is_daemon, nprocs=1, daemon=True, start_method="fork")


def test_a_grace_period_lets_the_others_end_by_themselves(tmp_path):
    context = holdfast.spawn(ranks.slow_to_end, (str(tmp_path),), 2, join=False, start_method="fork")
    with pytest.raises(RankRaised, match="ValueError: first"):
        context.join(grace_period=20)
    assert (tmp_path / "ended").exists()


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period_and_its_stack_is_told(tmp_path, caplog):
    context = holdfast.spawn(ranks.ignore_sigterm, (str(tmp_path),), 2, join=False, start_method="fork")
    began = time.monotonic()
    with pytest.raises(RankExited, match="process 1 terminated with exit code 9") as caught:
        context.join(grace_period=0.3)
    assert time.monotonic() - began < 10
    assert re.search(r"rank 0 was stopped by Holdfast.* it did not end, and was in .*ranks.py", str(caught.value))
    assert any("ignored SIGTERM; sending SIGKILL (rank 0)" in record.message for record in caplog.records)


def test_the_others_are_stopped_and_the_failure_is_told_though_nobody_waits(caplog):
    """torch does that when `join` is called."""
    context = holdfast.spawn(ranks.raise_in, (1,), 2, join=False, start_method="fork")
    until(lambda: not any(p.is_alive() for p in context.processes), "rank 0 was not stopped", 20)
    until(lambda: any("process 1 raised" in r.message for r in caplog.records), "nobody was told", 5)
    for _ in range(2):
        with pytest.raises(RankRaised, match="legitimate"):
            context.join()


def test_a_rank_that_raised_and_cannot_end_is_named_and_stopped():
    """Its last words come before its end."""
    error = fails(RankRaised, ranks.hang_at_exit, (1,), start_method="fork")
    assert error.error_index == 1


@both
def test_the_sender_of_a_signal_is_named(tmp_path, method):
    context = holdfast.spawn(ranks.wait_for_ever, (str(tmp_path),), 2, join=False, start_method=method)
    pids_in(tmp_path, 2)
    subprocess.run(["kill", "-TERM", str(context.pids()[1])], check=True)
    with pytest.raises(RankExited, match="process 1 terminated with signal SIGTERM") as caught:
        context.join()
    # On a busy machine the sender may have ended before the rank was woken.
    assert re.search(r"sent by pid \d+ \((kill -TERM|gone already)", str(caught.value))
