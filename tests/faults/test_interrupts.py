"""Signal handlers that raise inside next() and iter() lose nothing without a word. More: `make soak-interrupts`."""

import itertools
import logging
import os
import sys

import pytest

import holdfast
from holdfast import Pool, spawn
from holdfast.shm import forks

from ..conftest import children, until
from ..interrupt import Alarm, Interrupt, handler_raises
from ..process import calls, ranks
from ..process.data import Images, Numbers
from .interrupts import ROWS, exact, timed

# Python prints what is raised in the callback of a weak reference, and goes on. So do we.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("row", ROWS)
def test_a_handler_that_raises_at_one_exact_moment_loses_nothing(row):
    """The next call gives the batch that was due, or LoaderTorn; after that a new iter() starts clean."""
    counts = exact(row, 24, seed=list(ROWS).index(row))
    assert counts["given again"] + counts["torn"] > 3


@pytest.mark.parametrize("row", ROWS)
def test_a_timer_whose_handler_raises_loses_nothing(row):
    """The same with the system's own timers, at random moments."""
    counts = timed(row, 30, seed=1)
    assert counts["given again"] + counts["torn"] + counts["in time"] > 20


def _iter():
    iter(holdfast.DataLoader(Numbers(6), batch_size=3, num_workers=1, multiprocessing_context="fork"))


def _spawn():
    spawn(ranks.nothing, nprocs=1, start_method="fork")


@pytest.mark.parametrize("call", [_iter, _spawn])
def test_a_handler_that_raises_inside_logging_while_we_fork_leaves_no_lock_taken(call, monkeypatch):
    """Logging holds its lock during a fork, and Python only prints what is raised there."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)  # pytest's keeps frames, and so descriptors
    for at in itertools.count(1):
        try:
            with handler_raises(Alarm), Interrupt(at, logging.__file__) as cut:
                call()
        except Alarm:
            pass
        if cut.seen < at:
            break
    assert at > 10 or sys.version_info >= (3, 13)  # where no Python function takes it


def test_a_handler_that_raises_in_our_hooks_while_somebody_forks_lets_slots_come_back(monkeypatch):
    """Nothing that is lent comes back while a fork is under way: we must hear of its end."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    iterator = iter(holdfast.DataLoader(Images(6, 300), batch_size=1, num_workers=1, multiprocessing_context="fork"))
    batch = next(iterator)
    slots = iterator._host._channels[0].slots
    assert slots.lent
    before = children()
    for at in itertools.count(1):
        try:
            with handler_raises(Alarm), Interrupt(at, forks.__file__) as cut:
                if os.fork() == 0:
                    os._exit(0)
        except Alarm:
            pass
        for child in children() - before:
            os.waitpid(child, 0)
        assert None not in slots._guards.values(), f"at bytecode {at}"
        assert all(fork.done for fork in itertools.chain(*forks._guards.values())), f"at bytecode {at}"
        if cut.seen < at:
            break
    assert at > 100
    del batch
    assert len(list(iterator)) == 5


# Pools ---------------------------------------------------------------------------------------------------------------


def submitted(pool):
    return [pool.submit(calls.square, 3).result(60)]


def cancelled(pool):
    future = pool.submit(calls.square, 3)
    future.cancel()
    return [9]


def mapped(pool):
    return list(pool.map(calls.square, [3, 3], return_exceptions=True))


@pytest.mark.parametrize("use", [submitted, cancelled, mapped])
def test_a_handler_that_raises_at_any_moment_of_a_call_leaves_the_pool_as_it_was(use):
    """Its thread hears of the next call, nothing stays locked, and what was raised is nobody's result."""
    with Pool(2, mp_context="fork") as pool:
        use(pool)
        with Interrupt(0) as counted:
            use(pool)
        cut = 0
        for at in range(1, counted.seen, 2):
            until(lambda: pool._dispatcher._asleep, "the pool's thread never rests", 60)
            try:
                with handler_raises(Alarm), Interrupt(at):
                    got = use(pool)
                assert set(got) == {9}, f"{got} at moment {at}"
            except Alarm:
                cut += 1
            assert pool.submit(calls.square, 7).result(60) == 49, f"after moment {at}"
        assert cut > counted.seen // 4
