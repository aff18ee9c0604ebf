"""Ledgers that are open, and events that tests of the ledger tell them."""

import signal

from holdfast.core.ledger import Ledger
from holdfast.core.messages import Booted, Cause, Exited, Opened, Place, Stage
from holdfast.policy import Policy


def opened(workers=2, depth=2, policy=None, **more):
    ledger = Ledger(workers, depth, policy or Policy(), **more)
    ledger.on(Opened(0.0))
    for worker in range(workers):
        ledger.on(Booted(worker, 1))
    return ledger


def crash(worker, life, task, position=0, *, at=1.0, code=signal.SIGSEGV, stage=Stage.FETCH, seconds=0.001):
    return Exited(worker, life, at, Cause.SIGNAL, code, Place(task, position, stage, seconds))


def kinds(actions):
    return [type(a).__name__ for a in actions]
