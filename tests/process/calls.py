"""Functions that the pool's tests run in workers; importable there."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

STATE = "not set"


def square(x):
    return x * x


def fork_and_return(number):
    """The process that it forks goes on as if it were the worker, with another result."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what it says of its end
        return -1
    os.waitpid(child, 0)
    return number


def nap(seconds):
    time.sleep(seconds)
    return seconds


def wait_for(path):
    """Until somebody makes that file."""
    while not os.path.exists(path):
        time.sleep(0.005)
    return path


def touch_and_wait(path, for_path):
    Path(path).touch()
    return wait_for(for_path)


def touch_and_hang(path):
    Path(path).touch()
    time.sleep(100)


def pid(_=None):
    return os.getpid()


def mark(folder):
    """Leaves a file for each time it is run."""
    Path(folder, f"{os.getpid()}-{time.monotonic_ns()}").touch()


def marks(folder):
    return len(list(Path(folder).iterdir()))


def mark_and_die(folder, times, signal_number=signal.SIGKILL):
    """Ends its worker that many times, then returns how often it ran."""
    mark(folder)
    if marks(folder) <= times:
        os.kill(os.getpid(), signal_number)
    return marks(folder)


def mark_and_raise(folder, times, error):
    mark(folder)
    if marks(folder) <= times:
        raise error
    return marks(folder)


def die(number):
    os.kill(os.getpid(), number)


def leave(code):
    os._exit(code)


def fail(text):
    raise ValueError(text)


def set_state(value):
    global STATE
    STATE = value


def state():
    return STATE


def broken_start(text):
    raise ValueError(text)


class SlowToSend:
    """Takes its time to be pickled: what a queue's own thread does with it."""

    def __reduce__(self):
        time.sleep(0.2)
        return str, ("sent",)


def say_and_fail(queue):
    queue.put(SlowToSend())
    raise ValueError("no model")


def fail_and_stay():
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise ValueError("no model")


def dead_start():
    os._exit(3)


def ones(count):
    return np.ones(count)


def total(array):
    return float(array.sum())


def scribble(array):
    array[:] = 7
    return float(array.sum())


KEPT = []


def keep(array):
    KEPT.append(array)
    return [float(a[0]) for a in KEPT]


def allocate(size):
    return len(bytearray(size))


class At:
    """Does something when it is pickled or unpickled. `where`: "pickle" or "unpickle"."""

    def __init__(self, where, what):
        self.where = where
        self.what = what

    def __reduce__(self):
        if self.where == "pickle":
            act(self.what)
        return (made, (self.where, self.what))


def made(where, what):
    if where == "unpickle":
        act(what)
    return At(where, what)


def act(what):
    if what == "raise":
        raise ValueError("at this place")
    if what == "exit":
        os._exit(7)
    if what == "sys.exit":
        sys.exit(7)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)


def give(what):
    return what


def make_at(where, what):
    return At(where, what)


def sum_in_a_pool(count):
    """A pool within a task."""
    from holdfast import Pool

    with Pool(2, mp_context="fork") as pool:
        return sum(pool.map(square, range(count)))


def square_or(x, what, at, folder=None):
    """Of item `at`, something else; each item leaves a file for each time it is begun."""
    if folder is not None:
        mark(Path(folder, str(x)))
    if x == at:
        what()
    return x * x


def many_bytes(x, size, at):
    if x == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return np.full(size, x, np.uint8)


def raise_at_first(folder, x):
    """Item 14 raises when it is run for the first time."""
    mark(Path(folder, str(x)))
    if x == 14 and marks(Path(folder, str(x))) == 1:
        raise OSError("not now")
    return x


def slow_mark(folder, x):
    mark(Path(folder, str(x)))
    time.sleep(0.02)
    return x


def die_or_hang(path, x):
    if x == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    touch_and_hang(path)
