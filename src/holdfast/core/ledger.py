"""Who holds which task, which attempt, whose turn: `on(event) -> [action]`.

Plain Python: no I/O, no clock, no process. All of "nothing lost, nothing twice, in order, the right one blamed" is
decided here, so it can be tested by the hundred thousand random schedules without starting a process.

The rules:
 1. A task is charged with a death only if its worker had begun it (`Exited.on`).
 2. Whoever tells the ledger of a death has told it of all that the worker had finished before.
 3. Every event names a worker and its life; earlier lives are ignored.
 4. Batch n is delivered once, after n-1 (unless `in_order=False`: once, when it comes).
 5. A sample is bad when it ended `strikes` lives; deaths that may come from outside count as blame.py allows.
 6. The restart budget counts the deaths of one worker without progress between them, anybody's. Progress is a
    finished batch, or a position in one that was not reached before.
 7. A worker that never comes up ends the run after a few tries.
 8. The same events give the same actions.
 9. A worker that left for a fresh one, was never born or was taken away is nobody's fault. Its tasks go to its next
    life; or, where fewer workers are allowed than there are, to the others.
10. A task with a number of `lives` is given up when it has ended that many, whoever is to blame: it may not be safe to
    do it once more. One that is withdrawn takes its worker with it, and nobody else.
11. `even`: nobody waits behind another task while a worker has nothing to do; and one is started when it is needed.
"""

import signal
from collections import Counter, deque
from collections.abc import Sequence

from holdfast.core import blame
from holdfast.core.messages import (
    Action,
    Allowed,
    Booted,
    BootFailed,
    Cause,
    Deliver,
    Discard,
    Drawn,
    Drop,
    Event,
    Exhausted,
    Exited,
    Finished,
    Kill,
    Leave,
    Lost,
    Note,
    Opened,
    Place,
    Release,
    Renew,
    Rested,
    Retire,
    Returned,
    Send,
    Spared,
    Stage,
    Start,
    Stop,
    TakeBack,
    Withdrawn,
)
from holdfast.policy import Policy

# Signals that a program raises against itself by what it does; all others may come from anybody.
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
# A circuit breaker needs something to go by: below this many samples it never opens.
BREAKER_LEAST = 20
# Deaths in a row before a worker ever came up: what kills it then is there each time.
BOOT_DEATHS = 5
WHOLE_TASK = -1  # the position that stands for collate and send


class Task:
    """One batch on its way."""

    __slots__ = (
        "alone",
        "attempt",
        "bad",
        "crashes",
        "done",
        "hits",
        "id",
        "lives",
        "number",
        "reached",
        "result",
        "samples",
        "spent",
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
        self.reached = -1  # the furthest position that was ever begun
        self.bad: tuple[int, ...] = ()
        self.crashes: dict[int, int] = {}  # position -> lives it ended at face value
        self.hits: dict[int, tuple[int, float]] = {}  # position -> (maybe random deaths, seconds exposed)
        self.spent = -1  # the furthest position at which a life ran out of something
        self.stay = -1  # up to here a fresh worker did not help


class Worker:
    """One worker, in its present life."""

    __slots__ = (
        "away",
        "boot_deaths",
        "drawn",
        "gone",
        "id",
        "leaving",
        "life",
        "open",
        "ready",
        "served",
        "stalls",
        "started",
        "tasks",
        "used",
    )

    def __init__(self, id: int, life: int, ready: bool) -> None:
        self.id = id
        self.life = life
        self.ready = ready
        self.boot_deaths = 0
        self.stalls = 0  # its deaths since anybody made progress
        self.tasks: dict[int, Task] = {}  # in the order they were sent
        self.open = True  # its stream has more (iterable datasets)
        self.drawn = 0  # batches asked of its stream
        self.used = 0  # tasks that were given to it and are not delivered yet
        self.started = True  # or it was not needed yet
        self.served = 0  # tasks finished in this life
        self.leaving = False  # this life is to end: it gets no more tasks
        self.away = False  # it has no life for now
        self.gone = False  # its stream had ended when it died: it needs no other life in this epoch


class Ledger:
    """See the module. `depth`: tasks a worker holds at once. `running`: `lives` of the epoch before, in whose
    processes this one goes on. `allowed`: how many workers may be at work at first. `share`: tasks after which a life
    is over, and another takes its place. `even`: see rule 11.
    """

    def __init__(
        self,
        workers: int,
        depth: int,
        policy: Policy,
        *,
        in_order: bool = True,
        streams: bool = False,
        round_robin: bool = False,
        first_task: int = 0,
        running: Sequence[int] = (),
        allowed: int | None = None,
        share: int | None = None,
        even: bool = False,
    ) -> None:
        self._policy = policy
        self._share = share
        self._even = even
        self._in_order = in_order
        self._streams = streams
        self._round_robin = round_robin  # batch n goes to worker n % workers, as torch has it
        self._workers = [Worker(i, abs(running[i]) if running else 1, bool(running)) for i in range(workers)]
        self._depth = depth
        # A stream, or a worker whose number decides what it gives, cannot be played by another.
        self._fixed = streams or round_robin
        self._allowed = workers if allowed is None or self._fixed else max(1, min(workers, allowed))
        for worker in self._workers:
            dead = bool(running) and running[worker.id] < 0
            worker.away = (dead and not self._fixed) or (not running and worker.id >= self._allowed)
            worker.started = not even
            worker.ready = worker.ready and not dead
        self.at_work = 0  # how many workers there are to be for now
        self._count()
        self._paused = False
        self._capacity = deque([w for w in self._workers if not w.away] * depth)  # one entry per task that fits
        self._idle: deque[Worker] = deque([w for w in self._workers if not w.away] if even else ())
        self._rotation = 0
        self._backlog: deque[Task] = deque()
        self._tasks: dict[int, Task] = {}
        self._turn = first_task
        self._opened_at = 0.0
        self._kills = 0  # deaths that may have come from outside; those on one and the same sample count once
        self._stalled = False  # somebody died since the last progress
        self._stalled_on: Counter[tuple[int, int]] = Counter()
        self._luck = 1.0  # the chance that the last judged death was plain bad luck
        self._renewed = False
        self._proven = False  # some sample got through, so no lock was inherited by all
        self._seen = 0
        self._bad = 0
        self.stopped = False

    @property
    def lives(self) -> list[int]:
        """The present life of each worker; below 0, the next one of a worker that has none."""
        return [-worker.life if worker.away or worker.gone else worker.life for worker in self._workers]

    @property
    def allowed(self) -> int:
        """How many workers there may be, as far as this ledger knows."""
        return self._allowed

    @property
    def uneven(self) -> bool:
        """A worker has nothing to do, and another holds a task that it has not begun."""
        loads = [len(worker.tasks) for worker in self._present()]
        return bool(loads) and min(loads) == 0 and max(loads) > 1

    @property
    def idle(self) -> bool:
        """A worker has nothing to do."""
        return any(not worker.tasks for worker in self._present())

    @property
    def room(self) -> int:
        """How many tasks would be sent at once."""
        return len(self._capacity)

    def _present(self) -> list[Worker]:
        return [worker for worker in self._workers if not (worker.away or worker.leaving)]

    @property
    def open_streams(self) -> bool:
        """False when every iterable worker has come to its end: there is nothing left to draw."""
        return not self._streams or any(worker.open for worker in self._workers)

    def on(self, event: Event) -> Sequence[Action]:
        """Take one event in; give the actions it leads to, in the order they must be done."""
        if self.stopped:
            return [Discard(event.result)] if isinstance(event, Finished | BootFailed) else ()
        match event:
            case Finished():
                return self._finished(event)
            case Drawn():
                return self._drawn(event)
            case Exhausted():
                return self._exhausted(event)
            case Withdrawn():
                return self._withdrawn(event)
            case Returned():
                return self._returned(event)
            case Spared():
                return self._spared(event)
            case Rested():
                return self._rested()
            case Exited():
                return self._exited(event)
            case Booted():
                return self._booted(event)
            case BootFailed():
                return self._boot_failed(event)
            case Opened():
                self._opened_at = event.at
                fresh = [w for w in self._workers if w.started and not (w.away or w.ready)]
                return [Start(w.id, w.life) for w in fresh]
            case Allowed():
                return self._allow(event)

    # The everyday path ---------------------------------------------------------------------------------------------

    def _drawn(self, event: Drawn) -> Sequence[Action]:
        task = self._tasks[event.task] = Task(event.task, event.samples, event.lives)
        if self._streams:
            return self._draw_from_stream(task)
        if self._round_robin:
            worker = self._workers[self._rotation]
            self._rotation = (self._rotation + 1) % len(self._workers)
            return (self._give(worker, task),)
        if self._paused or self._backlog or not self._capacity:
            self._backlog.append(task)
            return self._hand_out()
        if self._even:
            return self._pass_on(self._choose(), task)
        worker = self._capacity.popleft()
        worker.used += 1
        return (self._give(worker, task),)

    def _pass_on(self, worker: Worker, task: Task) -> Sequence[Action]:
        send = self._give(worker, task)
        if worker.started:
            return (send,)
        worker.started = True
        return (Start(worker.id, worker.life), send)

    def _choose(self) -> Worker:
        """Who gets the next task, of those who have a place: somebody who has nothing to do, if there is one."""
        while self._idle:
            worker = self._idle.popleft()
            if not (worker.tasks or worker.leaving or worker.away):  # it may have changed since
                self._capacity.remove(worker)
                break
        else:
            worker = self._capacity.popleft()
        worker.used += 1
        return worker

    def _hand_out(self) -> list[Action]:
        """Hand out what waits, as far as there is room. While paused, one at a time.

        When nobody does anything, one is given to somebody whose places are all taken by batches that wait for their
        turn: it may be the turn of this one.
        """
        actions: list[Action] = []
        while self._backlog:
            if any(worker.tasks for worker in self._workers) and (self._paused or not self._capacity):
                break
            if not self.at_work:
                break  # all of them leave, and others come
            worker = self._choose() if self._capacity else self._overload()
            actions += self._pass_on(worker, self._backlog.popleft())
        return actions

    def _overload(self) -> Worker:
        """The least busy one, whether it has a place or not."""
        worker = min(self._present(), key=lambda w: len(w.tasks))
        worker.used += 1
        if worker in self._capacity:
            self._capacity.remove(worker)
        return worker

    def _give(self, worker: Worker, task: Task) -> Send:
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
        )

    def _draw_from_stream(self, task: Task) -> Sequence[Action]:
        """Streams take turns, as torch has it; one that has ended is left out, and so is a busy one if it may be."""
        free = [w for w in self._workers if w.open and (self._in_order or len(w.tasks) < self._depth)]
        choice = free or [w for w in self._workers if w.open]
        for _ in self._workers:
            worker = self._workers[self._rotation]
            self._rotation = (self._rotation + 1) % len(self._workers)
            if worker in choice:
                task.number = worker.drawn
                worker.drawn += 1
                return (self._give(worker, task),)
        task.done, task.result = True, None
        return self._deliver()

    @property
    def parked(self) -> list[object]:
        """Results that wait for their turn."""
        return [task.result for task in self._tasks.values() if task.done and task.result is not None]

    def _finished(self, event: Finished) -> Sequence[Action]:
        worker = self._workers[event.worker]
        task = worker.tasks.pop(event.task, None) if event.life == worker.life else None
        if task is None:
            return [Discard(event.result)]
        self._progress()
        self._proven = True
        worker.served += 1
        task.done, task.result = True, event.result
        self._seen += task.samples
        if event.bad:
            self._bad += event.bad
            if stop := self._breaker():
                return stop
        if self._backlog:
            return [*self._deliver(task), *self._hand_out()]
        return self._deliver(task)

    def _deliver(self, just: Task | None = None) -> list[Action]:
        """What can be given to the user now; out of order it is `just` this one, if that is known."""
        actions: list[Action] = []
        if self._in_order:
            while (task := self._tasks.get(self._turn)) is not None and task.done:
                del self._tasks[self._turn]
                self._turn += 1
                self._end(task, actions)
        else:
            for task in [t for t in (self._tasks.values() if just is None else (just,)) if t.done]:
                del self._tasks[task.id]
                self._end(task, actions)
        return actions

    def _end(self, task: Task, actions: list[Action]) -> None:
        """Its place with its worker is free now, not before: a finished batch that waits for its turn is memory."""
        actions.append(Drop(task.id) if task.result is None else Deliver(task.id, task.result))
        if self._streams or self._round_robin:
            return
        worker = self._workers[task.worker]
        if self._share is not None and worker.served >= self._share and not (worker.leaving or worker.away):
            self._let_go(worker)
            actions.append(Release(worker.id, worker.life))
        self._free_place(worker)
        if self._backlog:
            actions += self._hand_out()

    def _free_place(self, worker: Worker) -> None:
        """One of its tasks is over."""
        worker.used -= 1
        if worker.used < self._depth and not (worker.away or worker.leaving):
            self._capacity.append(worker)
            if self._even and not worker.tasks:
                self._idle.appendleft(worker)  # before those that are not started yet

    def _open_places(self, worker: Worker) -> list[Action]:
        """It gets tasks again."""
        self._capacity.extend([worker] * max(0, self._depth - worker.used))
        if self._even and not worker.tasks:
            self._idle.appendleft(worker)
        return self._hand_out()

    # Tasks that are not wanted any more, or wanted elsewhere -------------------------------------------------------

    def _withdrawn(self, event: Withdrawn) -> Sequence[Action]:
        assert not self._in_order, "a turn cannot be skipped"
        task = self._tasks.pop(event.task, None)
        if task is None:
            return ()
        if task in self._backlog:
            self._backlog.remove(task)
            return ()
        worker = self._workers[task.worker]
        del worker.tasks[task.id]
        worker.used -= 1
        self._let_go(worker)  # until it has left, or is spared
        return (Kill(worker.id, worker.life, task.id),)

    def _spared(self, event: Spared) -> Sequence[Action]:
        worker = self._workers[event.worker]
        if event.life != worker.life or not worker.leaving:
            return ()
        worker.leaving = False
        self._count()
        return self._open_places(worker)

    def _returned(self, event: Returned) -> Sequence[Action]:
        worker = self._workers[event.worker]
        task = worker.tasks.pop(event.task, None) if event.life == worker.life else None
        if task is None:
            return ()
        self._free_place(worker)
        self._backlog.appendleft(task)
        return self._hand_out()

    def _rested(self) -> Sequence[Action]:
        if not self.uneven:
            return ()
        worker = max(self._present(), key=lambda w: len(w.tasks))
        return (TakeBack(worker.id, worker.life),)

    def _exhausted(self, event: Exhausted) -> Sequence[Action]:
        worker = self._workers[event.worker]
        if event.life != worker.life or event.task not in worker.tasks:
            return ()
        self._progress()
        return self._end_stream(worker)

    def _end_stream(self, worker: Worker) -> list[Action]:
        worker.open = False
        for task in worker.tasks.values():
            task.done, task.result = True, None
        worker.tasks.clear()
        return self._deliver()

    def _progress(self) -> None:
        if self._stalled:
            self._stalled = False
            self._stalled_on.clear()
            for worker in self._workers:
                worker.stalls = 0

    def _breaker(self) -> list[Action]:
        if self._policy.bad_sample == "raise" or self._seen < BREAKER_LEAST:
            return []
        if self._bad <= self._policy.max_bad * self._seen:
            return []
        self.stopped = True
        results = tuple((task.id, task.result) for task in self._tasks.values() if task.done)
        return [Stop("bad", None, self._bad, self._seen, results)]

    # Coming up -----------------------------------------------------------------------------------------------------

    def _booted(self, event: Booted) -> Sequence[Action]:
        worker = self._workers[event.worker]
        if event.life == worker.life:
            worker.ready = True
            worker.boot_deaths = 0
        return ()

    def _boot_failed(self, event: BootFailed) -> Sequence[Action]:
        if event.life != self._workers[event.worker].life:
            return [Discard(event.result)]
        self.stopped = True
        return [Stop("boot", event, self._bad, self._seen)]

    # Deaths --------------------------------------------------------------------------------------------------------

    def _exited(self, event: Exited) -> Sequence[Action]:
        worker = self._workers[event.worker]
        if event.life != worker.life or worker.away:
            return ()
        if self._streams and not worker.open:
            worker.life += 1  # it had nothing left to do, and needs no other life
            worker.gone = True
            return [Note(event, "nothing: its stream had ended", 0, 0)]
        on = event.on if event.on is not None and event.on.task in worker.tasks else None
        task = worker.tasks[on.task] if on is not None else None
        if event.cause in (Cause.RECYCLED, Cause.UNBORN, Cause.PRESSURE):
            counted = task is not None and task.lives is not None and on is not None and on.stage >= Stage.FETCH
            if not counted:
                return self._left(worker, task, on, event)
            self._shrink(worker)  # and its task has had one of its lives
        if task is not None and on is not None and not _is_charged(task, on, event):
            on = task = None
        if worker.leaving and task is None:
            return self._replace(worker)  # as we wished: no incident
        self._count_stall(worker, task, on, event)
        if self._looks_like_inherited_lock(event, on) and (task is None or task.lives is None):
            return self._renew(event)
        strike, needed, bad = self._judge(event, task, on)
        counted = task is not None and task.lives is not None  # its attempts are bounded anyway
        if not bad and not counted and self._out_of_patience(worker):
            if task is None or on is None or not self._stuck_on(worker, task, on):
                self.stopped = True
                return [
                    Note(event, "gave up: no progress", strike, needed),
                    Stop("restarts", event, self._bad, self._seen),
                ]
            bad = True  # this is what nothing gets past: it cannot be loaded here
        actions: list[Action] = []
        if bad and task is not None and on is not None:
            did, actions = self._give_up(worker, task, on, event)
        elif task is not None:
            did = "started a new worker, which loads the batch again"
        else:
            did = "started a new worker; no sample was being loaded"
        actions = [Note(event, did, strike, needed), *actions]
        if self.stopped:
            return actions
        if task is not None:
            task.attempt += 1
        actions += self._replace(worker)
        return [*actions, *self._hand_out()] if self._backlog else actions

    def _replace(self, worker: Worker) -> list[Action]:
        """Its next life; or none where fewer workers are allowed: then the others take its tasks."""
        worker.life += 1
        worker.ready = False
        worker.served = 0
        if self._streams and not worker.open:
            worker.gone = True
            return []
        if not worker.leaving:
            return self._restart(worker)
        if self.at_work < self._allowed:
            worker.leaving = False
            self._count()
            return [*self._restart(worker), *self._open_places(worker)]
        worker.leaving, worker.away = False, True
        self._count()
        held = list(worker.tasks.values())
        worker.tasks.clear()
        worker.used -= len(held)
        if self._paused:
            self._backlog.extendleft(reversed(held))
            return self._hand_out()
        # They are the oldest there are: others wait for their turn.
        return [action for task in held for action in self._pass_on(self._overload(), task)]

    def _restart(self, worker: Worker) -> list[Action]:
        held = list(worker.tasks.values())
        worker.tasks.clear()
        return [
            Start(worker.id, worker.life),
            *(self._give(worker, task) for task in held),
        ]

    def _count_stall(self, worker: Worker, task: Task | None, on: Place | None, event: Exited) -> None:
        if not worker.ready and not _maybe_chance(event):
            worker.boot_deaths += 1
        if task is not None and on is not None:
            if on.position > task.reached:
                self._progress()
                self._proven = self._proven or on.position > 0
                # From the second attempt on, what was loaded is kept for the next life: only that is a height gained.
                task.reached = on.position if task.attempt else -1
            self._stalled_on[task.id, _blamed_position(on)] += 1
            for position in [p for p in task.hits if WHOLE_TASK < p < on.position]:
                del task.hits[position]  # it got through this time: not poison
        self._stalled = True
        worker.stalls += 1

    def _out_of_patience(self, worker: Worker) -> bool:
        boots = min(BOOT_DEATHS, self._policy.restarts)
        return worker.stalls > self._policy.restarts or worker.boot_deaths > boots

    def _stuck_on(self, worker: Worker, task: Task, on: Place) -> bool:
        """Most of this worker's deaths since the last progress fell on this one place, and hardly by chance."""
        here = self._stalled_on[task.id, _blamed_position(on)]
        if here == worker.stalls:
            return True
        return 2 * here > worker.stalls and self._luck < blame.LAST_CHANCE

    def _judge(self, event: Exited, task: Task | None, on: Place | None) -> tuple[int, int, bool]:
        """(strike, strikes needed, bad) of what the worker was on; (0, 0, False) where nobody is to blame."""
        maybe_chance = _maybe_chance(event)
        if task is not None and task.lives is not None:
            return task.attempt + 1, task.lives, task.attempt + 1 >= task.lives
        if task is None or on is None or event.cause is Cause.KEEPER:
            self._kills += maybe_chance
            return 0, 0, False
        if on.stage is Stage.FETCH_MANY:
            self._kills += maybe_chance
            task.alone = True  # one by one, so that the next death has a name
            return 0, 0, False
        if on.stage is Stage.REPLAY and maybe_chance:
            self._kills += 1
            return 0, 0, False  # what it replays was loaded before, and did no harm
        position = _blamed_position(on)
        needed = self._policy.strikes
        if not maybe_chance:
            strike = task.crashes[position] = task.crashes.get(position, 0) + 1
            return strike, needed, strike >= needed
        hits, exposed_s = task.hits.get(position, (0, 0.0))
        self._kills += hits == 0
        hits, exposed_s = hits + 1, exposed_s + on.seconds
        task.hits[position] = (hits, exposed_s)
        lived_s = (event.at - self._opened_at) * len(self._workers)
        self._luck = blame.luck(hits, self._kills - 1 + hits, exposed_s, lived_s)
        return hits, needed, hits >= needed and self._luck < blame.CHANCE

    def _give_up(self, worker: Worker, task: Task, on: Place, event: Exited) -> tuple[str, list[Action]]:
        """A sample (or a whole batch) is bad: do with it what the policy says."""
        position = _blamed_position(on)
        if self._streams or position == WHOLE_TASK or self._policy.bad_sample == "raise":
            del worker.tasks[task.id]
            task.done = True
            task.result = Lost(task.id, position, event, task.attempt + 1)
            if self._streams:
                return "gave this worker's stream up", self._end_stream(worker)
            self._seen += task.samples
            if task.lives is not None:
                self._progress()  # it is out of the way
            return "gave the batch up: next() raises for it", self._deliver()
        task.bad = (*task.bad, position)
        self._bad += 1
        actions = self._breaker()
        if self._policy.bad_sample == "skip" and len(task.bad) == task.samples:
            del worker.tasks[task.id]
            task.done, task.result = True, None
            return "left the sample out; its batch is empty", [
                *actions,
                *self._deliver(),
            ]
        left_out = self._policy.bad_sample == "skip"
        return ("left the sample out" if left_out else "replaced the sample"), actions

    # The inherited lock --------------------------------------------------------------------------------------------

    def _looks_like_inherited_lock(self, event: Exited, on: Place | None) -> bool:
        """A hang on the very first sample that anybody loaded: a fork may have copied a held lock. Once only."""
        return (
            event.cause is Cause.DEADLINE
            and not self._proven
            and not self._renewed
            and (on is None or on.position <= 0)
        )

    def _renew(self, event: Exited) -> Sequence[Action]:
        self._renewed = True
        actions: list[Action] = [
            Note(
                event,
                "started a new keeper and new workers; charged to no sample",
                0,
                0,
            ),
            Renew(),
        ]
        for worker in self._workers:
            if worker.started and not (worker.away or worker.gone):
                actions += self._replace(worker)
        return actions

    # How many workers ----------------------------------------------------------------------------------------------

    def _count(self) -> None:
        self.at_work = sum(not (worker.away or worker.leaving) for worker in self._workers)

    def _allow(self, event: Allowed) -> list[Action]:
        self._paused = event.paused
        if self._fixed:
            return []
        self._allowed = max(1, event.workers)
        actions: list[Action] = []
        present = self._present()
        for worker in present[self._allowed :]:
            self._let_go(worker)
            if worker.started:
                actions.append(Retire(worker.id, worker.life))
            else:
                worker.leaving, worker.away = False, True
        absent = [worker for worker in self._workers if worker.away]
        for worker in absent[: max(0, self._allowed - len(present))]:
            worker.away, worker.ready, worker.started = False, False, not self._even
            actions += [Start(worker.id, worker.life)] if worker.started else []
            actions += self._open_places(worker)
        self._count()
        return [*actions, *self._hand_out()]

    def _shrink(self, worker: Worker) -> bool:
        """Go on with one worker less, if that can be."""
        if self._fixed or self.at_work <= 1 or worker.leaving:
            return False
        self._allowed = self.at_work - 1
        self._let_go(worker)
        return True

    def _let_go(self, worker: Worker) -> None:
        """It gets no more tasks, and a next life only if that many are allowed."""
        worker.leaving = True
        self._count()
        self._capacity = deque(place for place in self._capacity if place is not worker)

    def _left(self, worker: Worker, task: Task | None, on: Place | None, event: Exited) -> list[Action]:
        """It left for a fresh one, could not be made, or had to go for the others: nobody is to blame."""
        if task is not None and on is not None:
            task.attempt += 1
            position = on.position if on.stage is Stage.FETCH else task.samples
            if position <= task.spent:
                task.stay = position  # a fresh worker came no further
            task.spent = max(task.spent, position)
        refused = event.cause is not Cause.RECYCLED or event.code == Leave.PROCESSES
        if refused and not self._shrink(worker) and not worker.leaving:
            self._count_stall(worker, None, None, event)  # there are no fewer: it must go on with what it has
            if self._out_of_patience(worker):
                self.stopped = True
                return [Note(event, "gave up", 0, 0), Stop("restarts", event, self._bad, self._seen)]
        asked = event.cause is Cause.RECYCLED and event.code == Leave.ASKED
        actions = self._replace(worker)
        if asked:
            return actions  # as we wished: no incident
        did = f"went on with {self.at_work} workers" if worker.away else "started a fresh worker in its place"
        return [Note(event, did, 0, 0), *actions]


def _maybe_chance(event: Exited) -> bool:
    """True for a death that may have come from outside."""
    return event.cause is Cause.SIGNAL and event.code not in OWN_FAULT


def _is_charged(task: Task, on: Place, event: Exited) -> bool:
    """With a number of lives: for whatever ended it, once it had begun. Otherwise not for the keeper's death."""
    if task.lives is not None:
        return on.stage >= Stage.FETCH
    return event.cause is not Cause.KEEPER


def _blamed_position(on: Place) -> int:
    return on.position if on.stage is Stage.FETCH else WHOLE_TASK
