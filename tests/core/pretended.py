"""A loader that is only pretended: workers, batches in order, a trainer and a clock, all of them numbers.

What the crew sees of a real loader is in it: batches that are in flight when the number changes, batches that are done
and wait for their turn, so that they come in bunches, workers that need time to start, and a machine that others use.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from holdfast.core.autoscale import Autoscale

# As in loader/iterator.py.
LOOK_S = 0.25
# Batches for each worker that are on their way: torch's default.
AHEAD = 2
START_S = 0.05
# So long the machine is as busy with others as it is.
WEATHER_S = 0.5


@dataclass
class Run:
    seconds: float = 0.0
    batches: int = 0
    waited_s: float = 0.0
    numbers: list[tuple[float, int]] = field(default_factory=list)
    """When there were to be how many, from then on."""
    delivered: list[float] = field(default_factory=list)
    """When each batch came."""

    @property
    def rate(self) -> float:
        return self.batches / self.seconds

    @property
    def late_rate(self) -> float:
        """Of the second half of the batches."""
        middle = self.batches // 2
        return (self.batches - middle) / (self.seconds - self.delivered[middle - 1])

    @property
    def last(self) -> int:
        return self.numbers[-1][1]


class Worker:
    def __init__(self, up_at: float) -> None:
        self.up_at = up_at
        self.tasks: deque[int] = deque()  # the first one is being worked on
        self.used = 0  # its places that are taken, also by batches that wait for their turn
        self.there = True


class Pretended:
    """`rate_of(workers)`: batches per second of so many. `noise`: of the machine, of each `WEATHER_S`; `uneven`: of
    each batch. `step_s`: how long the trainer works on a batch.
    """

    def __init__(
        self,
        autoscale: Autoscale,
        rate_of: Callable[[int], float],
        noise: float = 0.0,
        uneven: float = 0.0,
        step_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._autoscale, self._rate_of, self._step_s = autoscale, rate_of, step_s
        self._noise, self._uneven = noise, uneven
        self._random = Random(seed)
        self._weather: list[float] = []
        self._at = self._look_at = 0.0
        self._workers: list[Worker] = []
        self._places: deque[Worker] = deque()  # as in the ledger: free again when the batch was delivered
        self._waiting: deque[int] = deque()  # tasks that nobody has
        self._due: list[tuple[float, int, Worker]] = []  # (when it will be done, task, by whom)
        self._next_task = 0
        self._made_by: dict[int, Worker] = {}
        self.run = Run()

    def play(self, batches: int) -> Run:
        """Until so many more batches were delivered."""
        run = self.run
        self._autoscale.rest()
        self._muster()
        for turn in range(run.batches, run.batches + batches):
            began = self._at
            while turn not in self._made_by:
                self._pass(min(self._due[0][0], max(self._look_at, self._at)))
                if turn not in self._made_by:
                    self._look(run.waited_s + self._at - began)
            run.waited_s += self._at - began
            self._look(run.waited_s)
            run.batches += 1
            run.delivered.append(self._at)
            self._free(self._made_by.pop(turn))
            self._draw()
            if self._step_s:
                self._pass(self._at + self._step_s)
        run.seconds = self._at
        return run

    def _pass(self, until: float) -> None:
        """Time passes; who is done with a batch begins its next."""
        while self._due and self._due[0][0] <= until:
            self._at, task, worker = heapq.heappop(self._due)
            worker.tasks.popleft()
            self._made_by[task] = worker
            self._begin(worker)
            if self._waiting:
                self._draw()
        self._at = until

    def _look(self, waited_s: float) -> None:
        if self._at >= self._look_at:
            self._look_at = self._at + LOOK_S
            self._autoscale.look(self._at, self.run.batches, waited_s)
            self._muster()

    def _muster(self) -> None:
        """Workers come or go; who goes ends what it has begun."""
        allowed, workers = self._autoscale.allowed.workers, self._workers
        if allowed != len(workers):
            self.run.numbers.append((self._at, allowed))
        first = not workers
        while allowed > len(workers):
            workers.append(Worker(self._at + START_S))
            self._places.extend([workers[-1]] * (1 if first else AHEAD))
        if first:
            self._places.extend(workers * (AHEAD - 1))
        while allowed < len(workers):
            gone = workers.pop()
            gone.there = False
            self._places = deque(place for place in self._places if place is not gone)
            while len(gone.tasks) > 1:
                self._waiting.appendleft(gone.tasks.pop())
        self._draw()

    def _draw(self) -> None:
        while self._next_task - self.run.batches < AHEAD * len(self._workers):
            self._waiting.append(self._next_task)
            self._next_task += 1
        while self._waiting:
            if not self._places and self._due:
                break
            idle = min(self._workers, key=lambda worker: len(worker.tasks))
            worker = self._places.popleft() if self._places else idle
            worker.used += 1
            worker.tasks.append(self._waiting.popleft())
            if len(worker.tasks) == 1:
                self._begin(worker)

    def _free(self, worker: Worker) -> None:
        worker.used -= 1
        if worker.used < AHEAD and worker.there:
            self._places.append(worker)

    def _begin(self, worker: Worker) -> None:
        if worker.tasks:
            takes = len(self._workers) / self._rate_of(len(self._workers))
            takes *= max(0.2, self._random.gauss(1.0, self._uneven)) / self._speed()
            heapq.heappush(self._due, (max(self._at, worker.up_at) + takes, worker.tasks[0], worker))

    def _speed(self) -> float:
        """What others leave of the machine at this time."""
        while len(self._weather) * WEATHER_S <= self._at:
            self._weather.append(max(0.3, self._random.gauss(1.0, self._noise)))
        return self._weather[-1]
