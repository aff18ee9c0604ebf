"""An incident: what went wrong, as one record. It is behind the log line, the exception text, the report and the JSON.

`incident_of` asks the rules about a case, and puts case and finding into words.
"""

import re
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from holdfast.core.messages import Cause, Leave, Stage, What
from holdfast.diagnose.finding import KEEPER, TRAINER, Again, Case, Finding, find
from holdfast.diagnose.rules import ALL
from holdfast.diagnose.rules.hang import tells
from holdfast.errors import legible
from holdfast.remote_exception import shown
from holdfast.system.evidence import Evidence
from holdfast.system.linux import signal_name
from holdfast.system.procfs import in_words, name_of
from holdfast.system.snapshot import Snapshot

# Letters of a line in the log: with "WARNING:holdfast:" before it, it fits 120 columns. At least so many are the
# headline's, and the beginning of why it happened is not worth fewer.
LINE, _LEAST, _LEAST_WHY = 103, 50, 40
# Letters of a text, and of a stack, in an incident: an exception may have megabytes, and incidents are kept and logged.
TEXT, _STACK = 4000, 40_000
_OUR_FRAMES = ("/holdfast/loader/loader_job.py", "/holdfast/pool/pool_job.py", "/holdfast/local/worker/worker_loop.py")
# Findings of which what it had is a part.
_ABOUT = frozenset(("unknown", "descriptors-exhausted", "cannot-start-process"))
# From this share of a limit on, code that was refused something may well end its process for it.
_NEAR = 0.8
# Paths, threads and children that are shown, and letters of each.
_SHOWN = 4
_LETTERS = 120


@dataclass(frozen=True, slots=True)
class Incident:
    """One thing that went wrong: what, to whom, why, what was done, what to do."""

    headline: str
    finding: str
    says: str
    seen: tuple[str, ...]
    did: str
    advice: str
    confidence: str
    worker: int
    life: int
    pid: int
    batch: int | None
    index: object
    stage: str
    attempt: int
    signal: str | None
    exit_code: int | None
    stack: str
    again: Again | None = None
    at: float = 0.0
    """Seconds since 1970; 0 when not known."""
    call: str | None = None
    """For a pool: the function that was called. `batch` is then the number of the task."""
    evidence: Evidence | None = None
    """All that was seen, but for the stack; None of an exception."""
    what: str = ""
    """What it is about, as `What` has it, in small letters."""

    def __str__(self) -> str:
        lines = [self.headline, f"  {self.finding}{self.sure}: {self.says}"]
        lines += [f"    seen   {'; '.join(self.seen)}"] if self.seen else []
        lines += [f"    did    {self.did}"] if self.did else []
        lines += [f"    try    {self.advice}", f"    more   holdfast explain {self.finding}"]
        if self.stack:
            lines += ["    stack", *(f"      {line}" for line in self.stack.splitlines())]
        return legible("\n".join(lines))

    @property
    def sure(self) -> str:
        """What is not known for certain says so."""
        return "" if self.confidence == "certain" else f" ({self.confidence})"

    @property
    def line(self) -> str:
        """For the log: what happened, to which sample, what was done, as much as fits. The report has the rest."""
        texts = (self.headline, self.says, self.did)
        headline, says, did = (legible(text).replace("\n", "\\n") for text in texts)
        return _fitted(headline, f" [{self.finding}]{self.sure}", says, did)


def _fitted(headline: str, finding: str, says: str, did: str) -> str:
    """The first of these that fits into LINE letters: all; without batch and attempt; a part of why; without why."""
    brief = re.sub(r" \([^()]*\)$", "", headline)
    first = re.split(r"(?<!nothing)[,;:] ", did)[0]
    done, shorter = (f"; {text}" if text else "" for text in (did, first))
    room = LINE - len(f"{brief}{finding} ...{shorter}")
    lines = [f"{headline}{finding} {says}{done}", f"{brief}{finding} {says}{done}", f"{brief}{finding} {says}{shorter}"]
    lines += [f"{brief}{finding} {says[:room]}...{shorter}"] if room >= _LEAST_WHY else []
    lines += [f"{text}{finding}{end}" for text in (headline, brief) for end in (done, shorter)]
    cut = f"{brief[: max(_LEAST, LINE - len(finding) - len(shorter) - 3)]}...{finding}{shorter}"
    lines += [cut, f"{cut[: LINE - 3]}..."]
    return next(line for line in lines if len(line) <= LINE)


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that was left out, replaced, or raised."""

    index: object
    batch: int
    error: str
    attempts: int
    replaced_by: object = None


def as_dict(record: Incident | BadSample) -> dict[str, Any]:
    """`asdict`, but for the user's indices: those may be anything, and are not copied."""
    if isinstance(record, BadSample):
        return {each.name: getattr(record, each.name) for each in fields(record)}
    again = record.again
    indices = {
        "index": record.index,
        "again": again and {each.name: getattr(again, each.name) for each in fields(again)},
    }
    return asdict(replace(record, index=None, again=None)) | indices


def incident_of(case: Case) -> Incident:
    """Diagnose one case."""
    finding, evidence = find(case, ALL), case.evidence
    stack = _stack(evidence) if evidence is not None and evidence.stack else _traceback(case)
    return told(case, finding, _headline(case, finding), stack)


def told(case: Case, finding: Finding, headline: str, stack: str) -> Incident:
    """One that is diagnosed already."""
    return Incident(
        headline=at_most(headline, TEXT),
        finding=finding.name,
        says=at_most(finding.says, TEXT),
        seen=tuple(at_most(fact, TEXT) for fact in (*finding.seen, *what_it_had(finding.name, case))),
        did=case.did,
        advice=finding.advice,
        confidence=finding.confidence,
        worker=case.worker,
        life=case.life,
        pid=case.pid,
        batch=case.task,
        index=case.index,
        stage=(case.stage or Stage.IDLE).name.lower(),
        attempt=case.attempt,
        signal=signal_name(case.code) if case.cause is Cause.SIGNAL or case.what is What.SIGNALLED else None,
        exit_code=case.code if case.cause is Cause.EXIT else None,
        stack=_end_of(stack, _STACK),
        again=case.again,
        at=case.at,
        call=case.call,
        evidence=_without_stack(case.evidence),
        what=case.what.name.lower(),
    )


# What a process had when the keeper last looked at it, in words; only where that helps to understand its end.


def what_it_had(finding: str, case: Case) -> tuple[str, ...]:
    """Facts to add to what a rule has seen."""
    evidence = case.evidence
    if evidence is None or evidence.look is None:
        return ()
    look = evidence.look
    soft = evidence.bounds.soft("RLIMIT_NOFILE") if evidence.bounds is not None else None
    group = evidence.group
    about = finding in _ABOUT
    told = case.cause is Cause.RECYCLED and case.code == Leave.DESCRIPTORS  # the rule has named its files
    facts = []
    if not told and (about or (soft is not None and look.descriptors >= _NEAR * soft)):
        facts.append(_descriptors(look, soft))
    crowded = (
        group is not None and group.pids_max is not None and group.pids_now + look.threads >= _NEAR * group.pids_max
    )
    if about or crowded:
        facts.append(_threads(look))
    if crowded and group is not None and not about:
        facts.append(f"cgroup pids.max {group.pids_max}, in use {group.pids_now} without it")
    if look.children and (about or crowded):
        facts.append(f"processes it had started: {_some([f'{pid} ({name_of(text)})' for pid, text in look.children])}")
    if not facts:
        return ()
    return (f"{look.age_s:.1f} s before: {facts[0]}" if look.age_s >= 0.05 else facts[0], *facts[1:])


def _descriptors(look: Snapshot, soft: int | None) -> str:
    paths = in_words(look.paths[:_SHOWN])
    limit = f", the limit is {soft}" if soft is not None else ""
    return f"{look.descriptors} descriptors open{limit} ({paths}{', ...' if len(look.paths) > _SHOWN else ''})"


def _threads(look: Snapshot) -> str:
    return f"{look.threads} thread{'s' if look.threads != 1 else ''}" + (
        f" (besides the main one: {_some(list(look.others))})" if look.others else ""
    )


def _some(names: list[str]) -> str:
    return ", ".join(name[:_LETTERS] for name in names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


# The texts of an incident.


def at_most(text: str, letters: int) -> str:
    return text if len(text) <= letters else f"{text[:letters]}... ({len(text) - letters} more letters)"


def _end_of(text: str, letters: int) -> str:
    """A stack says most in its last lines."""
    return text if len(text) <= letters else f"({len(text) - letters} letters before) ...{text[-letters:]}"


def _without_stack(evidence: Evidence | None) -> Evidence | None:
    """As an incident keeps it: the user's part of the stack is a field of its own."""
    return None if evidence is None else replace(evidence, stack="")


def _stack(evidence: Evidence) -> str:
    """The Python lines, and the native ones behind them where somebody could see those."""
    view = evidence.view
    native = view.native if view is not None and tells(view) else ()
    lines = ["", "Native frames inside its innermost Python line (py-spy), innermost first:"] if native else []
    return "\n".join([_users_frames(evidence.stack), *lines, *(f"  {frame}" for frame in native)])


def _users_frames(stack: str) -> str:
    """A dump without the frames below the dataset's: they are ours, and the same each time."""
    lines: list[str] = []
    for line in stack.splitlines():
        lines.append(line)
        if any(ours in line for ours in _OUR_FRAMES):
            break
    return "\n".join(lines)


def _traceback(case: Case) -> str:
    return case.raised.traceback.rstrip() if case.raised is not None else ""


def _headline(case: Case, finding: Finding) -> str:
    who = {KEEPER: "the keeper", TRAINER: "the trainer"}.get(case.worker, f"worker {case.worker}")
    match case.what:
        case What.ROOM:
            return f"memory is short: {case.code} worker{'s' if case.code != 1 else ''} at work for now"
        case What.COPIED:
            return f"{who} has copied {case.code} MiB of what it shared with the trainer"
        case What.UNPINNED:
            return "the trainer cannot let the device read shared memory in place"
        case What.SHARED:
            facts = case.evidence.facts if case.evidence is not None else ()
            return (
                f"{who} forks workers while {facts[0].partition(':')[0] if facts else 'the dataset holds open files'}"
            )
        case What.STATELESS:
            return f"{who} cannot save the state of its stream"
        case What.TRAINER_ENDED:
            end = "is gone" if case.cause is None else _end(case)
        case What.EXITED:
            end = _end(case)
        case What.SILENT:
            end = f"has been silent for {case.code} s"
        case What.SIGNALLED:
            end = f"was sent {signal_name(case.code)}"
        case What.BOOT:
            end = "could not start"
        case What.RETRIED:
            end = "had to try again"
        case What.RAISED:
            end = f"got {case.raised.type_name if case.raised else 'an error'}"
    return f"{who} {end} {where(case)}".rstrip()


def _end(case: Case) -> str:
    match case.cause:
        case Cause.EXIT:
            return f"exited with code {case.code}"
        case Cause.DEADLINE:
            return f"was killed for hanging {case.seconds:.1f} s"
        case Cause.MEMORY:
            return "was killed for its memory limit"
        case Cause.KEEPER:
            return "went with its keeper"
        case Cause.UNBORN:
            return "could not be started"
        case Cause.RECYCLED:
            return "made room for a fresh one"
        case Cause.PRESSURE:
            return "was ended because memory ran short"
        case Cause.ASKED:
            return "was ended because it was not needed any more"
        case _:
            return f"was killed by {signal_name(case.code)}"


def where(case: Case) -> str:
    """ "while loading index 4711 (batch 88, attempt 2)": the same words everywhere."""
    if case.worker == TRAINER:
        return f"(pid {case.pid})"
    if case.what is What.BOOT or case.cause is Cause.UNBORN:
        return ""  # "could not start" says it
    if case.task is None:
        if case.stage in (Stage.BOOT, Stage.INIT):
            return "while starting"
        return "between tasks" if case.of_pool else "between batches"
    if case.of_pool:
        running = "while sending the result of" if case.stage in (Stage.SEND, Stage.ANNOUNCE) else "while running"
        return f"{running} task {case.task} ({case.call}, attempt {case.attempt} of {case.attempts})"
    doing = {
        Stage.FETCH_MANY: "while in __getitems__ of",
        Stage.COLLATE: "while collating",
        Stage.SEND: "while sending",
        Stage.ANNOUNCE: "while sending",
        Stage.REPLAY: "while bringing its stream back to its place for",
    }.get(case.stage or Stage.FETCH)
    strikes = f", strike {case.strike} of {case.needed}" if case.needed else ""
    if case.strike > case.needed > 0:
        strikes = f", death {case.strike} at this {'sample' if doing is None else 'batch'}"
    about = f"batch {case.task}, attempt {case.attempt}{strikes}"
    if doing is not None:
        which = f"index {shown(case.index)} of " if case.stage is Stage.COLLATE and case.index is not None else ""
        return f"{doing} {which}batch {case.task} (attempt {case.attempt}{strikes})"
    what = f"index {shown(case.index)}" if case.index is not None else "an item"
    return f"while loading {what} ({about})"
