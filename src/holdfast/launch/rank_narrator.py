"""What the user reads about ranks: the cause with its finding, what followed from it, and what was printed last."""

import time
from collections.abc import Sequence
from dataclasses import replace

from holdfast.core.messages import Cause, Stage, What
from holdfast.diagnose.finding import Case, Finding, find
from holdfast.diagnose.incident import told
from holdfast.diagnose.machine import Machine
from holdfast.diagnose.rules import ALL
from holdfast.diagnose.rules.deaths import CRASH_ADVICE
from holdfast.launch.cause import EndKind, RankExited, RankRaised, RootCause
from holdfast.launch.rank_group import RankGroup
from holdfast.launch.rank_life import Rank
from holdfast.remote_exception import rebuild
from holdfast.shm.main_module import GUARD, NO_GUARD
from holdfast.system.evidence import Evidence
from holdfast.system.linux import signal_name

# Only where they do not start again by themselves.
_RESTARTS = "; Policy(restarts=3) starts all ranks again"
# Advice for ranks, where the rules advise on workers of a loader.
_ADVICE = {
    "worker-oom-killed": "use a smaller batch or model per rank, fewer ranks (nprocs), or fewer loader workers in each "
    "rank; `holdfast doctor` shows what this machine grants",
    "worker-killed": f"look at the scheduler's log, and for whoever runs kill -9 or pkill here{_RESTARTS}",
    "worker-exited": "look for sys.exit, os._exit or a library that calls exit() in what the function does",
}
_CRASHED = "the last Python line of the stack called the library that crashed"
_MOST_TEXT = 300


def case_of(rank: Rank) -> Case:
    """A rank's end as the rules of diagnosis ask for it: they treat a rank like a worker."""
    last_words = rank.last_words
    code = rank.exit_code
    if last_words is not None and last_words.what in ("raised", "boot"):
        what = What.BOOT if last_words.what == "boot" else What.RAISED
        about = {"worker": rank.number, "pid": rank.pid, "worker_memory": rank.growth_bytes}
        return Case(what=what, raised=last_words.raised, **about)  # type: ignore[arg-type]
    return Case(
        what=What.EXITED if rank.entered or code <= 0 else What.BOOT,
        worker=rank.number,
        pid=rank.pid,
        cause=Cause.SIGNAL if code < 0 else Cause.EXIT,
        code=abs(code),
        evidence=rank.evidence,
    )


def finding_of(case: Case) -> Finding:
    """Why a rank ended, in words for ranks."""
    raised = case.raised
    if case.what is What.BOOT and case.code == NO_GUARD:
        return Finding(
            "rank-cannot-start",
            "each rank imports the script again, and there the script began to start processes of its own",
            ("the rank noticed that, and ended before it reached the function",),
            'def main(): ..., and at the end of the script: if __name__ == "__main__": main()',
        )
    if case.what is What.BOOT and raised is None:
        return Finding(
            "rank-cannot-start",
            "the process ended before it reached the function: most often because importing the main module raised",
            (f"exit code {case.code}, before the function was reached",),
            "its output, below, says why; each rank imports the script",
            "likely",
        )
    if case.what is What.BOOT and raised is not None:
        return Finding(
            "rank-cannot-start",
            f"the function or its arguments could not be opened in the rank: {raised.type_name}: {_short(raised.text)}",
            ("it was raised before the function was called", *raised.facts),
            "look at what importing its module does, and at what unpickling the arguments does; a new process must be "
            "able to import the module",
        )
    finding = find(case, ALL)
    if raised is not None and finding.name in ("sample-raised", "exception-not-picklable"):
        return Finding(
            "rank-raised",
            f"the function raised {raised.type_name}: {_short(raised.text)}",
            raised.facts,
            "the traceback below ends on the line that raised it",
        )
    advice = _CRASHED if finding.advice == CRASH_ADVICE else _ADVICE.get(finding.name, finding.advice)
    sender = case.evidence.sender if case.evidence is not None else None
    sent = (f"sent by {sender}",) if sender is not None else ()
    seen = tuple(_of_a_rank(text) for text in finding.seen)
    return replace(finding, says=_of_a_rank(finding.says), seen=(*seen, *sent), advice=advice)


def _of_a_rank(text: str) -> str:
    return text.replace("the worker", "the rank").replace("the sample's own code", "its own code")


def echo_finding(done: Sequence[str]) -> Finding:
    """A rank lost its connection to a peer, and no peer has died: nothing else is known."""
    return Finding(
        "rank-lost-peer",
        "it lost the connection to another rank, and no rank had died before",
        tuple(done) or ("no rank had ended before it",),
        "if a rank had ended before: all ranks must make the same number of collective calls (torch's Join helps with "
        "uneven data). If none had: look at the network, and at the time-out of the process group",
        "likely",
    )


def _short(text: str) -> str:
    first = text.strip().partition("\n")[0]
    return first if len(first) <= _MOST_TEXT else first[: _MOST_TEXT - 3] + "..."


def ending(case: Case) -> str:
    """How a rank ended, in torch's own words, which people search for."""
    if case.what is What.BOOT and case.raised is not None:
        return f"could not start: {case.raised.type_name}: {_short(case.raised.text)}"
    if case.raised is not None:
        return f"raised {case.raised.type_name}: {_short(case.raised.text)}"
    if case.cause is Cause.SIGNAL:
        return f"terminated with signal {signal_name(case.code)}"
    return f"terminated with exit code {case.code}"


def too_many(nprocs: int, machine: Machine, method: str, own_bytes: int) -> list[str]:
    """Why that many ranks may not fit. `own_bytes`: what this process holds; a rank will hold about as much."""
    found = []
    if nprocs > machine.cpus:
        quota = "" if machine.cgroup.cpus is None else f", cgroup quota {machine.cgroup.cpus:g}"
        found.append(
            f"{nprocs} ranks share {machine.cpus} processors (affinity {machine.cpus_allowed}{quota}); "
            f"nprocs={machine.cpus} fits"
        )
    wanted = nprocs * own_bytes
    if method != "fork" and wanted > machine.memory_free:
        found.append(
            f"{nprocs} ranks may take {wanted >> 20} MiB at their start, {machine.memory_free >> 20} MiB are free; "
            f"nprocs={max(1, machine.memory_free // max(1, own_bytes))} fits"
        )
    return found


class FailedAttempt:
    """One attempt that failed, as an incident and as an error. `number` of `most`, from 1."""

    def __init__(self, group: RankGroup, verdict: RootCause, number: int, most: int, did: str) -> None:
        assert verdict.cause is not None
        self._group = group
        self._verdict = verdict
        self._number = number
        self.rank = next(rank for rank in group.ranks if rank.number == verdict.cause.rank)
        case = case_of(self.rank)
        self.boot = case.what is What.BOOT
        did = "" if self.boot else did  # who cannot start is not started again
        case = replace(case, did="; ".join(filter(None, (self._stopped(), did))))
        echo = group.kind_of(self.rank) is EndKind.ECHO
        finding = echo_finding(self._done()) if echo else finding_of(case)
        if most > 1:
            finding = replace(finding, advice=finding.advice.replace(_RESTARTS, ""))
        lived = max(0.0, (verdict.cause.at_ns - self.rank.began_ns) / 1e9)
        about = f"rank {self.rank.number} of {len(group.ranks)}, pid {self.rank.pid}, {lived:.1f} s after its start"
        about += f", attempt {number} of {most}" if most > 1 else ""
        raised = self.rank.last_words.raised if self.rank.last_words is not None else None
        evidence = self.rank.evidence
        stack = raised.traceback.rstrip() if raised is not None else _users_frames(evidence)
        stage = Stage.BOOT if self.boot else Stage.FETCH
        case = replace(case, life=number - 1, attempt=number, stage=stage, at=time.time())
        self.incident = told(case, finding, f"process {self.rank.number} {ending(case)} ({about})", stack)

    def _stopped(self) -> str:
        stopped = [str(end.rank) for end, kind in self._verdict.others if kind is EndKind.STOPPED]
        return f"stopped rank {', '.join(stopped)}" if stopped else ""

    def _done(self) -> list[str]:
        cause = self._verdict.cause
        assert cause is not None
        return [
            f"rank {rank.number} had returned {(cause.at_ns - rank.last_words.at_ns) / 1e9:.3f} s before"
            for rank in self._group.ranks
            if rank.last_words is not None and rank.last_words.what == "done" and rank.last_words.at_ns < cause.at_ns
        ]

    def _followed(self) -> list[str]:
        """How the other ranks ended: those that are not the cause."""
        cause = self._verdict.cause
        assert cause is not None
        lines = []
        for end, kind in self._verdict.others:
            rank = next(rank for rank in self._group.ranks if rank.number == end.rank)
            later = (end.at_ns - cause.at_ns) / 1e6
            when = f"{later:.1f} ms later" if later >= 0 else f"noticed {-later:.1f} ms before"
            if kind is EndKind.STOPPED:
                where = _innermost(rank.stack)
                lines.append(f"rank {end.rank} was stopped by Holdfast, {when}{where}")
            elif kind is EndKind.ECHO:
                lines.append(f"rank {end.rank} {ending(case_of(rank))}, {when}: it lost a peer")
            elif kind is EndKind.BROKEN:
                lines.append(f"rank {end.rank} {ending(case_of(rank))}, {when}: perhaps it lost a peer")
            else:
                lines.append(f"rank {end.rank} {ending(case_of(rank))}, {when}")
        return lines

    def error(self, before: Sequence[str]) -> RankExited | RankRaised:
        """The error to raise. `before`: the headlines of earlier attempts."""
        rank, incident = self.rank, self.incident
        last_words = rank.last_words
        raised = last_words.raised if last_words is not None and last_words.what in ("raised", "boot") else None
        text = str(replace(incident, stack="") if raised is not None else incident)
        advice = [GUARD.partition("\n")[0]] if self.boot and rank.exit_code == NO_GUARD else []
        lines = [*advice, text, *(f"    then   {line}" for line in self._followed())]
        lines += [f"    before {line}" for line in before]
        tail = self._group.output.tail(rank.number)
        if tail:
            lines += [f"    output of rank {rank.number}, its last lines", *(f"      | {line}" for line in tail)]
        file = self._group.output.files[rank.number]
        lines += [f"    all of it: {file}"] if file is not None else []
        message = "\n".join(lines)
        if raised is not None:
            message += f"\n\n-- Process {rank.number} terminated with the following error:\n{raised.traceback}"
            error = RankRaised(message, rank.number, rank.pid, incident)
            error.__cause__ = rebuild(raised)
            return error
        return RankExited(message, rank.number, rank.pid, rank.exit_code, incident.signal, incident)


def _users_frames(evidence: Evidence | None) -> str:
    """A stack without the frames below the user's function: those are Holdfast's, and the same each time."""
    lines: list[str] = []
    for line in (evidence.stack if evidence is not None else "").splitlines():
        if "/holdfast/launch/rank_main.py" in line:
            break
        lines.append(line)
    return "\n".join(lines)


def _innermost(stack: str) -> str:
    lines = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    return f"; it did not end, and was in {lines[0]}" if lines else ""
