"""Roster: which workers there are, each in which life, and who of them is at work.

How many may be at work is told from outside (`allow`, see crew.py) or learnt from a refusal (`shrink`). The roster
says who that is: who has to leave, who comes back, and who gets a next life. What a worker holds is not its business
(hands.py), nor is what it died of (inquest.py).
"""

from collections.abc import Sequence

from holdfast.core.task import Task


class Worker:
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
        self.workers = [Worker(i, abs(running[i]) if running else 1) for i in range(workers)]
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

    def present(self) -> list[Worker]:
        """Those who get tasks."""
        return [worker for worker in self.workers if not (worker.away or worker.leaving)]

    def unborn(self) -> list[Worker]:
        """Those who are needed at once and have no process yet."""
        return [worker for worker in self.workers if worker.started and not (worker.away or worker.ready)]

    def alive(self) -> list[Worker]:
        """Those who have a process, or will have one soon."""
        return [worker for worker in self.workers if worker.started and not (worker.away or worker.gone)]

    def count(self) -> None:
        """After workers came or went."""
        self.at_work = sum(not (worker.away or worker.leaving) for worker in self.workers)

    def let_go(self, worker: Worker) -> None:
        """It shall leave, and gets a next life only if that many are allowed."""
        worker.leaving = True
        self.count()

    def keep(self, worker: Worker) -> None:
        """It shall not leave after all."""
        worker.leaving = False
        self.count()

    def shrink(self, worker: Worker) -> bool:
        """Go on with one worker less, if that can be."""
        if self._fixed or self.at_work <= 1 or worker.leaving:
            return False
        self.allowed = self.at_work - 1
        self.let_go(worker)
        return True

    def allow(self, workers: int) -> tuple[list[Worker], list[Worker]]:
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

    def bring_back(self, worker: Worker) -> None:
        """It has a life again; `count` when all have."""
        worker.away, worker.ready, worker.started = False, False, not self._lazy

    def next_life(self, worker: Worker) -> bool:
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
