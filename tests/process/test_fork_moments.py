"""Forks at bad moments: many descriptors, none at all, two threads at once, objects that are half made."""

import gc
import os
import queue
import resource
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import holdfast
from holdfast import DataLoader
from holdfast.launch import output, rank_group
from holdfast.local.trainer import local_host, process_handles, worker_channel
from holdfast.shm import forks
from tests.conftest import descriptors
from tests.process import ranks
from tests.process.data import Images

# Newer Pythons warn of each fork of a process with threads, and a pool has one.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


class Watcher:
    """A forked child that looks at a batch until it is told to stop; `unchanged` says what it saw."""

    def __init__(self, array):
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(writing)
            expected = array.copy()  # numpy: torch's OpenMP threads do not live on in a forked child
            os.read(reading, 1)
            os._exit(0 if (array == expected).all() else 1)
        os.close(reading)
        self._writing = writing

    def unchanged(self):
        os.write(self._writing, b".")  # (children that were forked later hold this end, too)
        os.close(self._writing)
        return os.waitpid(self.pid, 0)[1] == 0


def lent(iterator):
    """Slots that nobody looks at any more, and that did not come back."""
    gc.collect()
    slots = [line.slots for line in iterator._host._channels]
    for each in slots:
        each._reclaim()
    return sum(len(each.lent) for each in slots)


@pytest.fixture
def unraisable(monkeypatch):
    """What hooks and callbacks raised, here and in forked children."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda trouble: told.append(repr(trouble.exc_value)))
    return told


def watched_to_the_end(loader, children):
    """Each of the first batches is shown to a child, and dropped here; then the epoch goes to its end."""
    iterator = iter(loader)
    watchers = []
    for _ in range(children):
        images = next(iterator)[0]
        watchers.append(Watcher(images.numpy()))
        del images
    firsts = [int(labels[0]) for _, labels in iterator]
    return iterator, firsts, watchers


def test_children_see_their_batches_unchanged_with_many_descriptors(unraisable):
    """More than 1,024 are open; and each slot comes back when its child has ended."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this system allows no more than 2,048 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    many = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        loader = DataLoader(Images(120), batch_size=2, num_workers=2, persistent_workers=True)
        iterator, firsts, watchers = watched_to_the_end(loader, 8)
        assert firsts == list(range(16, 120, 2))
        assert lent(iterator) == 8
        assert [watcher.unchanged() for watcher in watchers] == [True] * 8
        assert lent(iterator) == 0
        assert unraisable == []
    finally:
        for fd in many:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_children_see_their_batches_unchanged_without_a_descriptor(unraisable):
    """Nobody can hear of the end of such a child: its batch stays for good, and the epoch goes on without that slot."""
    loader = DataLoader(Images(120), batch_size=2, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    images = next(iterator)[0]
    reading, writing = os.pipe()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        array, pid = images.numpy(), os.fork()
    finally:
        if pid:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0 if (array[0] == 0).all() and (array[1] == 1).all() else 1)
    os.close(reading)
    del images, array
    assert [int(labels[0]) for _, labels in iterator] == list(range(2, 120, 2))
    os.close(writing)
    assert os.waitpid(pid, 0)[1] == 0
    assert unraisable == []
    assert lent(iterator) == 1
    assert [int(labels[0]) for _, labels in loader] == list(range(0, 120, 2))


TWO_THREADS = """
import os, threading
import tests.process.test_fork_moments  # others have hooks that take a lock; ours comes with the first iterator

slow_is_there, go_on = threading.Event(), threading.Event()

def be_slow():
    if threading.current_thread().name == "slow":
        slow_is_there.set()
        assert go_on.wait(120)

os.register_at_fork(before=be_slow)  # called last: what is registered later is called earlier

from holdfast import DataLoader
from tests.process.data import Images
from tests.process.test_fork_moments import Watcher

iterator = iter(DataLoader(Images(120), batch_size=2, num_workers=2))
held = [next(iterator)[0].numpy()]
watchers = []

class Both:
    def copy(self):
        return [array.copy() for array in held]

    def __eq__(self, expected):
        return Same(all((a == b).all() for a, b in zip(held, expected, strict=True)))

class Same(int):
    def all(self):
        return bool(self)

thread = threading.Thread(target=lambda: watchers.append(Watcher(Both())), name="slow")
thread.start()
assert slow_is_there.wait(120)
held.append(next(iterator)[0].numpy())  # while a fork is under way
if os.fork() == 0:
    os._exit(0)
os.wait()
go_on.set()
thread.join()
held.clear()
print(sum(1 for _ in iterator), watchers[0].unchanged())
"""


def test_two_threads_may_fork_at_once():
    """Each child sees the batches that were out, also one that came while its fork was under way."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", TWO_THREADS],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (run.stdout, run.stderr) == ("58 True\n", "")


# In which something is opened or closed.
OPENING = {"__init__", "open", "_launch", "launch", "start", "begin_life", "pipes", "begin"}
CLOSING = {"close", "end", "hang_up", "_end_lifeline", "finish"}


class ForksAtEachLine:
    """Another thread forks before each line of some modules that this thread runs, once per line."""

    def __init__(self, modules, unraisable):
        self._files = {module.__file__ for module in modules}
        self._unraisable = unraisable
        self._owner = os.getpid()
        self._asked = queue.SimpleQueue()
        self._answers = queue.SimpleQueue()
        self._before = set(descriptors())
        self.lines = {}

    def __enter__(self):
        self._thread = threading.Thread(target=self._fork)
        self._thread.start()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)
        self._asked.put(None)
        self._thread.join()

    def _trace(self, frame, event, argument):
        if os.getpid() != self._owner:
            sys.settrace(None)
            return None
        if frame.f_code.co_filename not in self._files or frame.f_code.co_name not in OPENING | CLOSING:
            return None
        where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_qualname}"
        if event == "line" and where not in self.lines:
            self._asked.put(where)
            self.lines[where] = self._answers.get(timeout=120)
        return self._trace

    def _fork(self):
        while self._asked.get() is not None:
            watched = any(isinstance(each, local_host.LocalHost) for each in forks._living(forks._open))
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                new = {fd: name for fd, name in descriptors().items() if fd not in self._before}
                sockets = [name for name in new.values() if watched and name.startswith("socket:")]
                os.write(writing, "; ".join(self._unraisable + sockets).encode())
                os._exit(0)
            os.close(writing)
            with os.fdopen(reading, "rb") as said:
                self._answers.put(said.read().decode())
            os.waitpid(pid, 0)


def test_a_loader_may_be_half_made_when_another_thread_forks(unraisable):
    """The child closes what there is. It keeps no end of a socket: the keeper's death would not be noticed."""
    gc.collect()
    with ForksAtEachLine([local_host, process_handles, worker_channel], unraisable) as moments:
        iterator = iter(DataLoader(Images(16), batch_size=2, num_workers=2))
        firsts = [int(labels[0]) for _, labels in iterator]
    assert firsts == list(range(0, 16, 2))
    assert len(moments.lines) > 80
    assert {where: told for where, told in moments.lines.items() if told} == {}


def test_ranks_may_be_half_started_when_another_thread_forks(unraisable):
    """The child closes what there is, and says nothing."""
    with ForksAtEachLine([rank_group, output], unraisable) as moments:
        assert holdfast.spawn(ranks.nothing, nprocs=2, start_method="fork") is None
    assert len(moments.lines) > 20
    assert {where: told for where, told in moments.lines.items() if told} == {}


def test_a_child_does_not_hide_the_death_of_a_keeper():
    """Not even one that was forked while the keeper was being started."""
    loader = DataLoader(Images(40), batch_size=2, num_workers=2)
    watchers = []
    launched = process_handles.keeper_birth.fork_keeper

    def forks_too(*arguments):
        thread = threading.Thread(target=lambda: watchers.append(Watcher(np.zeros(1))))
        thread.start()
        thread.join()
        return launched(*arguments)

    process_handles.keeper_birth.fork_keeper = forks_too
    try:
        iterator = iter(loader)
    finally:
        process_handles.keeper_birth.fork_keeper = launched
    next(iterator)
    os.kill(iterator._host.keeper_pid, 9)
    began = time.monotonic()
    assert len(list(iterator)) == 19
    assert time.monotonic() - began < 60
    assert watchers[0].unchanged()
