"""spawn on real processes: the cause is named, nobody is left, and what works with torch's works with ours."""

import json
import logging
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

import holdfast
from holdfast import CannotSend, HoldfastError, Policy, RankExited, RankRaised
from holdfast.system import linux

from . import ranks

METHODS = ["fork", "spawn", "forkserver"]
# Each rank that is not forked imports torch, seconds of it: HOLDFAST_SLOW=1 runs every test on every method.
SOME = METHODS if os.environ.get("HOLDFAST_SLOW") else ["fork"]
every_method = pytest.mark.parametrize("method", SOME)
# Where a new interpreter and a fork of this one are the two cases there are.
both = pytest.mark.parametrize("method", SOME[:2])


def until(what, seconds, sentence):
    """A deadline with a sentence."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, sentence
        time.sleep(0.01)


def gone(pid):
    return linux.process_state(pid) in ("", "Z")


def pids_in(folder, count):
    """Of ranks that have said that they are there."""

    def all_there():
        return len([p for p in Path(folder).iterdir() if p.read_text()]) >= count

    until(all_there, 60, f"{count} ranks did not come up")
    return [int(p.read_text()) for p in Path(folder).iterdir()]


def fails(error, fn, args=(), nprocs=2, **options):
    with pytest.raises(error) as caught:
        holdfast.spawn(fn, args, nprocs, **options)
    return caught.value


# As torch does it --------------------------------------------------------------------------------------------------


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
    until(context.join, 60, "they did not return")
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


def test_who_ignores_sigterm_is_killed_after_the_grace_period_and_says_where_it_was(tmp_path):
    context = holdfast.spawn(ranks.ignore_sigterm, (str(tmp_path),), 2, join=False, start_method="fork")
    began = time.monotonic()
    with pytest.raises(RankExited, match="process 1 terminated with exit code 9") as caught:
        context.join(grace_period=0.3)
    assert time.monotonic() - began < 10
    assert re.search(r"rank 0 was stopped by Holdfast.* it did not end, and was in .*ranks.py", str(caught.value))


def test_the_others_are_stopped_and_the_failure_is_told_though_nobody_waits(caplog):
    """torch does that when `join` is called."""
    context = holdfast.spawn(ranks.raise_in, (1,), 2, join=False, start_method="fork")
    until(lambda: not any(p.is_alive() for p in context.processes), 20, "rank 0 was not stopped")
    until(lambda: any("process 1 raised" in r.message for r in caplog.records), 5, "nobody was told")
    for _ in range(2):
        with pytest.raises(RankRaised, match="legitimate"):
            context.join()


def test_a_rank_that_raised_and_cannot_end_is_named_and_stopped():
    """Its last words come before its end."""
    error = fails(RankRaised, ranks.hang_at_exit, (1,), start_method="fork")
    assert error.error_index == 1


# What cannot be sent, and what can -----------------------------------------------------------------------------------


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


def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    """Each rank imports it, and would start ranks of its own. torch: a bare exit code 1."""
    script = tmp_path / "script.py"
    script.write_text("import holdfast\ndef f(rank): pass\nholdfast.spawn(f, nprocs=2)\n")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode != 0
    last = ran.stderr.rpartition("RankExited: ")[2]
    assert re.match(r"process \d terminated with exit code 1", last), ran.stderr
    assert "rank-cannot-start" in last and 'if __name__ == "__main__":' in last


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


# Nobody is left ------------------------------------------------------------------------------------------------------

TRAINER = """
import os, sys, threading, time
import holdfast
from tests.process import ranks
def go():
    global context
    context = holdfast.spawn(getattr(ranks, sys.argv[1]), (sys.argv[2],), 2, join=False, start_method=sys.argv[3])
if sys.argv[4] == "thread":
    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
else:
    go()
if sys.argv[4] == "forked":
    child = os.fork()
    if child == 0:
        time.sleep(600)
    print(child, flush=True)
print("up", flush=True)
time.sleep(600)
"""


def trainer(tmp_path, method, fn="wait_for_ever", where="main"):
    folder = tmp_path / "pids"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, fn, str(folder), method, where], stdout=subprocess.PIPE, text=True
    )
    return process, pids_in(folder, 2)


@pytest.mark.parametrize(
    ("method", "fn"), [(method, "wait_for_ever") for method in METHODS] + [("spawn", "hold_the_gil")]
)
def test_no_rank_outlives_the_trainer(tmp_path, method, fn):
    """SIGKILL to the trainer; also while native code in a rank holds the GIL."""
    process, pids = trainer(tmp_path, method, fn)
    process.kill()
    process.communicate()
    until(lambda: all(map(gone, pids)), 5, "ranks outlived their trainer")


@every_method
def test_ranks_outlive_the_thread_that_started_them(tmp_path, method):
    """PDEATHSIG would fire on the death of the thread."""
    process, pids = trainer(tmp_path, method, where="thread")
    assert process.stdout.readline() == "up\n"
    time.sleep(1.0)  # long enough for a signal to have come
    assert not any(map(gone, pids))
    process.kill()
    process.communicate()
    until(lambda: all(map(gone, pids)), 5, "ranks outlived their trainer")


@both
def test_a_fork_of_the_trainer_does_not_keep_ranks_alive(tmp_path, method):
    """It has inherited the trainer's end of the pipe that says that the trainer lives."""
    process, pids = trainer(tmp_path, method, where="forked")
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    until(lambda: all(map(gone, pids)), 5, "ranks outlived their trainer, by its child")
    assert not gone(child)
    os.kill(child, signal.SIGKILL)
    process.stdout.close()


@both
def test_ctrl_c_ends_all_ranks(tmp_path, method):
    folder = tmp_path / "pids"
    folder.mkdir()
    code = "import sys, holdfast\nfrom tests.process import ranks\n"
    code += "holdfast.spawn(ranks.wait_for_ever, (sys.argv[1],), 2, start_method=sys.argv[2])"
    process = subprocess.Popen([sys.executable, "-c", code, str(folder), method], stderr=subprocess.PIPE, text=True)
    pids = pids_in(folder, 2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in stderr
    assert all(map(gone, pids))


@both
def test_ranks_of_a_rank_die_with_it(tmp_path, method):
    error = fails(RankExited, ranks.nest, (str(tmp_path), method), 1, start_method=method)
    assert error.signal_name == "SIGTERM"
    until(lambda: all(map(gone, pids_in(tmp_path, 2))), 10, "ranks outlived the rank that started them")


# Training ------------------------------------------------------------------------------------------------------------


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
    (file,) = (tmp_path / "run").glob("incidents-*.jsonl")
    (line,) = file.read_text().splitlines()
    incident = json.loads(line)
    assert incident["headline"].startswith("process 0 terminated with signal SIGKILL")
    assert time.time() - incident["at"] < 60


def test_restarts_are_counted_and_told(tmp_path):
    error = fails(RankExited, ranks.fail_until, (9, str(tmp_path)), start_method="fork", policy=Policy(restarts=2))
    assert error.incident.attempt == 3
    assert "attempt 3 of 3" in str(error)
    assert str(error).count("    before process 0 terminated with signal SIGKILL") == 2
    assert {path.name[0] for path in tmp_path.iterdir()} == {"1", "2", "3"}


def test_without_a_policy_there_is_no_restart(tmp_path):
    fails(RankExited, ranks.fail_until, (2, str(tmp_path)), start_method="fork")
    assert {path.name[0] for path in tmp_path.iterdir()} == {"1"}


# The environment -----------------------------------------------------------------------------------------------------


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


# Output --------------------------------------------------------------------------------------------------------------


@every_method
def test_output_is_shown_with_its_rank_kept_in_files_and_in_the_error(method, tmp_path, capfd):
    error = fails(RankExited, ranks.print_lines, (100,), start_method=method, log_dir=tmp_path / "logs")
    out, err = capfd.readouterr()
    assert all(f"[rank {rank}] line {i} of {rank}\n" in out for rank in (0, 1) for i in range(100))
    assert "[rank 0] to stderr\n" in err
    assert "      | line 99 of 1" in str(error)
    assert "line 2 of 1" not in str(error)
    log = (tmp_path / "logs" / "rank-1-attempt-1.log").read_text()
    assert log.splitlines()[:100] == [f"line {i} of 1" for i in range(100)]
    assert str(tmp_path / "logs" / "rank-1-attempt-1.log") in str(error)


def test_one_rank_is_shown_as_it_is(capfd):
    holdfast.spawn(ranks.print_lines, (2,), 1, start_method="fork")
    assert capfd.readouterr().out == "line 0 of 0\nline 1 of 0\n"


def test_the_traceback_is_in_the_file(tmp_path):
    fails(RankRaised, ranks.raise_in, (1,), start_method="fork", log_dir=tmp_path)
    assert "ValueError: legitimate" in (tmp_path / "rank-1-attempt-1.log").read_text()


# Signals -------------------------------------------------------------------------------------------------------------


@both
def test_the_sender_of_a_signal_is_named(tmp_path, method):
    context = holdfast.spawn(ranks.wait_for_ever, (str(tmp_path),), 2, join=False, start_method=method)
    pids_in(tmp_path, 2)
    subprocess.run(["kill", "-TERM", str(context.pids()[1])], check=True)
    with pytest.raises(RankExited, match="process 1 terminated with signal SIGTERM") as caught:
        context.join()
    # On a busy machine the sender may have ended before the rank was woken.
    assert re.search(r"sent by pid \d+ \((kill -TERM|gone already)", str(caught.value))
