"""Ledger: which worker holds which task, at which attempt, and whose turn it is: `on(event) -> [action]`.

Plain Python: no I/O, no clock, no process. Everything behind "nothing lost, nothing twice, in order, the right one
blamed" is decided here. So tests run a hundred thousand random schedules without starting a process.

The ledger asks four others: the roster (which workers are at work), the dispatch (which worker holds what, and which
one gets the next task), the inquest (what a death means) and the breaker (too many bad samples). They know nothing
about turns, and none of them ends a task.

The rules:
 1. A death is charged to a task only if the worker had begun that task (`Exited.on`). If nobody knows what the worker
    was on, only a task with a number of lives (rule 10) is charged: the first that the worker held.
 2. The ledger hears of everything that a worker finished before it hears of the worker's death.
 3. Every event names a worker and its life; events of earlier lives are ignored.
 4. Batch n is delivered once, after batch n-1. With `in_order=False` it is delivered once, when it comes.
 5. A sample is bad when it has ended `strikes` lives. A death that may come from outside counts only if chance does not
    explain it, or if the kernel killed the worker for memory while no other worker was at work (inquest.py).
 6. The restart budget counts the deaths of one worker since the last progress of any worker. Progress is a finished
    batch, or a position in a batch that was not reached before.
 7. A worker that never comes up ends the run after a few tries.
 8. The same events give the same actions.
 9. Nobody is charged when a worker leaves for a fresh one, cannot be started or is taken away. Its tasks go to its next
    life. If fewer workers are allowed than there are, they go to the others. When a stream ends, as many of its batches
    have come as its worker has counted; if not, the task's result says so.
10. A task with a number of `lives` is given up when it has ended that many, whatever ended them: it may not be safe to
    do it once more. A task that is withdrawn ends the worker that is on it, and no other.
11. If a result is lost before its turn, its task is done again, and nobody is charged. If it is lost later, that is the
    business of the caller that opens it.
12. `even`: no task waits behind another while a worker has nothing to do, and a worker is started when it is needed.
"""

from collections.abc import Sequence

from holdfast.core.dispatch import SPARES, Dispatch, RoundRobin, Streams, Task
from holdfast.core.inquest import WHOLE_TASK, AfterDeath, Inquest, blamed_position, is_charged
from holdfast.core.messages import (
    Action,
    Allowed,
    Booted,
    BootFailed,
    Cause,
    Deliver,
    Did,
    Discard,
    Drawn,
    Drop,
    Event,
    Exhausted,
    Exited,
    Finished,
    Gone,
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
    Short,
    Spared,
    Stage,
    Start,
    Stop,
    Suspicion,
    TakeBack,
    Why,
    Withdrawn,
)
from holdfast.core.restart_budget import BadSampleBreaker
from holdfast.core.roster import Phase, Roster, WorkerState
from holdfast.policy import Policy


class Ledger:
    """See the module. `depth`: tasks that a worker holds at once. `running`: the `lives` of the epoch before; this
    epoch goes on in their processes. `allowed`: how many workers may be at work at first. `share`: tasks of a life,
    after which another life takes its place. `even`: see rule 12.
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
        self._in_order = in_order
        self._roster = Roster(workers, running, allowed, fixed=streams or round_robin, lazy=even)
        self._workers = self._roster.workers
        self._dispatch = Dispatch(self._roster, depth, even)
        self._streams = Streams(self._workers, depth, in_order) if streams else None
        self._rotation = self._streams or (RoundRobin(self._workers) if round_robin else None)
        self._inquest = Inquest(policy, workers)
        self._budget = self._inquest.budget
        self._breaker = BadSampleBreaker(policy)
        self._tasks: dict[int, Task] = {}  # all that have not ended
        self._turn = first_task
        self.stopped = False

    @property
    def lives(self) -> list[int]:
        """The present life of each worker; below 0, the next one of a worker that has none."""
        return self._roster.lives

    @property
    def allowed(self) -> int:
        """How many workers there may be, as far as this ledger knows."""
        return self._roster.allowed

    @property
    def at_work(self) -> int:
        """How many workers there should be for now."""
        return self._roster.at_work

    @property
    def uneven(self) -> bool:
        """A worker has nothing to do, and another holds a task that it has not begun."""
        return self._dispatch.uneven

    @property
    def idle(self) -> bool:
        """A worker has nothing to do."""
        return self._dispatch.idle

    @property
    def room(self) -> int:
        """How many tasks would be sent at once."""
        return self._dispatch.room

    @property
    def open_streams(self) -> bool:
        """False when every stream has ended: there is nothing left to draw."""
        return self._streams is None or self._streams.open

    @property
    def ended_streams(self) -> int:
        """How many streams have ended."""
        return 0 if self._streams is None else self._streams.ended

    @property
    def streams_left(self) -> dict[int, int]:
        """For each worker whose stream has not ended: the batches that were asked of it."""
        return {worker.id: worker.drawn for worker in self._workers if worker.phase < Phase.ENDED and worker.drawn}

    @property
    def parked(self) -> list[object]:
        """Results that wait for their turn."""
        return [task.result for task in self._tasks.values() if task.done and task.result is not None]

    def on(self, event: Event) -> Sequence[Action]:
        """Take one event in. Gives the actions that it leads to, in the order in which they must be done."""
        if self.stopped:
            return [Discard(event.result)] if isinstance(event, Finished | BootFailed) else ()
        match event:
            case Finished():
                return self._finished(event)
            case Drawn():
                return self._drawn(event)
            case Gone():
                return self._gone(event)
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
                self._inquest.opened_at = event.at
                return [Start(worker.id, worker.life) for worker in self._roster.unborn()]
            case Allowed():
                return self._allow(event)

    # The everyday path ---------------------------------------------------------------------------------------------

    def _drawn(self, event: Drawn) -> Sequence[Action]:
        task = self._tasks[event.task] = Task(event.task, event.samples, event.lives)
        if self._rotation is None:
            return self._dispatch.give(task)
        worker = self._rotation.next(task)
        if worker is not None:
            return (self._dispatch.send(worker, task),)
        task.done, task.result = True, None
        return self._deliver()

    def _finished(self, event: Finished) -> Sequence[Action]:
        worker = self._workers[event.worker]
        task = worker.tasks.pop(event.task, None) if event.life == worker.life else None
        if task is None:
            return [Discard(event.result)]
        if self._budget.stalled:
            self._budget.progress()
        self._inquest.proven = True
        worker.served += 1
        task.done, task.result = True, event.result
        self._breaker.seen += task.samples
        if event.bad:
            self._breaker.bad += event.bad
            if self._breaker.is_open:
                return self._stop_for_bad()
        if self._dispatch.waiting:
            return [*self._deliver(task), *self._dispatch.give_waiting()]
        return self._deliver(task)

    def _deliver(self, just: Task | None = None) -> list[Action]:
        """What the user can have now. `just`: the task that has just ended; out of order, no other can be ready."""
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
        """Its place with its worker is free now, and not before: a finished batch holds memory until its turn comes."""
        actions.append(Drop(task.id) if task.result is None else Deliver(task.id, task.result))
        if self._rotation is not None:
            return
        worker = self._workers[task.worker]
        if self._share is not None and worker.served >= self._share and worker.phase <= Phase.READY:
            self._let_go(worker)
            actions.append(Release(worker.id, worker.life))
        self._dispatch.free(worker)
        if self._dispatch.waiting:
            actions += self._dispatch.give_waiting()

    # Tasks that nobody wants any more, or that another worker gets -------------------------------------------------

    def _withdrawn(self, event: Withdrawn) -> Sequence[Action]:
        assert not self._in_order, "a turn cannot be skipped"
        task = self._tasks.pop(event.task, None)
        worker = self._dispatch.withdraw(task) if task is not None else None
        if worker is None:
            return ()
        self._let_go(worker)  # until it has left, or is spared
        return (Kill(worker.id, worker.life, event.task),)

    def _spared(self, event: Spared) -> Sequence[Action]:
        worker = self._workers[event.worker]
        if event.life != worker.life or not worker.leaving:
            return ()
        self._roster.keep(worker)
        return self._dispatch.open(worker)

    def _returned(self, event: Returned) -> Sequence[Action]:
        worker = self._workers[event.worker]
        task = worker.tasks.pop(event.task, None) if event.life == worker.life else None
        return () if task is None else self._dispatch.take_back(worker, task)

    def _rested(self) -> Sequence[Action]:
        if not self._dispatch.uneven:
            return ()
        worker = self._dispatch.busiest()
        return (TakeBack(worker.id, worker.life),)

    def _gone(self, event: Gone) -> Sequence[Action]:
        task = self._tasks.get(event.task)
        if task is None or not task.done or task.result is None or isinstance(task.result, Lost | Short):
            return ()  # its turn has come, or it has no result that could be lost
        assert self._streams is None, "a stream cannot go back by one batch"
        task.done, task.result = False, None
        self._breaker.seen -= task.samples
        self._breaker.bad -= event.bad
        worker = self._workers[task.worker]
        if self._rotation is not None:
            return (self._dispatch.send(worker, task),)
        return self._dispatch.take_back(worker, task)

    def _exhausted(self, event: Exhausted) -> Sequence[Action]:
        worker = self._workers[event.worker]
        if event.life != worker.life or event.task not in worker.tasks:
            return ()
        self._budget.progress()
        task = worker.tasks[event.task]
        came = task.number - [*worker.tasks].index(event.task)  # those before it that it still holds did not
        if event.made != came or came != task.number:
            del worker.tasks[event.task]
            task.done, task.result = True, Short(event.task, event.worker, event.made, came)
        return self._end_stream(worker)

    def _end_stream(self, worker: WorkerState) -> list[Action]:
        worker.move(Phase.ENDED)
        assert self._streams is not None
        self._streams.ended += 1
        for task in worker.tasks.values():
            task.done, task.result = True, None
        worker.tasks.clear()
        return self._deliver()

    # Coming up -----------------------------------------------------------------------------------------------------

    def _booted(self, event: Booted) -> Sequence[Action]:
        worker = self._workers[event.worker]
        if event.life == worker.life:
            self._roster.booted(worker)
            self._budget.booted(worker.id)
        return ()

    def _boot_failed(self, event: BootFailed) -> Sequence[Action]:
        if event.life != self._workers[event.worker].life:
            return [Discard(event.result)]
        return [self._stop(Why.BOOT, event)]

    # Deaths --------------------------------------------------------------------------------------------------------

    def _exited(self, event: Exited) -> Sequence[Action]:
        worker = self._workers[event.worker]
        if event.life != worker.life or worker.phase >= Phase.AWAY:
            return ()
        if worker.phase is Phase.ENDED:
            self._roster.next_life(worker)
            return [Note(event, Did.NOTHING, 0, 0)]
        task, on = self._charge(worker, event)
        if event.cause in (Cause.RECYCLED, Cause.UNBORN, Cause.PRESSURE):
            counted = task is not None and task.lives is not None and on is not None and on.stage >= Stage.FETCH
            if not counted:
                return self._left(worker, task, on, event)
            self._shrink(worker)  # and its task has had one of its lives
        if task is not None and on is not None and not is_charged(task, on, event):
            on = task = None
        if worker.leaving and task is None:
            return self._replace(worker)  # as we wished: no incident
        return self._died(worker, task, on, event)

    @staticmethod
    def _charge(worker: WorkerState, event: Exited) -> tuple[Task | None, Place | None]:
        """What it was on, if that was a task. Where nobody knows, its first task with a number of lives may have begun,
        and may not be safe to do once more.
        """
        on = event.on
        if on is None:
            first = next(iter(worker.tasks.values()), None)
            if first is None or first.lives is None:
                return None, None
            on = Place(first.id, WHOLE_TASK, Stage.FETCH, 0.0)
        return (worker.tasks[on.task], on) if on.task in worker.tasks else (None, None)

    def _died(self, worker: WorkerState, task: Task | None, on: Place | None, event: Exited) -> list[Action]:
        """Nobody asked it to end: what was it on, and what is to be done?"""
        alone = not any(other.tasks for other in self._workers if other is not worker)
        outcome, strike, needed, suspicion = self._inquest.hold(event, worker, task, on, alone)
        if outcome is AfterDeath.RENEW:
            return self._renew(event)
        spare = 0 if task is None or on is None else on.spare
        if outcome is AfterDeath.STOP:
            note = Note(event, Did.STOPPED, strike, needed, spare, suspicion=suspicion)
            return [note, self._stop(Why.RESTARTS, event)]
        actions: list[Action] = []
        if task is None or on is None:
            did = Did.STARTED
        elif outcome is AfterDeath.BAD:
            did, actions = self._give_up(worker, task, on, event, suspicion)
        else:
            did = Did.SENT_AGAIN
        actions = [Note(event, did, strike, needed, spare, suspicion=suspicion), *actions]
        if self.stopped:
            return actions
        if task is not None:
            task.attempt += 1
        return [*actions, *self._replace(worker), *self._dispatch.give_waiting()]

    def _left(self, worker: WorkerState, task: Task | None, on: Place | None, event: Exited) -> list[Action]:
        """It left for a fresh one, could not be started, or was killed to save memory: nobody is to blame."""
        if task is not None and on is not None:
            task.attempt += 1
            self._inquest.spend(task, on)
        refused = event.cause is not Cause.RECYCLED or event.code == Leave.PROCESSES
        if refused and not self._shrink(worker) and not worker.leaving and not self._inquest.refuse(event, worker):
            return [Note(event, Did.STOPPED_REFUSED, 0, 0), self._stop(Why.RESTARTS, event)]
        actions = self._replace(worker)
        if event.cause is Cause.RECYCLED and event.code == Leave.ASKED:
            return actions  # as we wished: no incident
        did = Did.WENT_ON if worker.phase is Phase.AWAY else Did.REFRESHED
        return [Note(event, did, 0, 0, at_work=self.at_work), *actions]

    def _renew(self, event: Exited) -> list[Action]:
        actions: list[Action] = [Note(event, Did.RENEWED, 0, 0), Renew()]
        for worker in self._roster.alive():
            actions += self._replace(worker)
        return actions

    def _replace(self, worker: WorkerState) -> list[Action]:
        """Its next life begins. If fewer workers are allowed, it has none, and the others take its tasks."""
        left = worker.leaving
        if not self._roster.next_life(worker):
            return self._dispatch.give_to_others(worker)
        actions = self._dispatch.give_again(worker)
        return [*actions, *self._dispatch.open(worker)] if left else actions

    def _give_up(
        self, worker: WorkerState, task: Task, on: Place, event: Exited, suspicion: Suspicion
    ) -> tuple[Did, list[Action]]:
        """A sample, or a whole batch, is bad: do with it what the policy says."""
        position = on.position if on.spare else blamed_position(on)
        if on.spare and on.spare not in task.deadly:
            task.deadly = (*task.deadly, on.spare)
        hopeless = position == WHOLE_TASK or (self._policy.bad_sample == "replace" and _is_out_of_spares(task, on))
        if self._streams is not None or hopeless or self._policy.bad_sample == "raise":
            del worker.tasks[task.id]
            task.done = True
            task.result = Lost(task.id, position, event, task.attempt + 1, suspicion)
            if self._streams is not None:
                return Did.GAVE_UP_STREAM, self._end_stream(worker)
            self._breaker.seen += task.samples
            if task.lives is not None:
                self._budget.progress()  # it is out of the way
            return Did.GAVE_UP_TASK, self._deliver()
        if on.spare:
            return Did.REPLACED_AGAIN, []
        task.bad = (*task.bad, position)
        self._breaker.bad += 1
        actions = self._stop_for_bad() if self._breaker.is_open else []
        if self._policy.bad_sample == "replace":
            return Did.REPLACED, actions
        if len(task.bad) < task.samples:
            return Did.LEFT_OUT, actions
        del worker.tasks[task.id]
        task.done, task.result = True, None
        return Did.LEFT_OUT_LAST, [*actions, *self._deliver()]

    def _stop(self, why: Why, event: BootFailed | Exited) -> Stop:
        self.stopped = True
        return Stop(why, event, self._breaker.bad, self._breaker.seen)

    def _stop_for_bad(self) -> list[Action]:
        self.stopped = True
        results = tuple((task.id, task.result) for task in self._tasks.values() if task.done)
        return [Stop(Why.BAD, None, self._breaker.bad, self._breaker.seen, results)]

    # How many workers ----------------------------------------------------------------------------------------------

    def _allow(self, event: Allowed) -> list[Action]:
        self._dispatch.paused = event.paused
        actions: list[Action] = []
        leaving, coming = self._roster.allow(event.workers)
        for worker in leaving:
            self._dispatch.close(worker)
            if worker.phase is not Phase.AWAY:
                actions.append(Retire(worker.id, worker.life))
        for worker in coming:
            self._roster.bring_back(worker)
            if worker.phase is Phase.STARTING:
                actions.append(Start(worker.id, worker.life))
            actions += self._dispatch.open(worker)
        self._roster.count()
        return [*actions, *self._dispatch.give_waiting()]

    def _shrink(self, worker: WorkerState) -> bool:
        """Go on with one worker less, if that is possible."""
        fewer = self._roster.shrink(worker)
        if fewer:
            self._dispatch.close(worker)
        return fewer

    def _let_go(self, worker: WorkerState) -> None:
        """It gets no more tasks, and a next life only if that many are allowed."""
        self._roster.let_go(worker)
        self._dispatch.close(worker)


def _is_out_of_spares(task: Task, on: Place) -> bool:
    """Nothing can be given for this sample. (If it only raises, its worker says so, and what it raised.)"""
    known = on.position in task.bad
    if not on.spare:
        return known or len(task.deadly) == SPARES  # it is tried no more, so it was no spare that killed either
    return known and len(task.deadly) == SPARES
