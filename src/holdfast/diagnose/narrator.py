"""Narrator: makes incidents of what happened to workers, for the report and for the log. Each face has its own kind.

Nothing here decides or waits. One `Case` is behind the log line, the report and the text of an exception.
"""

import time
from dataclasses import replace
from typing import Any

from holdfast.core.host import Silence
from holdfast.core.messages import Cause, Exited, Note, Place, Stage, What
from holdfast.diagnose.finding import Case
from holdfast.diagnose.incident import Incident, incident_of
from holdfast.diagnose.report import Record
from holdfast.policy import Policy
from holdfast.remote_exception import Raised
from holdfast.system.evidence import Evidence
from holdfast.system.signal_origin import warn


class Narrator:
    """The narrator of one face. `blank`: what all its cases share. `call`: "" for a pool, see Case."""

    def __init__(
        self, record: Record, policy: Policy, growth_bytes: int | None, start_method: str, call: str | None = None
    ) -> None:
        self.record = record
        self.policy = policy
        self.blank = Case(
            what=What.EXITED,
            worker=0,
            sample_timeout=policy.sample_timeout,
            worker_memory=growth_bytes,
            start_method=start_method,
            call=call,
        )

    def name(self, task: int, position: int) -> dict[str, Any]:
        """The fields of a Case that name this place as the user knows it."""
        raise NotImplementedError

    def did(self, note: Note) -> str:
        """What the ledger did, in the words of this face."""
        raise NotImplementedError

    def tell(self, case: Case) -> Incident:
        """Put this case into the report and the log. The log has the 1st, 2nd, 4th, 8th, ... of the same."""
        incident = incident_of(case)
        times = self.record.add(incident)
        if times & (times - 1) == 0:
            warn(incident.line if times == 1 else f"{incident.line} ({times} times so far)")
        return incident

    def incident(self, note: Note | Silence) -> None:
        """Something happened to a worker, and the ledger has dealt with it."""
        if isinstance(note, Note):
            self.record.counts["restarts"] += 1
            case = self.death(note)
            if note.event.cause is Cause.RECYCLED and self._told_before(case):
                return
            self.tell(case)
        else:
            facts = {"worker": note.worker, "life": note.life, "what": note.what, "code": note.code}
            self.tell(self.at(note.on, note.evidence, **facts))

    def could_not_start(self, raised: Raised, worker: int) -> Incident:
        """A worker raised before it was ready."""
        case = replace(self.blank, what=What.BOOT, worker=worker, stage=Stage.INIT, raised=raised, at=time.time())
        return self.tell(case)

    def gave_up(self, event: Exited) -> str:
        """Why there is no other life. The text of the last death follows."""
        if event.cause is Cause.KEEPER:
            return (
                "the keeper, the process between this one and the workers, ends again and again; it may have printed "
                'why. With spawn: does the main module start its work under if __name__ == "__main__"? Last:'
            )
        if event.on is not None and event.on.stage < Stage.IDLE:
            return "workers die before they are ready; the last:"
        return f"a worker died more than {self.policy.restarts} times in a row without any progress; the last:"

    def _told_before(self, case: Case) -> bool:
        """A leak comes again and again. It is told once, and counted."""
        finding = incident_of(case).finding
        name = f"incident:{finding}"
        self.record.counts["recycled"] += 1
        self.record.last_at[finding] = case.at
        self.record.counts[name] += bool(self.record.counts[name])
        return self.record.counts[name] > 0

    def death(self, note: Note) -> Case:
        """A life that ended, as a case."""
        event = note.event
        return self.at(
            event.on,
            event.evidence,
            worker=event.worker,
            life=event.life,
            cause=event.cause,
            code=event.code,
            strike=note.strike,
            needed=note.needed,
            suspicion=note.suspicion,
            attempt=max(1, note.strike),
            did=self.did(note),
            done=note.did,
        )

    def at(self, on: Place | None, evidence: object, **facts: Any) -> Case:
        """A case at that place."""
        assert isinstance(evidence, Evidence)
        facts |= {"pid": evidence.pid, "evidence": evidence, "at": time.time()}
        if on is not None:
            facts |= {"stage": on.stage, "seconds": on.seconds}
            if on.stage >= Stage.FETCH:
                facts |= self.name(on.task, on.position)
        return replace(self.blank, **facts)
