"""What spawn sends to its ranks: functions and arguments by each start method, the environment."""

import multiprocessing
import os
import subprocess
import sys
import threading

import pytest

import holdfast
from holdfast import CannotSend, Policy, RankRaised

from . import ranks
from .groups import METHODS, both, every_method, fails


@pytest.mark.parametrize("method", METHODS)
def test_lambdas_and_closures_travel(method):
    queue = multiprocessing.get_context(method).SimpleQueue()
    offset = 40
    holdfast.spawn(lambda rank, add: queue.put(rank + offset + add), (2,), 2, start_method=method)
    assert sorted(queue.get() for _ in range(2)) == [42, 43]
    queue.close()


def test_what_cannot_be_sent_is_said():
    lock = threading.Lock()
    error = fails(CannotSend, lambda rank: lock.acquire())
    assert 'start_method="fork"' in str(error)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_arguments_that_cannot_be_opened_are_said(method):
    """torch: a bare exit code 1."""
    error = fails(RankRaised, ranks.put, (ranks.NotHere(),), start_method=method, policy=Policy(restarts=5))
    assert error.incident.finding == "rank-cannot-start"
    assert error.incident.attempt == 1  # it would fail each time
    assert "ImportError: not in this process" in str(error)


SCRIPT = """
import os, signal, time
import holdfast, torch
import torch.distributed as dist

def train(rank):
    dist.init_process_group("gloo")
    for step in range(10):
        if rank == 1 and step == 5 and os.environ["HOLDFAST_ATTEMPT"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.ones(1)
        dist.all_reduce(x)
    print("trained to the end")
    dist.destroy_process_group()  # or a thread of gloo's that still runs may abort the process at its end

for policy in (None, holdfast.Policy(restarts=1)):
    try:
        holdfast.spawn(train, nprocs=2, start_method="METHOD", policy=policy)
        print("returned")
    except holdfast.RankExited as error:
        print("caught", error.error_index, error.signal_name, str(error).splitlines()[0])
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_from_a_main_without_a_file(method):
    """As in a notebook; fed to `python -`, the function exists in no module that could be imported."""
    script = SCRIPT.replace("METHOD", method)
    ran = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=100, check=False)
    assert "caught 1 SIGKILL process 1 terminated with signal SIGKILL" in ran.stdout, ran.stderr
    assert ran.stdout.count("trained to the end") == 2
    assert "returned" in ran.stdout


@every_method
def test_ranks_know_where_they_are(method, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MASTER_ADDR", "RANK"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    queue = multiprocessing.get_context(method).SimpleQueue()
    holdfast.spawn(ranks.tell_environment, (queue,), 2, start_method=method)
    told = sorted((queue.get() for _ in range(2)), key=lambda t: t[0])
    queue.close()
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank, env, used in told:
        assert env["RANK"] == env["LOCAL_RANK"] == str(rank)
        assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2"
        assert (env["MASTER_ADDR"], env["HOLDFAST_ATTEMPT"]) == ("127.0.0.1", "1")
        assert int(env["OMP_NUM_THREADS"]) == used <= threads
    assert told[0][1]["MASTER_PORT"] == told[1][1]["MASTER_PORT"]
    assert dict(os.environ) == before


@both
def test_what_the_user_has_set_stands(method, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setenv("MASTER_PORT", "29400")
    queue = multiprocessing.get_context(method).SimpleQueue()
    holdfast.spawn(ranks.tell_environment, (queue,), 1, start_method=method)
    _, env, _ = queue.get()
    queue.close()
    assert (env["OMP_NUM_THREADS"], env["MASTER_ADDR"], env["MASTER_PORT"]) == ("3", "node7", "29400")
    assert env["RANK"] == "0"


def test_too_many_ranks_are_told_with_numbers(caplog):
    cpus = len(os.sched_getaffinity(0))
    holdfast.spawn(ranks.nothing, nprocs=cpus + 1, start_method="fork")
    assert any(f"{cpus + 1} ranks share" in record.message for record in caplog.records)
