"""Dispatch: which worker holds which task, and which worker gets the next one.

A task is one batch on its way; the ledger writes it, and the inquest writes its past.

Every worker at work has `depth` places. A task takes a place when it is sent, and frees it when it is delivered, not
when it is finished: a finished batch holds memory until its turn comes. Tasks that no worker can take yet wait here, in
order.
"""

from collections import deque
from collections.abc import Sequence

from holdfast.core.messages import Action, Send, Start
from holdfast.core.roster import Phase, Roster, WorkerState

# Looked up for every batch: a member of an enum costs 50 ns each time.
_WAITING, _READY = Phase.WAITING, Phase.READY


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


class Dispatch:
    """`even`: no task waits behind another while a worker has nothing to do."""

    def __init__(self, roster: Roster, depth: int, even: bool) -> None:
        self._roster = roster
        self._depth = depth
        self._even = even
        self.paused = False  # no task is handed out while another is being done
        self._free = deque(roster.present() * depth)  # one entry per task that fits
        self._idle: deque[WorkerState] = deque(roster.present() if even else ())
        self.waiting: deque[Task] = deque()

    @property
    def room(self) -> int:
        """How many tasks would be sent at once."""
        return len(self._free)

    @property
    def idle(self) -> bool:
        """A worker has nothing to do."""
        return any(not worker.tasks for worker in self._roster.present())

    @property
    def uneven(self) -> bool:
        """A worker has nothing to do, and another holds a task that it has not begun."""
        loads = [len(worker.tasks) for worker in self._roster.present()]
        return bool(loads) and min(loads) == 0 and max(loads) > 1

    def busiest(self) -> WorkerState:
        """The worker that holds most tasks."""
        return max(self._roster.present(), key=lambda w: len(w.tasks))

    # Giving --------------------------------------------------------------------------------------------------------

    def give(self, task: Task) -> Sequence[Action]:
        """A new task goes to a worker that has a place, or it waits."""
        if self.paused or self.waiting or not self._free:
            self.waiting.append(task)
            return self.give_waiting()
        if self._even:
            return self._pass_on(self._choose(), task)
        worker = self._free.popleft()
        worker.used += 1
        return (self.send(worker, task),)

    def give_waiting(self) -> list[Action]:
        """Hand out the tasks that wait, as far as there is room. While paused, one at a time.

        If no worker does anything, all places are taken by batches that wait for their turn. Then one task goes to a
        worker without a free place: it may be this task's turn that they wait for.
        """
        actions: list[Action] = []
        while self.waiting:
            if any(worker.tasks for worker in self._roster.workers) and (self.paused or not self._free):
                break
            if not self._roster.at_work:
                break  # all workers leave, and others come
            worker = self._choose() if self._free else self._overload()
            actions += self._pass_on(worker, self.waiting.popleft())
        return actions

    def send(self, worker: WorkerState, task: Task) -> Send:
        """The task belongs to this worker now."""
        task.worker = worker.id
        worker.tasks[task.id] = task
        return Send(
            worker.id,
            worker.life,
            task.id,
            task.attempt,
            task.bad,
            task.alone,
            task.number,
            task.stay,
            task.deadly,
        )

    def _pass_on(self, worker: WorkerState, task: Task) -> Sequence[Action]:
        send = self.send(worker, task)
        if worker.phase is not _WAITING:
            return (send,)
        worker.move(Phase.STARTING)
        return (Start(worker.id, worker.life), send)

    def _choose(self) -> WorkerState:
        """Of the workers that have a place, the one that gets the next task: one with nothing to do, if possible."""
        while self._idle:
            worker = self._idle.popleft()
            if not worker.tasks and worker.phase <= _READY:  # it may have changed since
                self._free.remove(worker)
                break
        else:
            worker = self._free.popleft()
        worker.used += 1
        return worker

    def _overload(self) -> WorkerState:
        """The worker that holds fewest tasks, whether it has a place or not."""
        worker = min(self._roster.present(), key=lambda w: len(w.tasks))
        worker.used += 1
        if worker in self._free:
            self._free.remove(worker)
        return worker

    # Places --------------------------------------------------------------------------------------------------------

    def free(self, worker: WorkerState) -> None:
        """One of its tasks is over, or belongs to it no more."""
        worker.used -= 1
        if worker.used < self._depth and worker.phase <= _READY:
            self._free.append(worker)
            if self._even and not worker.tasks:
                self._idle.appendleft(worker)  # before those that are not started yet

    def close(self, worker: WorkerState) -> None:
        """It gets no more tasks."""
        self._free = deque(place for place in self._free if place is not worker)

    def open(self, worker: WorkerState) -> list[Action]:
        """It gets tasks again."""
        self._free.extend([worker] * max(0, self._depth - worker.used))
        if self._even and not worker.tasks:
            self._idle.appendleft(worker)
        return self.give_waiting()

    # Tasks that go to another worker, or to another life -----------------------------------------------------------

    def give_again(self, worker: WorkerState) -> list[Action]:
        """Its next life gets all the tasks that it holds."""
        held = list(worker.tasks.values())
        worker.tasks.clear()
        return [Start(worker.id, worker.life), *(self.send(worker, task) for task in held)]

    def give_to_others(self, worker: WorkerState) -> list[Action]:
        """It has no life any more: the others get the tasks that it holds."""
        held = list(worker.tasks.values())
        worker.tasks.clear()
        worker.used -= len(held)
        if self.paused:
            self.waiting.extendleft(reversed(held))
            return self.give_waiting()
        # They are the oldest tasks: others wait for their turn.
        return [action for task in held for action in self._pass_on(self._overload(), task)]

    def take_back(self, worker: WorkerState, task: Task) -> list[Action]:
        """The worker had not begun this task, and `worker.tasks` names it no more. It is the next to be handed out."""
        self.free(worker)
        self.waiting.appendleft(task)
        return self.give_waiting()

    def withdraw(self, task: Task) -> WorkerState | None:
        """Nobody wants this task any more. Gives the worker that holds it, if there is one."""
        if task in self.waiting:
            self.waiting.remove(task)
            return None
        worker = self._roster.workers[task.worker]
        del worker.tasks[task.id]
        worker.used -= 1
        return worker


# Rotation: the workers take turns, as in torch.
#
# No worker can then do the work of another. Batch n belongs to worker n % workers (`RoundRobin`), or each worker has a
# stream of its own (`Streams`).


class RoundRobin:
    """Batch n goes to worker n % workers."""

    def __init__(self, workers: Sequence[WorkerState]) -> None:
        self._workers = workers
        self._at = 0

    def next(self, task: Task) -> WorkerState | None:
        """The worker that gets this task; None if no worker has anything left."""
        worker = self._workers[self._at]
        self._at = (self._at + 1) % len(self._workers)
        return worker


class Streams(RoundRobin):
    """A stream that has ended is left out. So is a busy one, unless batches come in order. Each task learns which batch
    of its stream it is.
    """

    def __init__(self, workers: Sequence[WorkerState], depth: int, in_order: bool) -> None:
        super().__init__(workers)
        self._depth = depth
        self._in_order = in_order
        self.ended = 0

    @property
    def open(self) -> bool:
        """False when every stream has ended."""
        return any(worker.phase < Phase.ENDED for worker in self._workers)

    def next(self, task: Task) -> WorkerState | None:
        count = len(self._workers)
        for busy_too in (self._in_order, True):
            for at in range(self._at, self._at + count):
                worker = self._workers[at % count]
                if worker.phase < Phase.ENDED and (busy_too or len(worker.tasks) < self._depth):
                    self._at = (at + 1) % count
                    task.number = worker.drawn
                    worker.drawn += 1
                    return worker
        return None
