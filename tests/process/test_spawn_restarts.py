"""Trainings on ranks: the rank that was killed is named, and all start again if the policy says so."""

import logging
import os
import time

import pytest
import torch

import holdfast
from holdfast import Policy, RankExited, RankRaised
from holdfast.system.run_files import records_of

from . import ranks
from .groups import every_method, fails


@every_method
def test_ddp_names_the_rank_that_was_killed(method):
    error = fails(RankExited, ranks.train, (10, 5), start_method=method)
    assert (error.error_index, error.signal_name) == (1, "SIGKILL")
    assert "step 4" in str(error)
    assert error.incident.finding == "worker-killed"
    assert "then   rank 0" in str(error)


# Not forked: these tests run in a process in which torch has threads, and what a fork of it leaves behind of them may
# keep a rank from ending. (Seen once, after its last step; that is why torch's default is spawn.)
@pytest.mark.parametrize("method", ["spawn", "forkserver"] if os.environ.get("HOLDFAST_SLOW") else ["spawn"])
def test_ddp_trains_to_the_end_with_restarts(method, tmp_path, caplog):
    """From its checkpoint; the second attempt meets on another port."""
    caplog.set_level(logging.WARNING, "holdfast")
    holdfast.spawn(ranks.train, (10, 5, str(tmp_path)), 2, start_method=method, policy=Policy(restarts=2))
    assert torch.load(tmp_path / "checkpoint")[0] == 10
    told = [r.message for r in caplog.records if "terminated with signal SIGKILL" in r.message]
    assert len(told) == 1 and "process 1" in told[0] and "starts all ranks again" in told[0]


@pytest.mark.parametrize("at", [0.93, 0.96])
def test_a_death_at_the_end_of_a_second_is_still_the_first(at):
    """Whole seconds made torchrun blame rank 0 for it."""
    error = fails(RankExited, ranks.train, (10, 3, None, at), start_method="fork")
    assert (error.error_index, error.signal_name) == (1, "SIGKILL")


def test_a_policy_without_restarts_restarts_nothing(tmp_path):
    """Whoever limits memory has not asked for twenty attempts."""
    fails(RankExited, ranks.fail_until, (9, str(tmp_path)), start_method="fork", policy=Policy(worker_memory="8GiB"))
    assert {path.name[:2] for path in tmp_path.iterdir()} == {"1-"}


@every_method
def test_a_rank_over_its_memory_raises_at_the_line(method):
    limited = Policy(worker_memory="200MiB")
    holdfast.spawn(ranks.allocate, (100 << 20,), 2, start_method=method, policy=limited)
    error = fails(RankRaised, ranks.allocate, (400 << 20,), start_method=method, policy=limited)
    assert isinstance(error.__cause__, MemoryError)
    assert error.incident.finding == "allocation-refused"
    assert "past Policy(worker_memory=...)" in str(error)
    assert "whole = bytearray(size)" in str(error)


def test_incidents_are_kept_in_the_run_folder(tmp_path, monkeypatch):
    """Of each attempt, at once."""
    monkeypatch.setenv("HOLDFAST_RUN_DIR", str(tmp_path / "run"))
    seen = tmp_path / "seen"
    seen.mkdir()
    holdfast.spawn(ranks.fail_until, (2, str(seen)), 2, start_method="fork", policy=Policy(restarts=3))
    (file,) = (tmp_path / "run").glob("trainer-*.jsonl")
    _, incident = records_of(file)
    assert incident["headline"].startswith("process 0 terminated with signal SIGKILL")
    assert time.time() - incident["at"] < 60


def test_restarts_are_counted_and_told(tmp_path):
    error = fails(RankExited, ranks.fail_until, (9, str(tmp_path)), start_method="fork", policy=Policy(restarts=2))
    assert error.incident.attempt == 3
    assert "attempt 3 of 3" in str(error)
    assert str(error).count("    before process 0 terminated with signal SIGKILL") == 2
    assert {path.name[0] for path in tmp_path.iterdir()} == {"1", "2", "3"}
    assert "Policy(restarts" not in error.incident.advice, "that was done, and did not help"


def test_the_advice_to_start_all_ranks_again_helps(tmp_path):
    """It is given where it was not followed; followed on the same case, all ranks return."""
    error = fails(RankExited, ranks.fail_until, (2, str(tmp_path)), start_method="fork")
    assert "Policy(restarts=3) starts all ranks again" in error.incident.advice
    assert "its own code" in error.incident.says
    holdfast.spawn(ranks.fail_until, (2, str(tmp_path)), 2, start_method="fork", policy=Policy(restarts=3))


def test_who_cannot_start_is_not_started_again_and_nobody_says_so(caplog):
    error = fails(RankRaised, ranks.fail_until, (ranks.NotHere(), ""), start_method="spawn", policy=Policy(restarts=3))
    assert error.incident.finding == "rank-cannot-start"
    assert "again" not in error.incident.did and "again" not in caplog.text


def test_without_a_policy_there_is_no_restart(tmp_path):
    fails(RankExited, ranks.fail_until, (2, str(tmp_path)), start_method="fork")
    assert {path.name[0] for path in tmp_path.iterdir()} == {"1"}
