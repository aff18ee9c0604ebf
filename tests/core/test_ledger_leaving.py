"""The ledger's rules for workers that leave, are refused or taken away: events in, actions out."""

import pytest

from holdfast.core.ledger import Ledger
from holdfast.core.messages import (
    Allowed,
    Cause,
    Deliver,
    Did,
    Drawn,
    Exhausted,
    Exited,
    Finished,
    Leave,
    Lost,
    Opened,
    Place,
    Retire,
    Send,
    Stage,
    Start,
)
from holdfast.policy import Policy

from .ledgers import crash, kinds, opened


def gone(worker, life, cause, code=0, on=None):
    return Exited(worker, life, 1.0, cause, code, on)


def test_tasks_of_a_worker_that_is_not_allowed_any_more_go_to_the_others():
    ledger = opened()
    for task in range(4):
        ledger.on(Drawn(task, 4))
    assert ledger.on(Allowed(1, False)) == [Retire(1, 1)]
    actions = ledger.on(gone(1, 1, Cause.RECYCLED, Leave.ASKED))
    assert [(a.worker, a.task) for a in actions] == [(0, 1), (0, 3)], "and no incident: we asked for it"
    assert ledger.on(Allowed(2, False)) == [Start(1, 2)]


def test_a_worker_that_ran_out_is_replaced_and_its_task_goes_on_in_a_fresh_one():
    ledger = opened()
    ledger.on(Drawn(0, 4))
    place = Place(0, 2, Stage.FETCH, 0.1)
    note, start, send = ledger.on(gone(0, 1, Cause.RECYCLED, Leave.MEMORY, place))
    assert (note.strike, start, send.attempt, send.stay) == (0, Start(0, 2), 1, -1)
    *_, send = ledger.on(gone(0, 2, Cause.RECYCLED, Leave.MEMORY, place))
    assert send.stay == 2, "a fresh worker came no further: this one must say what is wrong"


def test_a_process_that_cannot_be_had_leaves_fewer_workers():
    ledger = opened()
    ledger.on(Drawn(0, 4))
    note, send = ledger.on(gone(0, 1, Cause.UNBORN, 11))
    assert (note.did, note.at_work) == (Did.WENT_ON, 1)
    assert (send.worker, send.task) == (1, 0)
    assert ledger.allowed == 1


def test_a_task_that_may_be_done_once_is_not_done_again_after_any_end_of_its_worker():
    for cause in (Cause.PRESSURE, Cause.RECYCLED, Cause.KEEPER, Cause.SIGNAL):
        ledger = opened(in_order=False, even=True)
        ledger.on(Drawn(0, 1, 1))
        actions = ledger.on(gone(0, 1, cause, Leave.MEMORY, Place(0, 0, Stage.FETCH, 0.1)))
        assert not any(isinstance(a, Send) for a in actions), cause
        assert any(isinstance(a, Deliver) and isinstance(a.result, Lost) for a in actions), cause


@pytest.mark.parametrize("how", ["bad", "given up"])
def test_somebody_is_always_given_the_turn_while_paused(how):
    """The worker that held it was retired; the other one ends a later task."""
    ledger = opened(policy=Policy(bad_sample="skip" if how == "bad" else "raise", strikes=1))
    for task in range(4):
        ledger.on(Drawn(task, 4))
    ledger.on(Finished(0, 1, 0, "a"))
    ledger.on(Allowed(1, True))
    ledger.on(gone(1, 1, Cause.RECYCLED, Leave.ASKED))
    actions = ledger.on(Finished(0, 1, 2, "c", 1) if how == "bad" else crash(0, 1, 2))
    assert any(isinstance(a, Send) and a.task == 1 for a in actions)


def test_a_stream_that_died_after_its_end_lives_again_in_the_next_epoch():
    ledger = opened(streams=True)
    ledger.on(Drawn(0, 1))
    ledger.on(Drawn(1, 1))
    ledger.on(Exhausted(1, 1, 1, 0))
    ledger.on(gone(1, 1, Cause.SIGNAL, 9))
    assert ledger.lives == [1, -2]
    following = Ledger(2, 2, Policy(), streams=True, running=ledger.lives)
    assert following.on(Opened(2.0)) == [Start(1, 2)]


def test_a_worker_that_cannot_be_replaced_is_not_killed_for_ever():
    ledger = opened(streams=True, policy=Policy(restarts=3))
    ledger.on(Drawn(0, 1))
    kinds_of = [kinds(ledger.on(gone(0, life, Cause.PRESSURE, 9))) for life in range(1, 6)]
    assert kinds_of[-2][-1] == "Stop"


def test_workers_that_leave_as_planned_do_not_make_fewer():
    """A pool in which each worker does one task."""
    ledger = opened(4, 1, in_order=False, share=1, even=True)
    for task in range(4):
        ledger.on(Drawn(task, 1, 1))
    for task in range(4):
        ledger.on(Finished(task, 1, task, "r"))
    assert ledger.at_work == 0
    assert ledger.on(gone(0, 1, Cause.ASKED)) == [Start(0, 2)]
    assert ledger.allowed == 4
