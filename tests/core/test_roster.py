"""A worker's phases: the table of moves holds, and each move in it happens."""

import signal

import pytest

from holdfast.core.ledger import Ledger
from holdfast.core.messages import (
    Allowed,
    Booted,
    Cause,
    Drawn,
    Exhausted,
    Exited,
    Leave,
    Opened,
    Place,
    Spared,
    Stage,
    Withdrawn,
)
from holdfast.core.roster import MOVES, Phase, WorkerState
from holdfast.policy import Policy


def died(life, task=-1, cause=Cause.SIGNAL, code=signal.SIGSEGV):
    on = None if task < 0 else Place(task, 0, Stage.FETCH, 0.1)
    return Exited(0, life, 1.0, cause, code, on)


def left(life):
    return died(life, cause=Cause.ASKED)


LAZY = {"in_order": False, "even": True}
STREAMS = {"streams": True, "policy": Policy(strikes=1)}
# What happens to worker 0 of two, and its phase after each event.
LIVES = {
    "a pool starts it when it is needed": (
        LAZY,
        [
            (Opened(0.0), Phase.WAITING),
            (Drawn(0, 1, 2), Phase.STARTING),
            (died(1, 0), Phase.STARTING),
            (Booted(0, 2), Phase.READY),
            (died(2), Phase.STARTING),
        ],
    ),
    "its task is withdrawn and it is spared": (
        LAZY,
        [
            (Drawn(0, 1, 2), Phase.STARTING),
            (Withdrawn(0), Phase.STOPPING),
            (Spared(0, 1), Phase.STARTING),
            (Drawn(1, 1, 2), Phase.STARTING),
            (Withdrawn(1), Phase.STOPPING),
            (Booted(0, 1), Phase.LEAVING),
            (Spared(0, 1), Phase.READY),
            (Drawn(2, 1, 2), Phase.READY),
            (Withdrawn(2), Phase.LEAVING),
            (left(1), Phase.STARTING),
        ],
    ),
    "memory is short": (
        {},
        [
            (Opened(0.0), Phase.STARTING),
            (Exited(1, 1, 1.0, Cause.UNBORN, 11, None), Phase.STARTING),
            (Allowed(2, False), Phase.STARTING),
            (died(1, cause=Cause.UNBORN, code=11), Phase.AWAY),
            (Allowed(2, False), Phase.STARTING),
            (Booted(0, 1 + 1), Phase.READY),
            (died(2, cause=Cause.RECYCLED, code=Leave.PROCESSES), Phase.AWAY),
        ],
    ),
    "its stream ends": (
        STREAMS,
        [
            (Booted(0, 1), Phase.READY),
            (Drawn(0, 1), Phase.READY),
            (Exhausted(0, 1, 0, 0), Phase.ENDED),
            (died(1), Phase.GONE),
        ],
    ),
    "its stream is given up before it came up": (
        STREAMS,
        [(Drawn(0, 1), Phase.STARTING), (died(1, 0), Phase.GONE)],
    ),
}


@pytest.mark.parametrize("name", LIVES)
def test_a_life(name):
    more, events = LIVES[name]
    ledger = Ledger(2, 2, more.get("policy", Policy()), **{k: v for k, v in more.items() if k != "policy"})
    for event, phase in events:
        ledger.on(event)
        assert ledger._workers[0].phase is phase, event


def test_who_is_not_needed_yet_goes_and_comes_without_a_process():
    ledger = Ledger(2, 2, Policy(), **LAZY)
    second = ledger._workers[1]
    ledger.on(Allowed(1, False))
    assert second.phase is Phase.AWAY
    ledger.on(Allowed(2, False))
    assert second.phase is Phase.WAITING


def test_every_move_in_the_table_happens(monkeypatch):
    seen = set()
    move = WorkerState.move

    def noted(worker, to):
        seen.add((worker.phase, to))
        move(worker, to)

    monkeypatch.setattr(WorkerState, "move", noted)
    for name in LIVES:
        test_a_life(name)
    test_who_is_not_needed_yet_goes_and_comes_without_a_process()
    assert seen == {(old, new) for old, moves in MOVES.items() for new in moves}


@pytest.mark.parametrize("old", Phase)
def test_no_other_move_is_made(old):
    for new in set(Phase) - MOVES[old]:
        with pytest.raises(AssertionError, match=f"worker 3: {old.name} to {new.name}"):
            WorkerState(3, 1, old).move(new)
