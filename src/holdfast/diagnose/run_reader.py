"""Reads a run folder: joins what the trainer said with what its keepers noted, and diagnoses what has no verdict.

It needs no torch and runs nothing that it reads: anybody may have written the files.
"""

import time
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from holdfast.core.messages import Cause, Leave, Stage, What
from holdfast.diagnose.finding import KEEPER, TRAINER, Case
from holdfast.diagnose.incident import Incident, incident_of
from holdfast.diagnose.narrator import Record
from holdfast.diagnose.run_folder import INCIDENT, PART, SCHEMA, TOTALS
from holdfast.diagnose.stats import LoaderStats, PoolStats, Stats
from holdfast.system.evidence import Evidence
from holdfast.system.run_files import records_of

# What files that say something else than we wrote may raise here.
NONSENSE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
# Ends that nobody reports, since they were wished for, or followed from that of the keeper.
_WISHED = (Cause.ASKED.name, Cause.KEEPER.name)
_NOT_TOLD = "nothing more: the trainer ended before it could tell this"


@dataclass(frozen=True, slots=True)
class RunPart:
    """One loader, pool or group of ranks. Times are in seconds since 1970."""

    name: str
    kind: str
    pid: int
    command: str
    since: float
    at: float
    """When the trainer or a keeper wrote last."""
    totals_at: float
    """When the trainer wrote totals last."""
    running: bool
    """False if it has ended in order, or its trainer is gone."""
    over: bool
    """It has ended in order."""
    stats: Stats
    record: Record
    workers: tuple[dict[str, Any], ...]
    """What each worker did when the keeper noted it last, at `workers_at`."""
    workers_at: float
    untold: int
    """How many incidents the trainer had no time to tell."""

    @property
    def last_incident(self) -> str:
        """What went wrong last; "" if nothing did."""
        return self.record.incidents[-1].headline if self.record.incidents else ""


def parts_of(folder: Path) -> tuple[list[RunPart], list[str]]:
    """The parts of a run, the latest first; and a line for each file that makes no sense."""
    found, odd = [], []
    for path in sorted(folder.glob("trainer-*.jsonl")):
        try:
            if not path.is_file():
                raise ValueError("no plain file")
            part = part_of(path)
            now_lines(part)
            found.append(part)
        except FileNotFoundError:
            continue  # it has just gone
        except (OSError, *NONSENSE) as error:
            why = error.strerror if isinstance(error, OSError) else "no part of a run, or of another version"
            odd.append(f"left out {path.name}: {why}")
    return sorted(found, key=lambda part: -part.at), odd


def part_of(path: Path) -> RunPart:
    """`path`: the trainer's log. Raises ValueError, or another of `NONSENSE`, if it makes no sense."""
    records = records_of(path)
    head = next(records, {})
    if head.get("record") != PART or head.get("schema") != SCHEMA:
        raise ValueError("no log of ours")
    kind, pid = rebuilt(str, head["kind"]), rebuilt(int, head["pid"])
    of_kind = PoolStats if kind == "pool" else LoaderStats
    stats: Stats = of_kind()
    record, running, at = Record(), True, rebuilt(float, head["at"])
    totals_at = at
    for each in records:
        if each["record"] == INCIDENT:
            record.add(rebuilt(Incident, each))
        elif each["record"] == TOTALS:
            stats, running, totals_at = rebuilt(of_kind, each["stats"]), rebuilt(bool, each["running"]), each["at"]
        at = max(at, rebuilt(float, each["at"]))
    facts = list(_facts(path.with_name(path.name.replace("trainer-", "keeper-"))))
    told = len(record.incidents)
    for incident in _untold(facts, record.incidents):
        record.add(incident)
    ends = [fact for fact in facts if fact["record"] in ("keeper", "stopped", "trainer")]
    stopped = bool(ends) and ends[-1]["record"] == "stopped"
    killed = any(fact["record"] == "trainer" and fact["ended"] for fact in ends)
    at = max([at, *(rebuilt(float, fact["at"]) for fact in facts)])
    nothing: dict[str, Any] = {"workers": [], "at": 0}
    last = next((fact for fact in reversed(facts) if fact["record"] == "workers"), nothing)
    return RunPart(
        name=path.stem.removeprefix("trainer-"),
        kind=kind,
        pid=pid,
        command=rebuilt(str, head["command"]),
        since=rebuilt(float, head["at"]),
        at=at,
        totals_at=totals_at,
        running=running and not stopped and not killed,
        over=stopped or (not running and not killed),
        stats=stats,
        record=record,
        workers=tuple(last["workers"]),
        workers_at=rebuilt(float, last["at"]),
        untold=len(record.incidents) - told,
    )


def _facts(path: Path) -> Iterator[dict[str, Any]]:
    try:
        yield from records_of(path)
    except FileNotFoundError:
        return  # no keeper has begun


def _untold(facts: Sequence[dict[str, Any]], told: Sequence[Incident]) -> Iterator[Incident]:
    """Facts for which there is no verdict, diagnosed."""
    verdicts = Counter((i.what, i.worker, i.life, i.pid) for i in told)
    findings = {incident.finding for incident in told}
    settings: dict[str, Any] = {}
    for fact in facts:
        if fact["record"] == "keeper":
            settings = fact
        case = _case(fact, settings)
        if case is None:
            continue
        key = (case.what.name.lower(), case.worker, case.life, case.pid)
        if verdicts[key]:
            verdicts[key] -= 1
            continue
        incident = incident_of(case)
        if case.cause is Cause.RECYCLED and incident.finding in findings:
            continue  # a leak comes again and again, and is told once
        yield incident


def _case(fact: dict[str, Any], settings: dict[str, Any]) -> Case | None:
    """What this fact is about; None if it is no incident."""
    match fact["record"]:
        case "exited" if fact["cause"] not in _WISHED:
            cause: Cause | None = Cause[fact["cause"]]
            if cause is Cause.RECYCLED and fact["code"] == Leave.ASKED:
                return None
            what = What.EXITED
        case "noticed":
            cause, what = None, What[fact["what"]]
        case "signalled":
            fact, cause, what = {**fact, "worker": KEEPER, "life": 0, "on": None, "index": None}, None, What.SIGNALLED
        case "trainer" if fact["ended"]:
            code = fact["exit_code"]
            on = {"worker": TRAINER, "life": 0, "on": None, "index": None, "code": abs(code or 0)}
            fact, what = {**fact, **on}, What.TRAINER_ENDED
            cause = None if code is None else Cause.SIGNAL if code < 0 else Cause.EXIT
        case _:
            return None
    evidence, on = rebuilt(Evidence, fact["evidence"]), fact["on"]
    place: dict[str, Any] = {}
    if on is not None:
        stage = Stage[on["stage"]]
        place = {"stage": stage, "seconds": rebuilt(float, on["seconds"])}
        if stage >= Stage.FETCH:
            place |= {"task": rebuilt(int, on["task"]), "index": fact["index"]}
    return Case(
        what=what,
        worker=rebuilt(int, fact["worker"]),
        life=rebuilt(int, fact["life"]),
        pid=evidence.pid,
        cause=cause,
        code=rebuilt(int, fact["code"]),
        evidence=evidence,
        sample_timeout=settings.get("sample_timeout"),
        worker_memory=settings.get("growth_bytes"),
        start_method=settings.get("start_method", "fork"),
        call="" if settings.get("pool") else None,
        did=_NOT_TOLD if what is not What.TRAINER_ENDED else "ended its workers",
        at=rebuilt(float, fact["at"]),
        **place,
    )


def now_lines(part: RunPart) -> list[str]:
    """What its workers did at last."""
    lines = []
    for worker in part.workers:
        on = worker["on"]
        what = f"index {worker['index']}, " if worker["index"] is not None else ""
        age = time.time() - part.workers_at if part.running else 0.0
        lines.append(
            f"worker {worker['worker']} (pid {worker['pid']}): {what}{on['stage'].lower()} for "
            f"{on['seconds'] + age:.1f} s, {worker['resident_bytes'] / 2**20:.0f} MiB resident"
        )
    return lines


def rebuilt(kind: Any, data: Any) -> Any:
    """A record of this kind from its JSON. Raises TypeError or another of `NONSENSE` if it is none."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if data is None else rebuilt(next(each for each in inner if each is not type(None)), data)
    if origin is tuple:
        kinds = [inner[0]] * len(data) if inner[-1] is ... else inner
        return tuple(rebuilt(each, value) for each, value in zip(kinds, data, strict=True))
    if origin is dict:
        return {rebuilt(inner[0], name): rebuilt(inner[1], value) for name, value in data.items()}
    if kind is float and isinstance(data, int):
        return float(data)
    if kind in (int, float, str, bool):
        if type(data) is not kind:
            raise TypeError(f"{data!r} is no {kind.__name__}")
        return data
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[data] if isinstance(data, str) and data in kind.__members__ else kind(data)
    if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields")):
        hints = get_type_hints(kind)
        names = [each.name for each in fields(kind)] if is_dataclass(kind) else list(hints)
        parts = data if isinstance(data, dict) else dict(zip(names, data, strict=True))
        return kind(**{name: rebuilt(hints[name], parts[name]) for name in names if name in parts})
    return data
