"""Roster: which workers there are, and in which phase of which life each of them is.

How many may be at work is decided elsewhere (`allow`, see autoscale.py) or learnt from a refusal (`shrink`). The roster
decides which ones: which worker has to leave, which one comes back, and which one gets a next life. It does not know
what a worker holds (dispatch.py) or what it died of (inquest.py).
"""

from collections.abc import Sequence
from enum import IntEnum


class Phase(IntEnum):
    """Where a worker is in its life. Up to READY it gets tasks."""

    WAITING = 0  # it has no process yet; one is started when it is needed
    STARTING = 1  # its process is on its way up
    READY = 2
    ENDED = 3  # its stream has ended (iterable datasets); its process is idle
    STOPPING = 4  # it is to leave, and its process is still on its way up
    LEAVING = 5  # it is to leave after the task that it is on
    AWAY = 6  # it has no process: fewer workers are allowed for now
    GONE = 7  # it has no process, and needs none: its stream had ended


# From each phase: where a worker can go next. STARTING again is a new life.
MOVES = {
    Phase.WAITING: {Phase.STARTING, Phase.AWAY},
    Phase.STARTING: {Phase.STARTING, Phase.READY, Phase.ENDED, Phase.STOPPING},
    Phase.READY: {Phase.STARTING, Phase.ENDED, Phase.LEAVING},
    Phase.ENDED: {Phase.GONE},
    Phase.STOPPING: {Phase.STARTING, Phase.LEAVING, Phase.AWAY},
    Phase.LEAVING: {Phase.STARTING, Phase.READY, Phase.AWAY},
    Phase.AWAY: {Phase.WAITING, Phase.STARTING},
    Phase.GONE: set[Phase](),
}


class WorkerState:
    """One worker, in its present life. The roster writes `life`, `phase` and `served`; dispatch.py the rest."""

    __slots__ = ("drawn", "id", "life", "phase", "served", "tasks", "used")

    def __init__(self, id: int, life: int, phase: Phase) -> None:
        self.id = id
        self.life = life
        self.phase = phase
        self.served = 0  # tasks finished in this life
        self.tasks: dict[int, Task] = {}  # in the order they were sent
        self.used = 0  # tasks that were given to it and are not delivered yet
        self.drawn = 0  # batches asked of its stream

    @property
    def leaving(self) -> bool:
        """It gets no more tasks, and its process is to end."""
        return self.phase in (Phase.STOPPING, Phase.LEAVING)

    @property
    def came_up(self) -> bool:
        """Its process has come up."""
        return self.phase in (Phase.READY, Phase.ENDED, Phase.LEAVING)

    def move(self, to: Phase) -> None:
        assert to in MOVES[self.phase], f"worker {self.id}: {self.phase.name} to {to.name}"
        self.phase = to


class Roster:
    """`running`, `allowed`: see the ledger. `fixed`: no worker can do the work of another. `lazy`: a worker is started
    when it is needed.
    """

    def __init__(self, workers: int, running: Sequence[int], allowed: int | None, *, fixed: bool, lazy: bool) -> None:
        self._fixed = fixed
        self._lazy = lazy
        self.allowed = workers if allowed is None or fixed else max(1, min(workers, allowed))
        lives = list(running) or [1] * workers
        self.workers = [WorkerState(i, abs(life), self._first(i, life, bool(running))) for i, life in enumerate(lives)]
        self.at_work = 0  # how many workers there should be for now
        self.count()

    def _first(self, worker: int, life: int, running: bool) -> Phase:
        """The phase in which an epoch finds a worker."""
        if (life < 0 and not self._fixed) or (not running and worker >= self.allowed):
            return Phase.AWAY
        if running and life > 0:
            return Phase.READY
        return Phase.WAITING if self._lazy else Phase.STARTING

    @property
    def lives(self) -> list[int]:
        """The present life of each worker; below 0, the next one of a worker that has none."""
        return [-worker.life if worker.phase >= Phase.AWAY else worker.life for worker in self.workers]

    def present(self) -> list[WorkerState]:
        """The workers that get tasks."""
        return [worker for worker in self.workers if worker.phase <= Phase.READY]

    def unborn(self) -> list[WorkerState]:
        """The workers that are needed at once and have no process yet."""
        return [worker for worker in self.workers if worker.phase is Phase.STARTING]

    def alive(self) -> list[WorkerState]:
        """The workers that have a process, or will have one soon."""
        return [worker for worker in self.workers if Phase.WAITING < worker.phase < Phase.AWAY]

    def count(self) -> None:
        """After workers came or went. A worker whose stream has ended counts: torch draws for it as well."""
        self.at_work = sum(not (worker.leaving or worker.phase is Phase.AWAY) for worker in self.workers)

    def booted(self, worker: WorkerState) -> None:
        """Its process has come up. (A worker that goes on from the epoch before may say so only now.)"""
        if worker.phase is Phase.STARTING:
            worker.move(Phase.READY)
        elif worker.phase is Phase.STOPPING:
            worker.move(Phase.LEAVING)

    def let_go(self, worker: WorkerState) -> None:
        """It is to leave, and gets a next life only if that many are allowed."""
        if not worker.leaving:
            worker.move(Phase.LEAVING if worker.came_up else Phase.STOPPING)
        self.count()

    def keep(self, worker: WorkerState) -> None:
        """It is not to leave after all."""
        worker.move(Phase.READY if worker.came_up else Phase.STARTING)
        self.count()

    def shrink(self, worker: WorkerState) -> bool:
        """Go on with one worker less, if that is possible."""
        if self._fixed or self.at_work <= 1 or worker.leaving:
            return False
        self.allowed = self.at_work - 1
        self.let_go(worker)
        return True

    def allow(self, workers: int) -> tuple[list[WorkerState], list[WorkerState]]:
        """So many workers are allowed. Gives those that have to leave now, and those that may come back
        (`bring_back`).
        """
        if self._fixed:
            return [], []
        self.allowed = max(1, workers)
        present = self.present()
        surplus = present[self.allowed :]
        absent = [worker for worker in self.workers if worker.phase is Phase.AWAY]
        for worker in surplus:
            if worker.phase is Phase.WAITING:
                worker.move(Phase.AWAY)  # it has no process that could be asked
            else:
                self.let_go(worker)
        self.count()
        return surplus, absent[: max(0, self.allowed - len(present))]

    def bring_back(self, worker: WorkerState) -> None:
        """It has a life again. The caller calls `count` when all have."""
        worker.move(Phase.WAITING if self._lazy else Phase.STARTING)

    def next_life(self, worker: WorkerState) -> bool:
        """Its life is over. False if no other follows: its stream has ended, or fewer workers are allowed."""
        worker.life += 1
        worker.served = 0
        if worker.phase is Phase.ENDED:
            worker.move(Phase.GONE)
            return False
        left = worker.leaving
        worker.move(Phase.AWAY if left and self.at_work >= self.allowed else Phase.STARTING)
        if left:
            self.count()
        return worker.phase is Phase.STARTING


# Task: one batch on its way. Past: what it has been through. The ledger writes tasks, the inquest writes their past.


# How many other samples may be tried in the place of a bad one.
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
        self.stay = -1  # up to this position a fresh worker did not help
        self.past: Past | None = None  # few tasks have one


class Past:
    """What a task has been through. It has a past if a worker died, or left, while it was on this task."""

    __slots__ = ("crashes", "hits", "reached", "spent")

    def __init__(self) -> None:
        self.reached = -1  # the furthest position that was ever begun
        self.crashes: dict[int, int] = {}  # position -> lives that it surely ended
        # position -> (deaths that may be chance, seconds it was loaded, those of memory while no other was at work)
        self.hits: dict[int, tuple[int, float, int]] = {}
        self.spent = -1  # the furthest position at which a life ran out of something


def past_of(task: Task) -> Past:
    """Its past. It begins now, if there was none."""
    if task.past is None:
        task.past = Past()
    return task.past
