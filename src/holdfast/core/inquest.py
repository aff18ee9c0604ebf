"""Inquest: what a death says about the task that it fell on, and about going on at all.

A crash is a strike against the sample that was being loaded. So is a kill by the kernel for memory, if no other worker
was at work: then nobody else took the memory. Any other death that may have come from outside is a strike only if
chance does not explain it (see the end of this file). When the restart budget is used up (restart_budget.py), there are
two cases. If the deaths fell on one place, the sample there is bad, however few strikes it has. If not, going on would
not help. The ledger does what the verdict says.
"""

import math
import signal
from enum import Enum, auto
from typing import NamedTuple

from holdfast.core.dispatch import Task, past_of
from holdfast.core.messages import NO_SUSPICION, Cause, Exited, Place, Stage, Suspicion
from holdfast.core.restart_budget import RestartBudget
from holdfast.core.roster import WorkerState
from holdfast.policy import Policy

# Signals that a program's own faults raise; all others may come from anybody.
OWN_FAULT = frozenset(
    (
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSYS,
        signal.SIGTRAP,
    )
)
WHOLE_TASK = -1  # the position that stands for collate and send


class AfterDeath(Enum):
    """What is to be done after a death."""

    AGAIN = auto()  # a new life, and the task once more
    BAD = auto()  # the sample, or the whole task, is given up
    RENEW = auto()  # all workers may have inherited a held lock: new ones, from a new keeper
    STOP = auto()  # going on would not help


class Verdict(NamedTuple):
    """`strike` of `needed`: the strikes against the sample, and how many make it bad. 0 of 0 if nobody is to blame."""

    outcome: AfterDeath
    strike: int
    needed: int
    suspicion: Suspicion = NO_SUSPICION


class Inquest:
    """It writes the past of each task (`Task.past`), and what its next life must know: `Task.alone`, `Task.stay`."""

    def __init__(self, policy: Policy, workers: int) -> None:
        self._strikes = policy.strikes
        self._workers = workers
        self.budget = RestartBudget(workers, policy.restarts)
        self.opened_at = 0.0
        self.proven = False  # some sample got through, so not all workers have inherited a held lock
        self._renewed = False
        self._kills = 0  # deaths that may have come from outside; several on one sample count once
        self._outside = 0  # all of them
        self._luck = 1.0  # the chance that the last death that was judged was plain bad luck

    def hold(
        self, event: Exited, worker: WorkerState, task: Task | None, on: Place | None, alone: bool = False
    ) -> Verdict:
        """A worker died. `task`, `on`: what the death is charged to, if it is charged. `alone`: no other had a task."""
        self._count(event, worker, task, on)
        counted = task is not None and task.lives is not None  # its attempts are bounded anyway
        if not counted and self._looks_like_inherited_lock(event, on):
            self._renewed = True
            return Verdict(AfterDeath.RENEW, 0, 0)
        strike, needed, bad, suspicion = self._judge(event, task, on, alone)
        if not bad and not counted and self.budget.is_out(worker.id):
            bad = task is not None and on is not None and self._is_stuck_on(worker, task, on)
            if not bad:
                return Verdict(AfterDeath.STOP, strike, needed, suspicion)
            # The deaths fell on this place: its sample cannot be loaded here.
        return Verdict(AfterDeath.BAD if bad else AfterDeath.AGAIN, strike, needed, suspicion)

    def refuse(self, event: Exited, worker: WorkerState) -> bool:
        """It was refused something and has to go on without. False once it was refused too often."""
        self._count(event, worker, None, None)
        return not self.budget.is_out(worker.id)

    def spend(self, task: Task, on: Place) -> None:
        """A worker left for a fresh one while it was on this task. If that one comes no further, it has to stay."""
        past = past_of(task)
        position = on.position if on.stage is Stage.FETCH else task.samples
        if position <= past.spent:
            task.stay = position
        past.spent = max(past.spent, position)

    def _count(self, event: Exited, worker: WorkerState, task: Task | None, on: Place | None) -> None:
        self._outside += _maybe_chance(event)
        if not worker.came_up and not _maybe_chance(event):
            self.budget.died_in_boot(worker.id)
        if task is None or on is None:
            self.budget.died(worker.id, None)
            return
        past = past_of(task)
        if on.position > past.reached:
            self.budget.progress()
            self.proven = self.proven or on.position > 0
            # From the second attempt on, what was loaded is kept for the next life: only then is it progress.
            past.reached = on.position if task.attempt else -1
        for position in [p for p in past.hits if WHOLE_TASK < p < on.position]:
            del past.hits[position]  # it got through this time: not poison
        self.budget.died(worker.id, (task.id, blamed_position(on)))

    def _is_stuck_on(self, worker: WorkerState, task: Task, on: Place) -> bool:
        hardly_chance = self._luck < LAST_CHANCE
        return self.budget.is_stuck_on(worker.id, (task.id, blamed_position(on)), hardly_chance)

    def _judge(
        self, event: Exited, task: Task | None, on: Place | None, alone: bool
    ) -> tuple[int, int, bool, Suspicion]:
        """(strike, strikes needed, bad, why) of what the worker was on; 0 strikes if nobody is to blame."""
        nobody = (0, 0, False, NO_SUSPICION)
        maybe_chance = _maybe_chance(event)
        if task is not None and task.lives is not None:
            return task.attempt + 1, task.lives, task.attempt + 1 >= task.lives, NO_SUSPICION
        if task is None or on is None:
            self._kills += maybe_chance
            return nobody
        if on.stage is Stage.FETCH_MANY:
            self._kills += maybe_chance
            task.alone = True  # one by one, so that the next death has a name
            return nobody
        if on.stage is Stage.REPLAY and maybe_chance:
            self._kills += 1
            return nobody  # what it replays was loaded before, and did no harm
        past = past_of(task)
        position = blamed_position(on)
        if not maybe_chance:
            strike = past.crashes[position] = past.crashes.get(position, 0) + 1
            return strike, self._strikes, strike >= self._strikes, NO_SUSPICION
        suspicion = self._suspect(event, past.hits, position, on.seconds, alone)
        bad = suspicion.here >= self._strikes and suspicion.chance < CHANCE
        return suspicion.here, self._strikes, bad or suspicion.alone >= self._strikes, suspicion

    def _suspect(
        self, event: Exited, all_hits: dict[int, tuple[int, float, int]], position: int, seconds: float, alone: bool
    ) -> Suspicion:
        """One more death here that may have come from outside."""
        hits, exposed_s, proofs = all_hits.get(position, (0, 0.0, 0))
        self._kills += hits == 0
        hits, exposed_s, proofs = hits + 1, exposed_s + seconds, proofs + (alone and event.for_memory)
        all_hits[position] = (hits, exposed_s, proofs)
        lived_s = (event.at - self.opened_at) * self._workers
        self._luck = luck(hits, self._kills - 1 + hits, exposed_s, lived_s)
        return Suspicion(hits, self._outside, self._luck, proofs)

    def _looks_like_inherited_lock(self, event: Exited, on: Place | None) -> bool:
        """A hang on the first sample of all: the fork may have copied a lock that was held. True once at most."""
        return (
            event.cause is Cause.DEADLINE and not self.proven and not self._renewed and (on is None or on.position <= 0)
        )


def is_charged(task: Task, on: Place, event: Exited) -> bool:
    """Is this death charged to the task? If the task has a number of lives: yes, once it has begun. If not: yes, unless
    the keeper died.
    """
    if task.lives is not None:
        return on.stage >= Stage.FETCH
    return event.cause is not Cause.KEEPER


def blamed_position(on: Place) -> int:
    """The sample's; that of the whole task, where no sample was being loaded; a spare's, below that."""
    if on.spare:
        return WHOLE_TASK - on.spare
    return on.position if on.stage is Stage.FETCH else WHOLE_TASK


def _maybe_chance(event: Exited) -> bool:
    """True for a death that may have come from outside."""
    return event.cause is Cause.SIGNAL and event.code not in OWN_FAULT


# Is this sample guilty, or was it only unlucky?
#
# The code that was running causes a crash (SIGSEGV, an exit, our deadline). It may cause a SIGKILL or SIGTERM as well:
# a sample that makes the kernel kill its worker looks just like a scheduler that kills workers at random. So such a
# death counts only if chance does not explain it, or if the kernel says that it was for memory, and the worker was the
# only one at work.
#
# Suppose that the kills are random. Then each of the `deaths` so far fell somewhere into the time that all workers
# together have lived. The chance that one of them fell on this sample is the sample's share of that time: the seconds
# for which it was being loaded whenever it was hit. The chance that at least `hits` of `deaths` fell there is a
# binomial tail. A poison sample kills again within milliseconds, and the lives are longer than that: its tail shrinks
# with each strike. An innocent sample gets through sooner or later, and is cleared.


# An innocent sample may be blamed less than once in a million.
CHANCE = 1e-6
# If the loader would give up otherwise, this much certainty is enough.
LAST_CHANCE = 1e-2
# Kills come in clusters and in rhythms. A sample that was hit is tried again at once, so it may be in step with them:
# we assume that it is hit this many times as often as any other moment.
RHYTHM = 1.5


def tail(hits: int, deaths: int, share: float) -> float:
    """Chance of `hits` or more of `deaths` falling on a `share` of the time."""
    if hits <= 0 or share >= 1.0:
        return 1.0
    if share <= 0.0:
        return 0.0
    log_in, log_out = math.log(share), math.log1p(-share)
    total = 0.0
    for k in range(hits, deaths + 1):
        term = (
            math.lgamma(deaths + 1)
            - math.lgamma(k + 1)
            - math.lgamma(deaths - k + 1)
            + k * log_in
            + (deaths - k) * log_out
        )
        total += math.exp(term)
    return min(total, 1.0)


def luck(hits: int, deaths: int, exposed_s: float, lived_s: float) -> float:
    """The chance that plain bad luck hits one sample `hits` times. It was exposed for `exposed_s` of `lived_s`."""
    weight = RHYTHM * exposed_s
    rest = max(lived_s - exposed_s, 0.0)
    share = weight / (weight + rest) if weight + rest > 0 else 1.0
    return tail(hits, max(deaths, hits), share)
