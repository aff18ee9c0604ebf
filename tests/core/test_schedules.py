"""Random schedules of replies, deaths at every point, hangs, late messages, bad samples and stops.

Hypothesis' stateful machine plays host, workers and sampler against a ledger and checks, whatever happens: every task
ends exactly once and in turn, nobody is blamed who had not begun, and the story replayed gives the same actions.
`make soak-ledger` runs 100,000 of them.
"""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.core.dispatch import SPARES
from holdfast.core.ledger import Ledger
from holdfast.core.messages import (
    Allowed,
    Booted,
    Cause,
    Deliver,
    Discard,
    Drawn,
    Drop,
    Exhausted,
    Exited,
    Finished,
    Gone,
    Leave,
    Lost,
    Note,
    Opened,
    Place,
    Renew,
    Retire,
    Send,
    Short,
    Stage,
    Start,
    Stop,
)
from holdfast.policy import Policy

DEATHS = [
    (Cause.SIGNAL, signal.SIGSEGV),
    (Cause.SIGNAL, signal.SIGKILL),
    (Cause.SIGNAL, signal.SIGTERM),
    (Cause.EXIT, 0),
    (Cause.EXIT, 3),
    (Cause.DEADLINE, 9),
    (Cause.MEMORY, 9),
    (Cause.KEEPER, 0),
    (Cause.RECYCLED, Leave.ASKED),
    (Cause.RECYCLED, Leave.MEMORY),
    (Cause.RECYCLED, Leave.PROCESSES),
    (Cause.UNBORN, 11),
    (Cause.PRESSURE, 9),
]


class Schedules(RuleBasedStateMachine):
    """Everything a host could ever report, in any order it could report it."""

    @initialize(
        workers=st.integers(1, 4),
        depth=st.integers(1, 3),
        bad=st.sampled_from(["raise", "skip", "replace"]),
        strikes=st.integers(1, 3),
        restarts=st.integers(0, 4),
        in_order=st.booleans(),
        streams=st.booleans(),
        allowed=st.integers(1, 4),
    )
    def open(self, workers, depth, bad, strikes, restarts, in_order, streams, allowed):
        bad = "skip" if streams and bad == "replace" else bad
        policy = Policy(bad_sample=bad, strikes=strikes, restarts=restarts, max_bad=0.5)
        self.make = lambda: Ledger(workers, depth, policy, in_order=in_order, streams=streams, allowed=allowed)
        self.ledger = self.make()
        self.policy, self.in_order, self.streams = policy, in_order, streams
        self.events, self.actions = [], []
        self.room = workers * depth
        self.lives = {}  # worker -> life
        self.gone = {}  # worker -> its last life, when it has no other
        self.held = {w: [] for w in range(workers)}  # tasks on their way to, or in, each worker
        self.sends = {}  # task -> last Send
        self.begun = {}  # task -> positions begun by some life
        self.spares = {}  # task -> those that some life has tried
        self.ended = {}  # task -> how
        self.parked = {}  # task -> bad samples in its result, until its turn
        self.drawn = 0
        self.proofs = 0  # kills for memory while no other worker had a task
        self.clock = 0.0
        self.stop = None
        self.tell(Opened(0.0))

    def tell(self, event):
        self.events.append(event)
        actions = list(self.ledger.on(event))
        self.actions += actions
        for action in actions:
            match action:
                case Start(worker, life):
                    assert life > max(self.lives.get(worker, 0), self.gone.get(worker, 0))
                    self.lives[worker] = life
                    self.held[worker] = []
                case Send(worker, life, task):
                    assert life == self.lives[worker], "sent to a life that is not"
                    assert task not in self.ended, "sent again after its end"
                    assert not any(task in held for held in self.held.values()), "two workers have it"
                    self.held[worker].append(task)
                    self.sends[task] = action
                    for position in action.bad:
                        assert position in self.begun.get(task, ()), "blamed without having begun"
                    assert {*action.deadly} <= self.spares.get(task, set()) - {0}, "blamed without having been tried"
                case Deliver(task, result):
                    self.end(task, "delivered")
                    assert not isinstance(result, Short), "each stream was as long as its worker said"
                    if isinstance(result, Lost):
                        at = result.position
                        assert at == -1 or at in self.begun[task], "blamed without having begun"
                case Drop(task):
                    self.end(task, "dropped")
                case Stop():
                    self.stop = action
                case Retire(worker, life):
                    assert life == self.lives[worker], "asked one to leave who is not there"
                case Renew():
                    self.gone |= self.lives
                    self.lives.clear()
                    self.held = {worker: [] for worker in self.held}
                case Note(suspicion=suspicion):
                    assert suspicion.alone <= min(suspicion.here, self.proofs), "somebody else was at work"
                    assert suspicion.here <= suspicion.in_all
                case Discard():
                    pass

    def end(self, task, how):
        assert task not in self.ended, "ended twice"
        if self.in_order:
            assert all(t in self.ended for t in range(task)), "out of turn"
        self.ended[task] = how

    def busy(self):
        return [w for w, held in self.held.items() if held and w in self.lives]

    @precondition(lambda self: not self.stop)
    @rule(workers=st.integers(0, 5), paused=st.booleans())
    def allow(self, workers, paused):
        """Memory, processes or the trainer's pace allow more or fewer."""
        self.tell(Allowed(workers, paused))
        if not self.stop:
            assert self.ledger.at_work >= 1, "nobody is left to work"

    @precondition(lambda self: not self.stop and self.drawn - len(self.ended) < self.room)
    @rule(samples=st.integers(1, 4))
    def draw(self, samples):
        self.drawn += 1
        self.tell(Drawn(self.drawn - 1, samples))

    @precondition(lambda self: not self.stop and self.busy())
    @rule(data=st.data())
    def finish(self, data):
        """A worker does its tasks in the order it got them."""
        worker = data.draw(st.sampled_from(self.busy()))
        task = self.held[worker].pop(0)
        self.begun.setdefault(task, set()).update(range(4))
        bad = 0 if self.policy.bad_sample == "raise" else data.draw(st.integers(0, 1))
        self.parked[task] = bad
        self.tell(Finished(worker, self.lives[worker], task, f"result of {task}", bad))

    @precondition(lambda self: not self.stop and not self.streams and self.parked)
    @rule(data=st.data())
    def lose(self, data):
        """A result is gone before anybody opened it: its task is done again; after its turn that is nobody's task."""
        task = data.draw(st.sampled_from(sorted(self.parked)))
        ended, bad = task in self.ended, self.parked.pop(task)
        actions = len(self.actions)
        self.tell(Gone(task, bad))
        assert not any(isinstance(action, Note | Stop) for action in self.actions[actions:]), "somebody was charged"
        assert not ended or len(self.actions) == actions

    @precondition(lambda self: not self.stop and self.streams and self.busy())
    @rule(data=st.data())
    def exhaust(self, data):
        worker = data.draw(st.sampled_from(self.busy()))
        task = self.held[worker][0]
        self.held[worker] = []
        self.tell(Exhausted(worker, self.lives[worker], task, self.sends[task].number))

    @precondition(lambda self: not self.stop and self.lives)
    @rule(
        data=st.data(),
        death=st.sampled_from(DEATHS),
        wait=st.floats(0.001, 2.0),
        known=st.booleans(),
        memory=st.booleans(),
    )
    def die(self, data, death, wait, known, memory):
        """Anywhere: at boot, idle, in a sample, in collate, while sending."""
        worker = data.draw(st.sampled_from(sorted(self.lives)))
        self.clock += wait
        held = self.held[worker]
        stage = data.draw(st.sampled_from(list(Stage)))
        place = Place(-1, 0, stage, 0.0)
        if held and stage >= Stage.FETCH:
            position = data.draw(st.integers(0, 3))
            spares = (
                st.integers(0, SPARES) if stage is Stage.FETCH and self.policy.bad_sample == "replace" else st.just(0)
            )
            place = Place(held[0], position, stage, min(wait, 0.01), data.draw(spares))
            self.spares.setdefault(held[0], set()).add(place.spare)
            self.begun.setdefault(held[0], set()).add(position)
        self.held[worker] = []
        life = self.lives[worker]
        for_memory = memory and death == (Cause.SIGNAL, signal.SIGKILL)
        self.proofs += for_memory and not any(self.held.values())
        self.tell(Exited(worker, life, self.clock, *death, place if known else None, for_memory=for_memory))
        if self.lives.get(worker) == life:
            del self.lives[worker]  # no other life follows
            self.gone[worker] = life

    @precondition(lambda self: not self.stop and self.lives)
    @rule(data=st.data())
    def boot(self, data):
        worker = data.draw(st.sampled_from(sorted(self.lives)))
        self.tell(Booted(worker, self.lives[worker]))

    @precondition(lambda self: self.drawn > 0 and self.lives)
    @rule(data=st.data())
    def speak_late(self, data):
        """An earlier life's words arrive after its death."""
        worker = data.draw(st.sampled_from(sorted(self.lives)))
        life = data.draw(st.integers(0, self.lives[worker] - 1))
        task = data.draw(st.integers(0, self.drawn - 1))
        ended = dict(self.ended)
        kind = data.draw(st.sampled_from(["finished", "exhausted", "exited"]))
        if kind == "finished":
            self.tell(Finished(worker, life, task, "late"))
        elif kind == "exhausted":
            self.tell(Exhausted(worker, life, task, 0))
        else:
            self.tell(Exited(worker, life, self.clock, Cause.EXIT, 1, Place(task, 0, Stage.FETCH, 0.0)))
        assert self.ended == ended, "an earlier life was listened to"

    @precondition(lambda self: self.stop)
    @rule(worker=st.integers(0, 3))
    def speak_after_the_stop(self, worker):
        """Whatever comes then is only given back."""
        assert [type(a) for a in self.ledger.on(Finished(worker, 1, 0, "x"))] == [Discard]

    @invariant()
    def nothing_is_lost(self):
        """Every task is ended, or waits for its turn, or is with exactly one worker, or in the backlog."""
        if getattr(self, "ledger", None) is None or self.stop:
            return
        known = set(self.ended) | set(self.ledger._tasks)
        assert known == set(range(self.drawn))

    def teardown(self):
        """Let everything come to its end, and see that it does."""
        if getattr(self, "ledger", None) is None:
            return
        for _ in range(10 * self.drawn + 10):
            busy = self.busy()
            if self.stop or not busy:
                break
            worker = busy[0]
            task = self.held[worker].pop(0)
            self.tell(Finished(worker, self.lives[worker], task, "in the end"))
        if not self.stop:
            assert set(self.ended) == set(range(self.drawn)), "something never came"
        again = self.make()
        assert [a for event in self.events for a in again.on(event)] == self.actions, "not the same a second time"


EXAMPLES = int(os.environ.get("HOLDFAST_SCHEDULES", "2000"))
Schedules.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
# It takes 45 s of one processor, and on a busy machine gets a third of that.
TestSchedules = pytest.mark.timeout(600)(Schedules.TestCase)
