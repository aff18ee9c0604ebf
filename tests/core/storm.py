"""A storm, simulated: a ledger, workers that are numbers, and somebody who kills them at random.

Virtual time only; a thousand epochs take seconds. Workers behave as the real ones do: they load sample after sample,
die when they are killed or when they touch a poison sample, and come back after a fork's time.
"""

import heapq
import random
import signal
from dataclasses import dataclass, field

from holdfast.core.ledger import Ledger
from holdfast.core.messages import (
    Booted,
    Cause,
    Deliver,
    Drawn,
    Drop,
    Exited,
    Finished,
    Lost,
    Opened,
    Place,
    Send,
    Stage,
    Start,
    Stop,
)
from holdfast.policy import Policy


@dataclass
class Outcome:
    delivered: list[int] = field(default_factory=list)
    blamed: set[int] = field(default_factory=set)
    gave_up: bool = False
    deaths: int = 0
    seconds: float = 0.0


@dataclass
class _Worker:
    life: int = 0
    up_at: float = 0.0
    queue: list[Send] = field(default_factory=list)
    busy_since: float = 0.0  # when the present sample began
    position: int = 0
    idle: bool = True


def storm(
    seed: int,
    *,
    workers: int = 2,
    samples: int = 128,
    batch: int = 8,
    sample_ms: tuple[float, float] = (1, 50),
    kill_ms: tuple[float, float] | None = (40, 120),
    poison: frozenset[int] = frozenset(),
    boot_ms: float = 15.0,
) -> Outcome:
    """One epoch. Poison samples SIGKILL their worker, which looks just like a random kill."""
    rng = random.Random(seed)
    cost = [rng.uniform(*sample_ms) / 1e3 for _ in range(samples)]
    fatal = {i: rng.uniform(0.1, 1.0) * cost[i] for i in poison}
    ledger = Ledger(workers, 2, Policy(bad_sample="skip", max_bad=1.0))
    autoscale = [_Worker() for _ in range(workers)]
    tasks = [list(range(i, min(i + batch, samples))) for i in range(0, samples, batch)]
    outcome = Outcome()
    bad_of: dict[int, tuple[int, ...]] = {}
    journal: dict[int, int] = {}  # task -> samples that its next life need not load again
    clock = 0.0
    drawn = delivered = 0
    agenda: list[tuple[float, int, str, int, int]] = []  # when, tie, what, worker, life
    ties = iter(range(1 << 60))

    def plan(when: float, what: str, worker: int, life: int) -> None:
        heapq.heappush(agenda, (when, next(ties), what, worker, life))

    def tell(event: object) -> None:
        nonlocal delivered
        for action in ledger.on(event):  # type: ignore[arg-type]
            match action:
                case Start(worker, life):
                    autoscale[worker] = _Worker(life=life, up_at=clock + boot_ms / 1e3)
                    plan(autoscale[worker].up_at, "up", worker, life)
                case Send(worker):
                    autoscale[worker].queue.append(action)
                    bad_of[action.task] = action.bad
                    if autoscale[worker].idle and clock >= autoscale[worker].up_at:
                        begin(worker)
                case Deliver(task, result):
                    delivered += 1
                    assert not isinstance(result, Lost)
                    outcome.delivered += [i for p, i in enumerate(tasks[task]) if p not in bad_of[task]]
                    outcome.blamed |= {tasks[task][p] for p in bad_of[task]}
                    draw()
                case Drop(task):
                    delivered += 1
                    outcome.blamed |= set(tasks[task])
                    draw()
                case Stop():
                    outcome.gave_up = True

    def draw() -> None:
        nonlocal drawn
        if drawn < len(tasks):
            drawn += 1
            tell(Drawn(drawn - 1, len(tasks[drawn - 1])))

    def order(send: Send) -> list[int]:
        return [p for p in range(len(tasks[send.task])) if p not in send.bad]

    def begin(worker: int) -> None:
        me = autoscale[worker]
        me.position = journal.get(me.queue[0].task, 0)
        me.idle = False
        step(worker)

    def step(worker: int) -> None:
        """Begin the next sample of the present task, or finish it."""
        me = autoscale[worker]
        send = me.queue[0]
        positions = order(send)
        if me.position == len(positions):
            me.queue.pop(0)
            me.idle = True
            tell(Finished(worker, me.life, send.task, "batch"))
            if autoscale[worker] is me and me.idle and me.queue:
                begin(worker)
            return
        me.busy_since = clock
        index = tasks[send.task][positions[me.position]]
        if index in fatal:
            plan(clock + fatal[index], "die", worker, me.life)
        else:
            plan(clock + cost[index], "sample", worker, me.life)

    def die(worker: int) -> None:
        me = autoscale[worker]
        outcome.deaths += 1
        place = None
        if me.queue and clock >= me.up_at:
            positions = order(me.queue[0])
            if me.queue[0].attempt:
                journal[me.queue[0].task] = me.position
            place = Place(me.queue[0].task, positions[me.position], Stage.FETCH, clock - me.busy_since)
        tell(Exited(worker, me.life, clock, Cause.SIGNAL, signal.SIGKILL, place))

    tell(Opened(0.0))
    for _ in range(2 * workers):
        draw()
    if kill_ms is not None:
        plan(rng.uniform(*kill_ms) / 1e3, "kill", rng.randrange(workers), 0)
    while delivered < len(tasks) and not outcome.gave_up:
        clock, _, what, worker, life = heapq.heappop(agenda)
        if what == "kill":
            assert kill_ms is not None
            die(worker)
            plan(clock + rng.uniform(*kill_ms) / 1e3, "kill", rng.randrange(workers), 0)
        elif life != autoscale[worker].life:
            continue
        elif what == "die":
            die(worker)
        elif what == "up":
            tell(Booted(worker, life))
            if autoscale[worker].idle and autoscale[worker].queue:
                begin(worker)
        else:
            autoscale[worker].position += 1
            step(worker)
    outcome.seconds = clock
    return outcome
