"""Roster: which workers there are, each in which life, and who of them is at work.

How many may be at work is told from outside (`allow`, see crew.py) or learnt from a refusal (`shrink`). The roster
says who that is: who has to leave, who comes back, and who gets a next life. What a worker holds is not its business
(hands.py), nor is what it died of (inquest.py).
"""

from collections.abc import Sequence


class WorkerState:
    """One worker, in its present life. `life` to `gone` are the roster's to write, `tasks` and `used` those of
    hands.py, `open` and `drawn` those of rotation.py.
    """

    __slots__ = (
        "away",
        "drawn",
        "gone",
        "id",
        "leaving",
        "life",
        "open",
        "ready",
        "served",
        "started",
        "tasks",
        "used",
    )

    def __init__(self, id: int, life: int) -> None:
        self.id = id
        self.life = life
        self.ready = False  # it has come up
        self.started = True  # or it was not needed yet
        self.served = 0  # tasks finished in this life
        self.leaving = False  # this life is to end: it gets no more tasks
        self.away = False  # it has no life for now
        self.gone = False  # its stream had ended when it died: it needs no other life in this epoch
        self.tasks: dict[int, Task] = {}  # in the order they were sent
        self.used = 0  # tasks that were given to it and are not delivered yet
        self.open = True  # its stream has more (iterable datasets)
        self.drawn = 0  # batches asked of its stream


class Roster:
    """`running`, `allowed`: see the ledger. `fixed`: no worker can play another. `lazy`: one is started when it is
    needed.
    """

    def __init__(self, workers: int, running: Sequence[int], allowed: int | None, *, fixed: bool, lazy: bool) -> None:
        self._fixed = fixed
        self._lazy = lazy
        self.workers = [WorkerState(i, abs(running[i]) if running else 1) for i in range(workers)]
        self.allowed = workers if allowed is None or fixed else max(1, min(workers, allowed))
        for worker in self.workers:
            dead = bool(running) and running[worker.id] < 0
            worker.away = (dead and not fixed) or (not running and worker.id >= self.allowed)
            worker.started = not lazy
            worker.ready = bool(running) and not dead
        self.at_work = 0  # how many there are to be for now
        self.count()

    @property
    def lives(self) -> list[int]:
        """The present life of each worker; below 0, the next one of a worker that has none."""
        return [-worker.life if worker.away or worker.gone else worker.life for worker in self.workers]

    def present(self) -> list[WorkerState]:
        """Those who get tasks."""
        return [worker for worker in self.workers if not (worker.away or worker.leaving)]

    def unborn(self) -> list[WorkerState]:
        """Those who are needed at once and have no process yet."""
        return [worker for worker in self.workers if worker.started and not (worker.away or worker.ready)]

    def alive(self) -> list[WorkerState]:
        """Those who have a process, or will have one soon."""
        return [worker for worker in self.workers if worker.started and not (worker.away or worker.gone)]

    def count(self) -> None:
        """After workers came or went."""
        self.at_work = sum(not (worker.away or worker.leaving) for worker in self.workers)

    def let_go(self, worker: WorkerState) -> None:
        """It shall leave, and gets a next life only if that many are allowed."""
        worker.leaving = True
        self.count()

    def keep(self, worker: WorkerState) -> None:
        """It shall not leave after all."""
        worker.leaving = False
        self.count()

    def shrink(self, worker: WorkerState) -> bool:
        """Go on with one worker less, if that can be."""
        if self._fixed or self.at_work <= 1 or worker.leaving:
            return False
        self.allowed = self.at_work - 1
        self.let_go(worker)
        return True

    def allow(self, workers: int) -> tuple[list[WorkerState], list[WorkerState]]:
        """So many may be at work: who has to leave now, and who may come back (`bring_back`)."""
        if self._fixed:
            return [], []
        self.allowed = max(1, workers)
        present = self.present()
        surplus = present[self.allowed :]
        for worker in surplus:
            if worker.started:
                worker.leaving = True
            else:
                worker.away = True  # there is nobody to ask
        self.count()
        absent = [worker for worker in self.workers if worker.away]
        return surplus, absent[: max(0, self.allowed - len(present))]

    def bring_back(self, worker: WorkerState) -> None:
        """It has a life again; `count` when all have."""
        worker.away, worker.ready, worker.started = False, False, not self._lazy

    def next_life(self, worker: WorkerState) -> bool:
        """Its life is over. True if another follows: not where its stream has ended, or fewer workers are allowed."""
        worker.life += 1
        worker.ready = False
        worker.served = 0
        if not worker.open:
            worker.gone = True
            return False
        if worker.leaving:
            worker.away = self.at_work >= self.allowed
            self.keep(worker)
        return not worker.away


# Task: one batch on its way, and what it has been through. The ledger writes the first, the inquest the second.


# Samples that may be tried in the place of a bad one.
SPARES = 8


class Task:
    """One batch on its way."""

    __slots__ = (
        "alone",
        "attempt",
        "bad",
        "deadly",
        "done",
        "id",
        "lives",
        "number",
        "past",
        "result",
        "samples",
        "stay",
        "worker",
    )

    def __init__(self, id: int, samples: int, lives: int | None) -> None:
        self.id = id
        self.lives = lives
        self.samples = samples
        self.attempt = 0
        self.worker = -1
        self.number = 0  # of its worker's stream
        self.alone = False
        self.done = False
        self.result: object = None
        self.bad: tuple[int, ...] = ()  # positions of samples that kill
        self.deadly: tuple[int, ...] = ()  # spares that do, counted from 1
        self.stay = -1  # up to here a fresh worker did not help
        self.past: Past | None = None  # of the few that have one


class Past:
    """What a task has been through whose worker died, or left, while it was on it."""

    __slots__ = ("crashes", "hits", "reached", "spent")

    def __init__(self) -> None:
        self.reached = -1  # the furthest position that was ever begun
        self.crashes: dict[int, int] = {}  # position -> lives it ended at face value
        self.hits: dict[int, tuple[int, float]] = {}  # position -> (maybe random deaths, seconds exposed)
        self.spent = -1  # the furthest position at which a life ran out of something


def past_of(task: Task) -> Past:
    """Its past, which begins now if it had none."""
    if task.past is None:
        task.past = Past()
    return task.past
