"""What a process had when it was last looked at, in words; only where that helps to understand its end."""

from holdfast.core.messages import Cause, Leave
from holdfast.diagnose.finding import Case
from holdfast.system.snapshot import Snapshot

# Findings of which what it had is a part.
_ABOUT = frozenset(("unknown", "descriptors-exhausted", "cannot-start-process"))
# From this share of a limit on, code that was refused something may well end its process for it.
_NEAR = 0.8
# Paths, threads and children that are shown, and letters of each.
_SHOWN = 4
_LETTERS = 80


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
        facts.append(f"processes it had started: {_some([f'{pid} ({text})' for pid, text in look.children])}")
    if not facts:
        return ()
    return (f"{look.age_s:.1f} s before: {facts[0]}" if look.age_s >= 0.05 else facts[0], *facts[1:])


def _descriptors(look: Snapshot, soft: int | None) -> str:
    paths = ", ".join(f"{count} x {path}" for path, count in look.paths[:_SHOWN])
    limit = f", the limit is {soft}" if soft is not None else ""
    return f"{look.descriptors} descriptors open{limit} ({paths}{', ...' if len(look.paths) > _SHOWN else ''})"


def _threads(look: Snapshot) -> str:
    return f"{look.threads} thread{'s' if look.threads != 1 else ''}" + (
        f" (besides the main one: {_some(list(look.others))})" if look.others else ""
    )


def _some(names: list[str]) -> str:
    return ", ".join(name[:_LETTERS] for name in names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
