"""No rank is left: not after its trainer, not after Ctrl-C, not after the rank that started it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from holdfast import RankExited
from tests.conftest import until

from . import ranks
from .groups import METHODS, both, every_method, fails, gone, pids_in

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
    until(lambda: all(map(gone, pids)), "ranks outlived their trainer", 5)


@every_method
def test_ranks_outlive_the_thread_that_started_them(tmp_path, method):
    """PDEATHSIG would fire on the death of the thread."""
    process, pids = trainer(tmp_path, method, where="thread")
    assert process.stdout.readline() == "up\n"
    time.sleep(1.0)  # long enough for a signal to have come
    assert not any(map(gone, pids))
    process.kill()
    process.communicate()
    until(lambda: all(map(gone, pids)), "ranks outlived their trainer", 5)


@both
def test_a_fork_of_the_trainer_does_not_keep_ranks_alive(tmp_path, method):
    """It has inherited the trainer's end of the pipe that says that the trainer lives."""
    process, pids = trainer(tmp_path, method, where="forked")
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    until(lambda: all(map(gone, pids)), "ranks outlived their trainer, by its child", 5)
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
    until(lambda: all(map(gone, pids_in(tmp_path, 2))), "ranks outlived the rank that started them", 10)
