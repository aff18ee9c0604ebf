"""The ledger as a pool uses it: attempts are counted, tasks withdrawn and taken back; no process anywhere."""

import random
import signal

import pytest

from holdfast.core.ledger import Ledger
from holdfast.core.messages import (
    Booted,
    Cause,
    Deliver,
    Drawn,
    Exited,
    Finished,
    Kill,
    Lost,
    Note,
    Opened,
    Place,
    Release,
    Rested,
    Returned,
    Send,
    Spared,
    Stage,
    Start,
    Stop,
    TakeBack,
    Withdrawn,
)
from holdfast.core.supervisor import Story
from holdfast.policy import Policy

from .ledgers import kinds


def opened(workers=2, depth=2, **more):
    ledger = Ledger(workers, depth, Policy(), in_order=False, even=True, **more)
    ledger.on(Opened(0.0))
    for worker in range(workers):
        ledger.on(Booted(worker, 1))
    return ledger


def died(worker, life, task, *, cause=Cause.SIGNAL, code=signal.SIGKILL, stage=Stage.FETCH):
    return Exited(worker, life, 1.0, cause, code, Place(task, 0, stage, 0.1))


@pytest.mark.parametrize("cause", [Cause.SIGNAL, Cause.EXIT, Cause.DEADLINE, Cause.MEMORY, Cause.KEEPER])
def test_one_life_is_one_attempt_whatever_ended_it(cause):
    """A SIGKILL may be chance, and the keeper's death is nobody's fault; it is not run again all the same."""
    ledger = opened()
    ledger.on(Drawn(0, 1, 1))
    actions = ledger.on(died(0, 1, 0, cause=cause))
    assert kinds(actions) == ["Note", "Deliver", "Start"]
    assert isinstance(actions[1].result, Lost)
    assert ledger.room == 4


def test_more_lives_are_more_attempts():
    ledger = opened()
    ledger.on(Drawn(0, 1, 2))
    note, start, send = ledger.on(died(0, 1, 0))
    assert (note.strike, note.needed) == (1, 2)
    assert (start, send.task, send.attempt) == (Start(0, 2), 0, 1)
    assert kinds(ledger.on(died(0, 2, 0))) == ["Note", "Deliver", "Start"]


@pytest.mark.parametrize("stage", [Stage.BOOT, Stage.IDLE])
def test_what_was_not_begun_is_not_charged(stage):
    """Also if the pulse names it already, or was never written."""
    ledger = opened()
    ledger.on(Drawn(0, 1, 1))
    assert kinds(ledger.on(died(0, 1, 0, cause=Cause.KEEPER, stage=stage))) == ["Note", "Start", "Send"]


def test_those_behind_it_are_sent_again_without_a_charge():
    ledger = opened(1, 3)
    for task in range(3):
        ledger.on(Drawn(task, 1, 1))
    actions = ledger.on(died(0, 1, 0))
    assert kinds(actions) == ["Note", "Deliver", "Start", "Send", "Send"]
    assert [(a.task, a.attempt) for a in actions if isinstance(a, Send)] == [(1, 0), (2, 0)]


def test_lost_tasks_do_not_use_up_the_patience():
    """Each is out of the way when it is given up: a pool goes on for ever."""
    ledger = opened(1, 1)
    for life in range(1, 100):
        ledger.on(Drawn(life, 1, 1))
        assert not any(isinstance(a, Stop) for a in ledger.on(died(0, life, life)))
    assert kinds(ledger.on(died(0, 100, 99, stage=Stage.IDLE))) == ["Note", "Start"]


def test_a_worker_that_has_nothing_to_do_comes_first():
    ledger = opened(2, 4)
    first, second = (ledger.on(Drawn(t, 1, 1))[-1].worker for t in range(2))
    assert {first, second} == {0, 1}
    ledger.on(Finished(second, 1, 1, "b"))
    assert ledger.on(Drawn(2, 1, 1))[-1].worker == second
    ledger.on(Finished(second, 1, 2, "c"))
    assert ledger.on(Drawn(3, 1, 1))[-1].worker == second


def test_a_worker_is_started_when_it_is_needed():
    ledger = Ledger(3, 2, Policy(), in_order=False, even=True)
    assert ledger.on(Opened(0.0)) == []
    assert kinds(ledger.on(Drawn(0, 1, 1))) == ["Start", "Send"]
    ledger.on(Finished(0, 1, 0, "a"))
    assert kinds(ledger.on(Drawn(1, 1, 1))) == ["Send"]
    assert kinds(ledger.on(Drawn(2, 1, 1))) == ["Start", "Send"]


def test_a_task_behind_another_goes_to_whoever_is_idle():
    ledger = opened()
    workers = [ledger.on(Drawn(t, 1, 1))[-1].worker for t in range(3)]
    busy, other = workers[2], 1 - workers[2]
    running = workers.index(busy)
    ledger.on(Finished(other, 1, workers.index(other), "x"))
    assert ledger.uneven
    assert ledger.on(Rested()) == (TakeBack(busy, 1),)
    (send,) = ledger.on(Returned(busy, 1, 2))
    assert (send.worker, send.task, send.attempt) == (other, 2, 0)
    assert not ledger.uneven
    assert ledger.on(Rested()) == ()
    assert kinds(ledger.on(Finished(busy, 1, running, "y"))) == ["Deliver"]


def test_a_withdrawn_task_takes_its_worker_and_nobody_else():
    ledger = opened(1, 2)
    ledger.on(Drawn(0, 1, 1))
    ledger.on(Drawn(1, 1, 1))
    assert ledger.on(Withdrawn(0)) == (Kill(0, 1, 0),)
    assert ledger.room == 0
    assert ledger.on(Returned(0, 1, 1)) == []  # nobody else is there: it waits
    actions = ledger.on(died(0, 1, 0, cause=Cause.ASKED))
    assert kinds(actions) == ["Start", "Send"]
    assert (actions[1].task, actions[1].attempt) == (1, 0)
    assert ledger.room == 1
    assert not any(isinstance(a, Note) for a in actions)


def test_one_that_was_spared_goes_on():
    """The task was done already, or not begun."""
    ledger = opened(1, 2)
    ledger.on(Drawn(0, 1, 1))
    ledger.on(Drawn(1, 1, 1))
    ledger.on(Withdrawn(0))
    assert ledger.on(Spared(0, 1)) == []
    assert ledger.room == 1
    assert kinds(ledger.on(Finished(0, 1, 0, "late"))) == ["Discard"]
    assert ledger.on(Finished(0, 1, 1, "b")) == [Deliver(1, "b")]


def test_withdrawing_what_is_done_does_nothing():
    ledger = opened()
    ledger.on(Drawn(0, 1, 1))
    ledger.on(Finished(0, 1, 0, "a"))
    assert ledger.on(Withdrawn(0)) == ()


def test_a_worker_that_has_done_its_share_is_released():
    ledger = opened(1, 1, share=2)
    for task in range(2):
        ledger.on(Drawn(task, 1, 1))
        actions = ledger.on(Finished(0, 1, task, "r"))
    assert actions == [Deliver(1, "r"), Release(0, 1)]
    assert ledger.room == 0
    assert ledger.on(Drawn(2, 1, 1)) == []
    assert kinds(ledger.on(died(0, 1, 1, cause=Cause.ASKED, stage=Stage.IDLE))) == ["Start", "Send"]


def test_the_story_keeps_what_a_pool_says():
    story = Story()
    events = [Drawn(0, 1, 3), Drawn(1, 1), Withdrawn(0), Returned(0, 1, 1), Spared(0, 1), Rested()]
    for event in events:
        story.tell(event)
    assert list(story) == events


class World:
    """Workers that do what they like, as a host would tell of it."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.workers = self.random.randint(1, 4)
        self.depth = self.random.randint(1, 4)
        share = self.random.choice([None, None, 1, 3])
        self.ledger = opened(self.workers, self.depth, share=share)
        self.pipes = {w: [] for w in range(self.workers)}
        self.on = dict.fromkeys(range(self.workers))
        self.life = dict.fromkeys(range(self.workers), 1)
        self.doomed = set()
        self.begun, self.ended = {}, {}
        self.events = []

    def tell(self, event):
        for action in self.ledger.on(event):
            self.act(action)

    def act(self, action):
        match action:
            case Send(worker, life, task):
                if life == self.life[worker] and worker not in self.doomed:
                    self.pipes[worker].append(task)
            case Start(worker, life):
                self.life[worker], self.pipes[worker], self.on[worker] = life, [], None
                self.events.append(Booted(worker, life))
            case Deliver(task, result):
                assert task not in self.ended, f"task {task} ended twice"
                self.ended[task] = result
            case Release(worker, _):
                self.doomed.add(worker)
            case TakeBack(worker, life):
                if self.pipes[worker]:
                    self.events.append(Returned(worker, life, self.pipes[worker].pop(0)))
            case Kill(worker, life, task):
                self.kill(worker, life, task)
            case Stop():
                raise AssertionError("a pool does not stop")

    def kill(self, worker, life, task):
        if self.on[worker] == task:
            self.doomed.add(worker)
            self.events += [Returned(worker, life, behind) for behind in self.pipes[worker]]
            self.pipes[worker] = []
        else:
            self.pipes[worker] = [t for t in self.pipes[worker] if t != task]
            self.events.append(Spared(worker, life))

    def step(self, worker):
        """A worker begins, finishes, or dies."""
        on, life = self.on[worker], self.life[worker]
        if worker in self.doomed:
            self.doomed.discard(worker)
            self.tell(died(worker, life, -1 if on is None else on, cause=Cause.ASKED))
        elif on is None and self.pipes[worker]:
            self.on[worker] = task = self.pipes[worker].pop(0)
            self.begun[task] = self.begun.get(task, 0) + 1
        elif on is not None and self.random.random() < 0.2:
            self.tell(died(worker, life, on, cause=self.random.choice([Cause.SIGNAL, Cause.EXIT, Cause.KEEPER])))
        elif on is not None:
            self.on[worker] = None
            self.tell(Finished(worker, life, on, "done"))

    def run(self):
        lives, withdrawn, drawn, count = {}, set(), 0, self.random.randint(5, 40)
        for _ in range(5000):
            while self.events:
                self.tell(self.events.pop(0))
            if drawn < count and self.ledger.room:
                lives[drawn] = self.random.randint(1, 3)
                self.tell(Drawn(drawn, 1, lives[drawn]))
                drawn += 1
            elif drawn == count and self.ledger.uneven:
                self.tell(Rested())
            if drawn and self.random.random() < 0.05:
                task = self.random.randrange(drawn)
                if task not in self.ended:
                    withdrawn.add(task)
                    self.tell(Withdrawn(task))
            self.step(self.random.randrange(self.workers))
            if drawn == count and len(self.ended.keys() | withdrawn) == count:
                break
        return lives, withdrawn, count


@pytest.mark.parametrize("seed", range(300))
def test_every_task_ends_once_and_is_begun_as_often_as_it_may_be(seed):
    """Deaths, kills, withdrawals and tasks that are taken back, in any order."""
    world = World(seed)
    lives, withdrawn, count = world.run()
    assert world.ended.keys() | withdrawn == set(range(count)), "some task never ended"
    assert not world.ended.keys() & withdrawn
    for task, times in world.begun.items():
        assert times <= lives[task], f"task {task} was begun {times} times"
    for task, result in world.ended.items():
        assert result == "done" or (isinstance(result, Lost) and world.begun[task] == lives[task])
