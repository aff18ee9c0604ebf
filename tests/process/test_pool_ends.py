"""The beginning and the end of a pool: its processes, and the interpreter that made it."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import weakref
from concurrent.futures.process import BrokenProcessPool

import pytest

from holdfast import Pool, PoolBroken, TaskLost

from ..conftest import METHODS, children, until
from . import calls
from .scripts import script


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
