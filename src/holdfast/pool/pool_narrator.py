"""What Holdfast tells the user of a pool: its words, its exceptions, its totals."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.core.messages import Cause, Did, Exited, Lost, Note, Stop, What
from holdfast.diagnose.finding import Case
from holdfast.diagnose.incident import incident_of, where
from holdfast.diagnose.narrator import Narrator, Record
from holdfast.diagnose.stats import PoolStats
from holdfast.errors import HoldfastError, PoolBroken, RemoteTraceback, TaskLost, TaskTimeout
from holdfast.policy import Policy
from holdfast.pool.call import Call
from holdfast.pool.pool_job import CallFailure
from holdfast.remote_exception import Raised, rebuild, text_of, to_raise, told

_COUNTS = ("submitted", "done", "raised", "lost", "cancelled", "retries", "restarts")


class PoolNarrator(Narrator):
    """The narrator of one pool. `calls`: the calls that are with workers, by number."""

    def __init__(
        self,
        record: Record,
        policy: Policy,
        growth_bytes: int | None,
        start_method: str,
        calls: Mapping[int, Call],
    ) -> None:
        super().__init__(record, policy, growth_bytes, start_method, call="")
        self._calls = calls

    def name(self, task: int, position: int) -> dict[str, Any]:
        call = self._calls.get(task)
        if call is None:
            return {}
        return _about(call.alone(task, min(position, call.items - 1)) if call.items and position >= 0 else call)

    def death(self, note: Note) -> Case:
        """Tasks of a pool have a number of attempts and no strikes, so this tells none."""
        return replace(super().death(note), strike=0, needed=0)

    def did(self, note: Note) -> str:
        on = note.event.on
        call = self._calls.get(on.task) if on is not None else None
        if not note.needed:
            return "started a new worker; no task was lost"
        if call is not None and call.items:
            again = "is run again" if call.lives > 1 else "has this error"
            return f"started a new worker; this item {again}, the others of its chunk go on"
        if note.strike < note.needed:
            return "started a new worker, which runs the task again"
        return "started a new worker; the task is not run again, its future has this error"

    # One task ------------------------------------------------------------------------------------------------------

    def lost(self, call: Call, lost: Lost) -> HoldfastError:
        """The call ended its last life. Gives the error for its future."""
        case = replace(self.death(Note(lost.event, Did.GAVE_UP_TASK, lost.attempts, lost.attempts)), **_about(call))
        incident = incident_of(case)
        kind = TaskTimeout if lost.event.cause is Cause.DEADLINE else TaskLost
        return kind(str(incident), call.number, call.name, case.worker, incident.stack or None)

    def killed(self, call: Call) -> TaskLost:
        """The user killed all workers, and one of them had this call."""
        text = f"task {call.number} ({call.name}) was lost: kill_workers() or terminate_workers() ended its worker"
        return TaskLost(text, call.number, call.name)

    def failure(self, call: Call, failure: CallFailure, worker: int, pid: int) -> BaseException:
        """The task raised. Gives the error for its future."""
        case = replace(
            self.blank,
            what=What.RAISED,
            worker=worker,
            worker_memory=call.memory or self.blank.worker_memory,
            pid=pid,
            stage=failure.stage,
            attempt=failure.attempts,
            raised=failure.raised,
            did="its future has this error",
            at=time.time(),
            **_about(call),
        )
        incident = incident_of(case)
        self.record.add(incident)
        self.record.counts["retries"] += failure.attempts - 1
        if failure.unopened:
            return self._unopened(call, worker, failure.raised)
        said = f"in worker {worker} (pid {pid}) {where(case)}"
        if incident.finding != "task-raised":  # which says no more than the exception does
            said += f"\n  {incident.finding}: {incident.says}"
        error = rebuild(failure.raised)
        if error is None:
            return to_raise(failure.raised, said, None, worker)
        # It comes as itself, even SystemExit: it is raised only if the user asks the future for its result.
        return told(error, said, RemoteTraceback(failure.raised.traceback))

    def _unopened(self, call: Call, worker: int, raised: Raised) -> TaskLost:
        error = TaskLost(
            f"task {call.number} ({call.name}) was lost: worker {worker} could not unpickle it: "
            f"{raised.type_name}: {raised.text}\n"
            "    did    nothing: it was not called\n"
            "    try    pickle.loads(pickle.dumps((function, arguments))) in a fresh interpreter",
            call.number,
            call.name,
            worker,
        )
        error.__cause__ = rebuild(raised) or RemoteTraceback(raised.traceback)
        return error

    def unreadable(self, call: Call, cause: BaseException) -> TaskLost:
        """The result came, and unpickling it raised. Gives the error for the call's future."""
        error = TaskLost(
            f"the result of task {call.number} ({call.name}) was lost: unpickling it here raised "
            f"{type(cause).__name__}: {text_of(cause, BaseException)}\n"
            "    did    nothing more: the task itself had ended well\n"
            "    try    pickle.loads(pickle.dumps(result)) on what the function returns",
            call.number,
            call.name,
        )
        error.__cause__ = cause
        return error

    # All of them ---------------------------------------------------------------------------------------------------

    def boot_failure(self, raised: Raised, worker: int) -> PoolBroken:
        """A worker could not start. Gives the error for all futures."""
        incident = self.could_not_start(raised, worker)
        error = PoolBroken(f"the initializer of the pool raised, so no worker can start\n{incident}")
        error.__cause__ = to_raise(raised, f"in worker {worker} while it started", None, worker)
        return error

    def stop(self, stop: Stop) -> PoolBroken:
        """Workers die again and again. Gives the error for all futures."""
        event = stop.event
        assert isinstance(event, Exited)
        incident = incident_of(replace(self.death(Note(event, Did.STOPPED, 0, 0)), did="gave up: all tasks fail"))
        return PoolBroken(f"{self.gave_up(event)}\n{incident}")


def stats_of(record: Record, running: int, waiting: int, workers: int) -> PoolStats:
    """The totals so far, and how many calls run and wait right now."""
    counts = {name: record.counts[name] for name in _COUNTS}
    return PoolStats(**counts, running=running, waiting=waiting, workers=workers, per_worker=record.workers.stats())


def _about(call: Call) -> dict[str, Any]:
    return {"task": call.number, "call": call.name, "attempts": call.lives, "sample_timeout": call.timeout_s}
