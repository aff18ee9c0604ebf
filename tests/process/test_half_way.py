"""A start that fails half-way, or is interrupted, ends and closes all that it had begun; the next one works."""

import errno
import gc
import linecache
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch.utils.data

import holdfast
from holdfast import launch
from holdfast.launch import phases
from holdfast.system import linux
from tests import conftest
from tests.conftest import free_descriptors
from tests.interrupt import Interrupt, handler_raises

from . import ranks

# More than any of these starts needs at once.
PLENTY = 60
LAUNCH = str(Path(launch.__file__).parent)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index


class Interrupted(BaseException):
    """As KeyboardInterrupt; one of pytest's own would end the tests."""


def double(x):
    return 2 * x


def there():
    """Processes, descriptors, mappings and threads of this process."""
    return conftest.children(), set(conftest.descriptors().items()), conftest.mappings(), set(threading.enumerate())


def left_since(before):
    """What there is now and was not; a process that was killed may take a moment."""
    deadline = time.monotonic() + 10
    while True:
        now = there()
        left = [now[0] - before[0], now[1] - before[1], max(0, now[2] - before[2]), now[3] - before[3]]
        if not any(left) or time.monotonic() > deadline:
            return [what for what in left if what]
        time.sleep(0.01)
        gc.collect()


def errors_until_it_works(start):
    """What `start` raises with no descriptor to be had, with one, with two, ...; each leaves nothing."""
    start()  # whatever is opened, imported or mapped once and for all is there from now on
    errors = []
    for count in range(PLENTY):
        before = there()
        error = None
        with free_descriptors(count):
            try:
                start()
            except OSError as raised:
                error = raised.with_traceback(None)
        assert not left_since(before), f"with {count} free descriptors: {error!r}"
        if error is None:
            start()
            return errors
        errors.append(error)
    raise AssertionError(f"it never worked: {errors[-1]!r}")


def say_emfile(errors):
    assert len(errors) > 5
    assert {error.errno for error in errors} == {errno.EMFILE}
    notes = [note for error in errors for note in getattr(error, "__notes__", ())]
    assert any("descriptors open, the limit is" in note for note in notes)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_an_iterator_that_gets_too_few_descriptors_says_emfile_and_leaves_nothing(method):
    """At every number of free descriptors, from none up; the same loader works when there are some again."""
    loader = holdfast.DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context=method)

    def epoch():
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]

    say_emfile(errors_until_it_works(epoch))


def test_a_stream_that_gets_too_few_descriptors_says_emfile_and_leaves_nothing():
    """No worker can do the work of another: all of them must begin."""

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(torch.utils.data.get_worker_info().id, 6, 3))

    loader = holdfast.DataLoader(Stream(), batch_size=2, num_workers=3, multiprocessing_context="fork")

    def epoch():
        assert [batch.tolist() for batch in loader] == [[0, 3], [1, 4], [2, 5]]

    say_emfile(errors_until_it_works(epoch))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_pool_that_gets_too_few_descriptors_says_emfile_leaves_nothing_and_is_not_broken(method):
    """At every number of free descriptors: `submit` raises, and the same pool works when there are some again."""
    pools = []

    def work():
        pool = pools.pop() if pools else holdfast.Pool(2, method)
        try:
            futures = [pool.submit(double, i) for i in range(4)]
        except OSError:
            pools.append(pool)
            raise
        with pool:
            assert [future.result(30) for future in futures] == [0, 2, 4, 6]

    say_emfile(errors_until_it_works(work))


def test_a_worker_that_gets_no_descriptors_later_leaves_fewer_workers():
    """The others do its work; the incident names EMFILE."""
    numbers = list(range(40))
    loader = holdfast.DataLoader(numbers, batch_size=1, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    got = [next(batches).item()]
    dead, _ = (worker.pid for worker in batches._workers)  # (it waits until they are there)
    with free_descriptors(0):
        os.kill(dead, signal.SIGKILL)
        got += [batch.item() for batch in batches]
    assert got == numbers
    refused = [incident for incident in loader.incidents if incident.finding == "descriptors-exhausted"]
    assert refused, [incident.headline for incident in loader.incidents]
    assert "EMFILE" in str(loader.report())


@pytest.mark.parametrize("method", ["fork", "forkserver", *(["spawn"] if os.environ.get("HOLDFAST_SLOW") else [])])
def test_ranks_that_get_too_few_descriptors_say_emfile_and_leave_nothing(method):
    """At every number of free descriptors, from none up."""
    say_emfile(errors_until_it_works(lambda: holdfast.spawn(ranks.nothing, nprocs=2, start_method=method)))


REFUSED = """
import os, resource
import holdfast
from tests.conftest import descriptors
from tests.process import ranks

def loader():
    list(holdfast.DataLoader(range(4), num_workers=1, multiprocessing_context="fork"))

def pool():
    holdfast.Pool(1, "fork").submit(abs, -1).result(30)

def spawn():
    holdfast.spawn(ranks.nothing, nprocs=2, start_method="fork")

for start in loader, pool, spawn:
    start()  # whatever is imported once and for all is there from now on
os.setuid(54321)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
for start in loader, pool, spawn:
    before = descriptors()
    try:
        start()
    except BlockingIOError as error:
        print(start.__name__, error.errno, any("threads-max" in note for note in error.__notes__))
    assert set(descriptors().items()) <= set(before.items()), (start.__name__, before, descriptors())
"""


def test_a_start_that_gets_no_process_says_eagain_and_leaves_nothing():
    """Where the user may have no more processes. For root there is no such limit."""
    if os.getuid():
        pytest.skip("only root can become a user with no other processes")
    ran = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=120, check=False)
    said = "".join(f"{name} {errno.EAGAIN} True\n" for name in ("loader", "pool", "spawn"))
    assert (ran.stdout, ran.returncode) == (said, 0), ran.stderr[-4000:]


def test_to_ask_for_descriptors_takes_none_whatever_interrupts_it():
    """An interrupt may come at any moment; and who is told that there are too few may open those that there are."""
    linux.need_descriptors(3)
    with Interrupt(0) as counted:
        linux.need_descriptors(3)
    before = there()
    with handler_raises(Interrupted):
        for at in range(1, counted.seen):
            with suppress(Interrupted), Interrupt(at):
                linux.need_descriptors(3)
            assert not left_since(before), f"at bytecode {at}"
    with free_descriptors(4), pytest.raises(OSError, match="Too many") as refused:
        linux.need_descriptors(5)
    assert refused.value.errno == errno.EMFILE
    assert not left_since(before), "though the traceback is still there"


def test_a_dataset_that_cannot_be_sent_leaves_nothing():
    """The keeper's process is not started; what was opened for it is closed."""
    numbers = Numbers()
    numbers.lock = threading.Lock()
    loader = holdfast.DataLoader(numbers, num_workers=2, multiprocessing_context="forkserver")
    before = there()
    for _ in range(3):
        with pytest.raises(TypeError, match="pickle"):
            iter(loader)
    assert not left_since(before)


def test_a_sampler_that_raises_in_the_first_draw_leaves_nothing():
    """The iterator is never there, so nobody could close it."""

    class Raises(torch.utils.data.Sampler):
        def __iter__(self):
            raise ValueError("no order")
            yield

    loader = holdfast.DataLoader(Numbers(), sampler=Raises(), num_workers=2, multiprocessing_context="fork")
    before = there()
    with pytest.raises(ValueError, match="no order") as caught:
        iter(loader)
    assert not left_since(before), "though the traceback is still there"
    del caught


# Interrupts while ranks are started ----------------------------------------------------------------------------------


class Tracer:
    """Notes each line of launch/ that this thread comes to, in this process; raises at the one that is asked for."""

    def __init__(self, where=None):
        """`where`: (file, line, how often it was passed before)."""
        self.seen = {}
        self._where = where
        self._owner = os.getpid()

    def __call__(self, frame, event, arg):
        name = frame.f_code.co_filename
        if not name.startswith(LAUNCH) or os.getpid() != self._owner:
            return None
        if event == "line":
            place = (name, frame.f_lineno)
            self.seen[place] = self.seen.get(place, 0) + 1
            if (*place, self.seen[place]) == self._where:
                raise Interrupted
        return self


def lines_of_a_start():
    """(file, line) -> how often a start that comes to its end passes it."""
    tracer = Tracer()
    assert not interrupted(tracer)
    # A trace may raise between the end of a `with` block and the release of its lock; no signal handler runs there.
    return {where: passed for where, passed in tracer.seen.items() if "with " not in linecache.getline(*where)}


def interrupted(tracer):
    """True when the start of two ranks was; otherwise they are ended here."""
    sys.settrace(tracer)
    try:
        context = holdfast.spawn(ranks.wait_for_ever, (), 2, join=False, start_method="fork")
    except Interrupted:
        return True
    finally:
        sys.settrace(None)
    context.stop()
    return False


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of a socket object, which closes itself
def test_an_interrupt_at_any_line_of_the_start_ends_all_ranks(monkeypatch):
    """Whatever line of ours it falls on, where most has been begun: no process, no descriptor, no thread is left."""
    monkeypatch.setattr(phases, "LAST_CALL_S", 0.01)
    lines = lines_of_a_start()
    missed = 0
    for (name, line), passed in lines.items():
        before = there()
        missed += not interrupted(Tracer((name, line, passed)))  # how often a rank is looked at is chance
        left = left_since(before)
        assert not left, f"interrupted at {name}:{line}: {left}"
    assert len(lines) > 100 and missed < 10


TRAINER = """
import multiprocessing, os, signal, threading, time
import holdfast
from holdfast.launch import phases
from holdfast.system import linux
from tests import conftest
from tests.conftest import free_descriptors
from tests.interrupt import Interrupt, handler_raises
from tests.process import ranks

phases.LAST_CALL_S = 0.01
FORKED = dict(nprocs=2, start_method="fork")
armed = False

def interrupt(number, frame):
    if armed:
        raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupt)
began = time.monotonic()
holdfast.spawn(ranks.wait_for_ever, join=False, **FORKED).stop()
took = min(0.5, time.monotonic() - began)  # a busy machine must not make 50 long waits of it
for moment in range(50):
    timer = threading.Timer(took * moment / 40, os.kill, (os.getpid(), signal.SIGINT))
    armed = True
    try:
        timer.start()
        holdfast.spawn(ranks.wait_for_ever, **FORKED)
    except KeyboardInterrupt:
        armed = False
    timer.join()
    deadline = time.monotonic() + 10
    while conftest.children() or threading.active_count() > 1:
        assert time.monotonic() < deadline, (moment, conftest.children(), threading.enumerate())
        multiprocessing.active_children()  # it reaps
        time.sleep(0.01)
print("ended all ranks, whenever it came")
"""


def test_a_ctrl_c_at_any_moment_of_the_start_ends_all_ranks():
    """50 moments, from the beginning of the call until a while after the ranks are up. A process of its own: of what
    the standard library has begun at that moment, it may leave a pipe open.
    """
    ran = subprocess.run([sys.executable, "-c", TRAINER], capture_output=True, text=True, timeout=240, check=False)
    assert "ended all ranks, whenever it came" in ran.stdout, ran.stderr[-4000:]


HOOKED = """
import os, signal, time
import holdfast
from tests import conftest
from tests.interrupt import Alarm, handler_raises
from tests.process import ranks
trainer = os.getpid()
def interrupt():
    os.kill(trainer, signal.SIGINT)
    for _ in range(1000):
        pass  # its handler runs here
os.register_at_fork(after_in_parent=interrupt)
for error in (KeyboardInterrupt, Alarm):
    try:
        with handler_raises(error):
            holdfast.spawn(ranks.wait_for_ever, nprocs=2, start_method="fork")
    except error:
        print("interrupted", conftest.children())
"""


def test_a_ctrl_c_in_a_hook_at_the_fork_is_not_lost():
    """Python prints and forgets what is raised there; the trainer would wait for its ranks for ever."""
    command = [sys.executable, "-c", HOOKED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert out == 2 * "interrupted set()\n", err[-4000:]


LOCKED = """
import logging, os, signal, sys, threading
import holdfast
from holdfast import DataLoader
from tests.interrupt import Alarm, handler_raises
from tests.process import ranks
sys.unraisablehook = lambda trouble: None
# What Python's own hook does as it begins, with the signal pending: it has the lock, and is left.
acquire, armed = logging._acquireLock, []
def interrupted():
    acquire()
    if armed:
        armed.clear()
        signal.raise_signal(signal.SIGINT)
os.register_at_fork(before=interrupted, after_in_parent=lambda: logging._releaseLock() if armed else None)
for start in (
    lambda: holdfast.spawn(ranks.nothing, nprocs=2, start_method="fork"),
    lambda: list(DataLoader(range(8), num_workers=1, multiprocessing_context="fork")),
):
    armed.append(True)
    try:
        with handler_raises(Alarm):
            start()
    except Alarm:
        pass
    armed.clear()
    thread = threading.Thread(target=logging.getLogger("holdfast").warning, args=("somebody else logs",), daemon=True)
    thread.start()
    thread.join(60)
    print(thread.is_alive())
"""


@pytest.mark.skipif(not hasattr(logging, "_acquireLock"), reason="this Python takes the lock in C")
def test_a_handler_that_raises_in_the_hook_of_logging_leaves_no_lock_taken():
    """Python's logging takes its lock before a fork and gives it back behind it; any thread that logs would hang."""
    command = [sys.executable, "-c", LOCKED]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.stdout == "False\nFalse\n", ran.stderr[-4000:]


WAITING = """
import holdfast
from tests import conftest
from tests.interrupt import Alarm, Interrupt, handler_raises
from tests.process import ranks
cut = 0
for moment in range(1, 161, 4):
    context = holdfast.spawn(ranks.nothing, nprocs=1, join=False, start_method="fork")
    try:
        with handler_raises(Alarm), Interrupt(moment):
            context.stop()
    except Alarm:
        cut += 1
    try:
        context.join()
    except KeyboardInterrupt:  # they were stopped
        pass
print(cut > 15, conftest.children())
"""


def test_a_handler_that_raises_while_the_end_of_ranks_is_awaited_leaves_no_lock_taken():
    """At whatever moment: who waits once more hears of the end."""
    command = [sys.executable, "-c", WAITING]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ran.stdout == "True set()\n", ran.stderr[-4000:]
