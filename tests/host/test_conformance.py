"""Every promise of core/host.py, on every host. A test is a promise: `@promise` names the method and its sentence."""

import inspect
import re
import signal
import threading
import time

import pytest

from holdfast.core import host as contract
from holdfast.core.messages import (
    Booted,
    BootFailed,
    Cause,
    Exhausted,
    Exited,
    Finished,
    Place,
    Returned,
    Spared,
    Stage,
)
from holdfast.local.trainer.local_host import LocalHost
from holdfast.testing.socket_host import SocketHost
from tests.conftest import children, free_descriptors
from tests.host.jobs import ByTheLetter, order

PROMISED = set()
WAIT_S = 30.0


def promise(method, *sentences):
    """This test holds a host to these sentences of the docstring of that method."""
    PROMISED.update((method, sentence) for sentence in sentences)
    return lambda test: test


@pytest.fixture(params=[LocalHost, SocketHost], ids=["local", "socket"])
def maker(request):
    """Each host in turn."""
    return request.param


class Driver:
    """Somebody who uses a host, and remembers all that it said."""

    def __init__(self, maker, workers=1, boot_does="nothing", take_back=True, **more):
        asked = {"fork": True, "sample_timeout": None, "growth_bytes": None, "take_back": take_back, **more}
        self.host = maker(workers, 4, ByTheLetter(boot_does), **asked)
        self.events = []

    def __enter__(self):
        self.host.open()
        return self

    def __exit__(self, *_):
        for event in self.events:
            if isinstance(event, Finished | BootFailed) and event.result is not None:
                event.result.discard()
        self.host.close(0.0)

    def begin(self, worker=0, life=1):
        before = len(self.of(Booted, worker))
        self.host.start(worker, life)
        return self.until(Booted, worker, before + 1)

    def until(self, kind, worker=0, count=1):
        """The newest event of this kind, as soon as there are so many of this worker."""
        deadline = time.monotonic() + WAIT_S
        while len(found := self.of(kind, worker)) < count:
            assert time.monotonic() < deadline, f"no {kind.__name__} came: {self.events}"
            self.events += self.host.wait(1.0)
        return found[-1]

    def of(self, kind, worker=0):
        return [event for event in self.events if isinstance(event, kind) and event.worker == worker]

    def do(self, task, *what, worker=0, life=1):
        """What came of it."""
        self.host.send(worker, life, task, order(*what))
        self.host.flush()
        return self.until(Finished, worker, len(self.of(Finished, worker)) + 1)

    def ask(self, task, *what, worker=0, life=1):
        finished = self.do(task, *what, worker=worker, life=life)
        self.events.remove(finished)
        return finished.result.open()


def sentences(text):
    """Of a docstring; without those that are no promise."""
    flat = " ".join((text or "").split())
    found = re.findall(r"(?:[^.]|\.(?=\w))+\.", flat)
    return [s.strip() for s in found if not re.match(r"\s*(The caller|`\w+`:)", s)]


def test_every_promise_has_its_test():
    """And no test promises what the contract does not."""
    said = set()
    for kind in (contract.Host, contract.Result, contract.Job, contract.JobContext, contract.Output):
        for name, member in vars(kind).items():
            text = inspect.getdoc(member.fget if isinstance(member, property) else member)
            if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                said |= {(f"{kind.__name__}.{name}", sentence) for sentence in sentences(text)}
    assert said - PROMISED == set(), "promised, and not tested"
    assert PROMISED - said == set(), "tested, and not promised"


# Opening and closing ----------------------------------------------------------------------------------------------


@promise("Host.open", "Opens everything, or raises and leaves nothing open.")
def test_open_is_whole_or_nothing(maker):
    driver = Driver(maker)
    with free_descriptors(1), pytest.raises(OSError, match="open files"):
        driver.host.open()
    assert driver.host.closed


@promise("Host.closed", "True before `open`, and after `close`.")
def test_closed_says_whether_it_is(maker):
    driver = Driver(maker)
    assert driver.host.closed
    with driver:
        assert not driver.host.closed
    assert driver.host.closed


@promise("Host.close", "Ends every process within seconds.", "Does nothing the second time.")
def test_close_ends_every_process(maker, tmp_path):
    with Driver(maker, workers=2) as driver:
        driver.begin(0)
        driver.begin(1)
        driver.host.send(1, 1, 0, order("nap", 600.0))
        driver.host.flush()
        assert len(children()) >= 2
        began = time.monotonic()
        threading.Thread(target=driver.host.close).start()
        while children():
            assert time.monotonic() - began < WAIT_S
            time.sleep(0.01)
        driver.host.close()


@promise("Host.leftovers", "Gives incidents that were not told.")
def test_leftovers_are_told_once(maker):
    with Driver(maker) as driver:
        driver.begin()
        driver.host.close()
        assert list(driver.host.leftovers()) == []


# Lives ------------------------------------------------------------------------------------------------------------


@promise("Host.start", "Booted follows when the life is ready.")
@promise("Host.workers", "One handle per worker, in their order.")
@promise("Host.pid_of", "The process of this worker, or None while it is made and after its end.")
def test_a_life_begins(maker):
    with Driver(maker, workers=2) as driver:
        assert driver.host.pid_of(1) is None
        assert driver.begin(1) == Booted(1, 1)
        assert not driver.of(Booted, 0)
        _, pid, _ = driver.ask(0, "echo", worker=1)
        assert driver.host.workers[1].pid == driver.host.pid_of(1) == pid  # a handle waits until the host has heard it
        assert [handle.has_life for handle in driver.host.workers] == [False, True]
        driver.host.retire(1, 1)
        driver.until(Exited, 1)
        assert driver.host.pid_of(1) is None


@promise("Host.start", "BootFailed follows when its job raises in `boot`.")
def test_a_boot_that_raises_is_a_boot_that_failed(maker):
    with Driver(maker, boot_does="raise") as driver:
        driver.host.start(0, 1)
        failed = driver.until(BootFailed)
        driver.events.remove(failed)
        assert failed.result.failed
        assert failed.result.open().type_name == "KeyError"


@promise("Host.start", "Its Exited follows when it ends before that.")
def test_a_life_that_dies_in_boot_has_exited(maker):
    with Driver(maker, boot_does="die") as driver:
        driver.host.start(0, 1)
        exited = driver.until(Exited)
        assert (exited.life, exited.cause, exited.code) == (1, Cause.EXIT, 5)
        assert not driver.of(Booted)


@promise("Job.boot", "Is called once in each life, in its process, before `run`.")
def test_a_job_boots_once_in_each_life(maker):
    with Driver(maker) as driver:
        pids = set()
        for life in (1, 2):
            driver.begin(0, life)
            about = driver.ask(10 * life, "about", life=life)
            again = driver.ask(10 * life + 1, "about", life=life)
            assert about["pid"] == about["booted in"] == again["pid"]
            assert (about["runs"], again["runs"]) == (1, 2)
            pids.add(about["pid"])
            driver.host.retire(0, life)
            driver.until(Exited, count=life)
        assert len(pids) == 2


@promise("Host.retire", "The life ends after the task it is on, at once if it is on none.", "Its Exited says RECYCLED.")
def test_a_retired_life_ends_after_its_task(maker, tmp_path):
    with Driver(maker) as driver:
        driver.begin()
        driver.host.retire(0, 1)
        exited = driver.until(Exited)
        assert exited.cause is Cause.RECYCLED
        driver.begin(0, 2)
        driver.host.send(0, 2, 0, order("nap_until", str(tmp_path / "go")))
        driver.host.flush()
        time.sleep(0.1)
        driver.host.retire(0, 2)
        (tmp_path / "go").touch()
        assert driver.until(Exited, count=2).cause is Cause.RECYCLED
        assert [finished.task for finished in driver.of(Finished)] == [0]


@promise("Host.retire", "A task that it has not begun comes back as Returned, or is still with it when it ends.")
def test_what_a_retired_life_has_not_begun_is_not_done(maker, tmp_path):
    with Driver(maker) as driver:
        driver.begin()
        driver.host.send(0, 1, 0, order("nap_until", str(tmp_path / "go")))
        driver.host.send(0, 1, 1, order("note", str(tmp_path / "noted")))
        driver.host.flush()
        time.sleep(0.1)
        driver.host.retire(0, 1)
        (tmp_path / "go").touch()
        driver.until(Exited)
        assert [finished.task for finished in driver.of(Finished)] == [0]
        assert [returned.task for returned in driver.of(Returned)] in ([], [1])
        assert not (tmp_path / "noted").exists()


@promise("Host.release", "The life leaves by itself, and its Exited says ASKED.")
def test_a_released_life_leaves(maker):
    with Driver(maker) as driver:
        driver.begin()
        driver.host.release(0, 1, 60.0)
        assert driver.until(Exited).cause is Cause.ASKED


@promise("Host.release", "A life that stays is killed after `grace_s`.")
def test_a_released_life_that_stays_is_killed(maker):
    with Driver(maker) as driver:
        driver.begin()
        driver.host.send(0, 1, 0, order("nap", 600.0))
        driver.host.flush()
        time.sleep(0.1)
        driver.host.release(0, 1, 0.2)
        assert driver.until(Exited).cause is Cause.ASKED


@promise("Host.renew", "Ends all workers, and nothing is told of it.")
def test_renew_begins_anew(maker):
    with Driver(maker, workers=2) as driver:
        driver.begin(0)
        driver.begin(1)
        before = {driver.ask(worker, "echo", worker=worker)[1] for worker in (0, 1)}
        driver.host.renew()
        driver.begin(0, 2)
        driver.begin(1, 2)
        after = {driver.ask(10 + worker, "echo", worker=worker, life=2)[1] for worker in (0, 1)}
        assert not before & after
        assert not before & children()
        assert not driver.of(Exited, 0) + driver.of(Exited, 1)


# Tasks ------------------------------------------------------------------------------------------------------------


@promise("Job.run", "Is called once for each task, with the payload that was sent.")
@promise("Host.send", "A life does its tasks in the order in which they were sent.")
@promise("Result.worker", "The worker that made it.")
@promise("Result.open", "Gives what the job packed.")
def test_tasks_are_done_in_order_and_once(maker):
    with Driver(maker, workers=2) as driver:
        driver.begin(1)
        for task in range(4):
            driver.host.send(1, 1, task, order("echo", task, "x" * task))
        driver.host.flush()
        driver.until(Finished, 1, count=4)
        finished = driver.of(Finished, 1)
        assert [event.task for event in finished] == [0, 1, 2, 3]
        for task, event in enumerate(finished):
            assert event.result.worker == 1
            me, _, args = event.result.open()
            assert (me, args) == ((1, 1), (task, "x" * task))
        driver.events.clear()
        assert driver.ask(4, "about", worker=1)["runs"] == 5


@promise("Host.send", "Never blocks.")
def test_send_never_blocks(maker):
    """Neither for a worker that is busy, nor for payloads that are large."""
    with Driver(maker) as driver:
        driver.begin()
        driver.host.send(0, 1, 0, order("nap", 600.0))
        driver.host.flush()
        began = time.monotonic()
        for task in range(1, 4):
            driver.host.send(0, 1, task, order("echo", bytes(8 << 20)))
        assert time.monotonic() - began < WAIT_S


@promise("Host.send", "A task that is sent to a life that has ended is lost.")
def test_a_task_for_the_dead_is_lost(maker):
    with Driver(maker) as driver:
        driver.begin()
        driver.host.send(0, 1, 0, order("die", 0))
        driver.until(Exited)
        driver.host.send(0, 1, 1, order("echo"))
        driver.begin(0, 2)
        assert driver.ask(2, "about", life=2)["runs"] == 1


@promise("Host.flush", "Without it, tasks go out in `wait` at the latest.")
def test_wait_sends_what_was_not_flushed(maker):
    with Driver(maker) as driver:
        driver.begin()
        driver.host.send(0, 1, 0, order("echo"))
        driver.until(Finished)


@promise("Host.take_back", "Returned follows for one task that the life has not begun, if there is one.")
@promise("Host.take_back", "The life never begins it.")
def test_a_task_that_is_taken_back_is_not_done(maker, tmp_path):
    with Driver(maker) as driver:
        driver.begin()
        driver.host.take_back(0, 1)
        driver.host.send(0, 1, 0, order("nap_until", str(tmp_path / "go")))
        driver.host.send(0, 1, 1, order("note", str(tmp_path / "noted")))
        driver.host.flush()
        time.sleep(0.1)
        driver.host.take_back(0, 1)
        driver.host.take_back(0, 1)
        assert driver.until(Returned).task == 1
        (tmp_path / "go").touch()
        driver.until(Finished)
        driver.ask(2, "echo")
        assert len(driver.of(Returned)) == 1
        assert not (tmp_path / "noted").exists()


@promise("Host.kill", "A life that is on this task is killed, and its Exited says ASKED.")
@promise("Host.kill", "What it has not begun comes back as Returned.")
def test_a_life_is_killed_for_its_task(maker):
    with Driver(maker) as driver:
        driver.begin()
        driver.host.send(0, 1, 0, order("nap", 600.0))
        driver.host.send(0, 1, 1, order("echo"))
        driver.host.flush()
        time.sleep(0.3)
        driver.host.kill(0, 1, 0)
        assert driver.until(Exited).cause is Cause.ASKED
        assert [returned.task for returned in driver.of(Returned)] == [1]


@promise("Host.kill", "Spared follows for a life that is on something else, or on nothing.")
def test_a_life_is_spared(maker, tmp_path):
    with Driver(maker) as driver:
        driver.begin()
        driver.do(0, "echo")
        driver.host.kill(0, 1, 0)
        driver.until(Spared)
        driver.host.send(0, 1, 1, order("nap_until", str(tmp_path / "go")))
        driver.host.send(0, 1, 2, order("echo"))
        driver.host.flush()
        time.sleep(0.1)
        driver.host.kill(0, 1, 2)
        driver.until(Spared, count=2)
        (tmp_path / "go").touch()
        driver.until(Finished, count=2)
        assert not driver.of(Exited)


@promise("Job.run", "A life that raises `Spent` here ends, and its Exited says RECYCLED.")
def test_a_life_that_is_spent_ends(maker):
    with Driver(maker) as driver:
        driver.begin()
        driver.host.send(0, 1, 0, order("leave"))
        assert driver.until(Exited).cause is Cause.RECYCLED


# Results ----------------------------------------------------------------------------------------------------------


@promise("Result.failed", "True where the job replied with an error.")
def test_a_result_says_whether_it_failed(maker):
    with Driver(maker) as driver:
        driver.begin()
        assert not driver.do(0, "echo").result.failed
        failed = driver.do(1, "fail")
        assert failed.result.failed
        driver.events.remove(failed)
        assert failed.result.open().type_name == "ValueError"


@promise("Result.open", "Raises what reading that raises, for instance in a `__setstate__` of the user.")
def test_what_opening_raises_comes_out(maker):
    with Driver(maker) as driver:
        driver.begin()
        with pytest.raises(ValueError, match="not to be opened"):
            driver.ask(0, "closed_letter")
        assert driver.ask(1, "echo", "well")[2] == ("well",)


@promise("Result.discard", "Gives its memory back, unopened.")
def test_results_that_are_discarded_leave_room(maker):
    """Far more of them than could be kept."""
    with Driver(maker) as driver:
        driver.begin()
        for task in range(200):
            finished = driver.do(task, "echo", bytes(100_000))
            driver.events.remove(finished)
            finished.result.discard()


# What is told -----------------------------------------------------------------------------------------------------


@promise("Host.wait", "Gives what has happened since the last call.")
@promise("Host.wait", "Blocks until something happens, at most `timeout_s`.")
def test_wait_waits_as_long_as_it_may(maker):
    with Driver(maker) as driver:
        driver.begin()
        began = time.monotonic()
        assert list(driver.host.wait(0.2)) == []
        assert 0.15 < time.monotonic() - began < WAIT_S
        assert list(driver.host.wait(0)) == []
        driver.host.send(0, 1, 0, order("nap", 0.1))
        (finished,) = driver.host.wait(None)
        assert finished.task == 0
        finished.result.discard()
        assert list(driver.host.wait(0.1)) == []


@promise("Host.wait", "Meanwhile `resting` is True.")
@promise("Host.ring", "Makes a `wait` return, from any thread.")
def test_the_bell_ends_a_wait(maker):
    with Driver(maker) as driver:
        driver.begin()
        rested = []

        def ring():
            while not driver.host.resting:
                time.sleep(0.001)
            rested.append(True)
            driver.host.ring()

        assert not driver.host.resting
        ringer = threading.Thread(target=ring)
        ringer.start()
        assert list(driver.host.wait(None)) == []
        ringer.join()
        assert rested == [True]
        assert not driver.host.resting


@promise("Host.wait", "All that a life finished is told before its Exited.", "Each life ends in one Exited.")
def test_what_was_finished_is_told_before_the_death(maker):
    with Driver(maker) as driver:
        for life in (1, 2, 3):
            driver.begin(0, life)
            for task in range(3):
                driver.host.send(0, life, 10 * life + task, order("echo"))
            driver.host.send(0, life, 10 * life + 3, order("die", 0))
            driver.host.flush()
            driver.until(Exited, count=life)
            assert len(driver.of(Finished)) == 3 * life
            assert isinstance(driver.events[-1], Exited)
            assert list(driver.host.wait(0.05)) == []


@promise("Host.wait", "Says what the life was on, or None where nobody knows.")
def test_a_death_says_where_it_was(maker):
    with Driver(maker) as driver:
        driver.begin()
        driver.host.send(0, 1, 7, order("die", 3))
        exited = driver.until(Exited)
        assert (exited.cause, exited.code) == (Cause.SIGNAL, signal.SIGKILL)
        assert exited.on is None or exited.on[:3] == Place(7, 3, Stage.FETCH, 0.0)[:3]


@promise("Host.wait", "Kills a life that is on one place for longer than it may, and its Exited says DEADLINE.")
def test_a_life_that_hangs_is_killed(maker):
    with Driver(maker, sample_timeout=0.5) as driver:
        driver.begin()
        driver.host.send(0, 1, 0, order("nap", 600.0))
        assert driver.until(Exited).cause is Cause.DEADLINE


def test_a_retired_life_that_hangs_is_killed_for_that(maker):
    """So its sample is charged, and not tried for ever."""
    with Driver(maker, sample_timeout=0.5) as driver:
        driver.begin()
        driver.host.send(0, 1, 0, order("nap", 600.0))
        driver.host.flush()
        time.sleep(0.1)
        driver.host.retire(0, 1)
        assert driver.until(Exited).cause is Cause.DEADLINE


def test_a_death_between_two_attempts_names_the_task(maker):
    """No deadline runs while a worker waits for its next attempt; but it has begun."""
    with Driver(maker) as driver:
        driver.begin()
        driver.host.send(0, 1, 7, order("die", 3, Stage.IDLE))
        on = driver.until(Exited).on
        assert on is None or (on.task, on.stage) == (7, Stage.IDLE)


@promise("Host.wait", "Tells Gone of a result that is lost after its Finished; but no result is lost with `fixed`.")
def test_no_result_is_lost_in_silence(maker):
    """Neither of these hosts loses one: it can be opened when its worker is long gone."""
    with Driver(maker, fixed=True) as driver:
        driver.begin()
        finished = driver.do(0, "echo", "well")
        driver.events.remove(finished)
        driver.host.send(0, 1, 1, order("die", 0))
        driver.until(Exited)
        assert finished.result.open()[2] == ("well",)


# Streams ----------------------------------------------------------------------------------------------------------


@promise("Host.marks", "The last mark that each worker gave with a reply, over all its lives.")
@promise("Host.marks", "It is always the same list.")
@promise("Host.abandon_below", "Forgets marks, items and ends of streams.")
def test_marks_are_kept(maker):
    with Driver(maker, workers=2) as driver:
        marks = driver.host.marks
        driver.begin(1)
        driver.ask(0, "mark", 41, worker=1)
        driver.ask(1, "mark", 42, worker=1)
        driver.ask(2, "echo", worker=1)
        assert list(driver.host.marks) == [0, 42]
        driver.host.send(1, 1, 3, order("die", 0))
        driver.until(Exited, 1)
        driver.begin(1, 2)
        assert driver.host.marks is marks
        assert list(marks) == [0, 42]
        driver.host.abandon_below(10)
        assert list(marks) == [0, 0]


@promise("Host.items", "How many items each worker gave whose stream has ended, as it counted them.")
@promise(
    "Host.ends",
    "What the next life of a worker whose stream has ended must know, or why the worker cannot say.",
    "A worker that has nothing to say is not there.",
)
def test_ends_of_streams_are_kept(maker):
    with Driver(maker, workers=3) as driver:
        for worker, told in ((0, b"this"), (1, b"")):
            driver.begin(worker)
            driver.host.send(worker, 1, worker, order("end_stream", 5 + worker, told))
            exhausted = driver.until(Exhausted, worker)
            assert (exhausted.task, exhausted.made) == (worker, 3)
        assert dict(driver.host.items) == {0: 5, 1: 6}
        assert dict(driver.host.ends) == {0: b"this", 1: contract.StreamEnd.NOT_KNOWN}
        driver.host.abandon_below(10)
        assert not driver.host.items
        assert not driver.host.ends


# In the worker ----------------------------------------------------------------------------------------------------


@promise("JobContext.words", "Begin at 0 with each worker.", "`KEPT_APART` stays over all its lives.")
def test_words_begin_at_nothing(maker):
    with Driver(maker) as driver:
        driver.begin()
        stage, _, samples, apart = driver.ask(0, "words")
        assert (stage, samples, apart) == (0, 0, 0)
        driver.ask(1, "keep_apart")
        driver.host.retire(0, 1)
        driver.until(Exited)
        driver.begin(0, 2)
        assert driver.ask(2, "words", life=2)[3] == 1


@promise("Output.space", "Is the same for all calls during one task, and empty at the first.")
@promise("JobContext.output", "Where the present task puts what it makes.")
def test_a_task_has_one_space(maker):
    with Driver(maker) as driver:
        driver.begin()
        for task in range(3):
            assert driver.ask(task, "spaces") == (True, True)
