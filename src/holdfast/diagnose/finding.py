"""Case, Finding, Rule, and the order in which rules are asked.

A Case is all that is known of one incident. A rule is a pure function of it: a Finding, or None when it does not
apply. The first finding wins, so the rules stand from the most to the least specific; the last one is `unknown`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from holdfast.core.messages import NO_SUSPICION, Cause, Did, Stage, Suspicion, What
from holdfast.remote_exception import Raised, shown
from holdfast.system.evidence import Evidence

# The `worker` of a case that is about another process of ours.
KEEPER, TRAINER = -1, -2

Confidence = Literal["certain", "likely", "possible"]


@dataclass(frozen=True, slots=True)
class Again:
    """What it takes to load a sample once more, with the same random numbers: those before it in its batch."""

    seed: int
    batch: int
    indices: tuple[Any, ...]
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is known of one incident."""

    what: What
    worker: int
    life: int = 0
    pid: int = 0
    task: int | None = None
    index: object = None
    stage: Stage | None = None
    seconds: float = 0.0
    attempt: int = 1
    strike: int = 0
    needed: int = 0
    suspicion: Suspicion = NO_SUSPICION
    cause: Cause | None = None
    code: int = 0
    evidence: Evidence | None = None
    raised: Raised | None = None
    sample_timeout: float | None = None
    worker_memory: int | None = None
    start_method: str = "fork"
    again: Again | None = None
    call: str | None = None
    """Of a pool: the name of the function that the task calls; "" between tasks. None for a loader."""
    attempts: int = 1
    """Of a pool: how often the task may be begun."""
    did: str = ""
    done: Did | None = None
    """What the ledger did; `did` says it in words."""
    at: float = 0.0
    """When the trainer learned of it, in seconds since 1970; 0 when nobody looked at the clock."""

    @property
    def of_pool(self) -> bool:
        """A task of a pool, and not a sample of a loader."""
        return self.call is not None


@dataclass(frozen=True, slots=True)
class Finding:
    """Why it happened, how we know, what to change. `name` is stable, and a page of the docs."""

    name: str
    says: str
    seen: tuple[str, ...]
    advice: str
    confidence: Confidence = "certain"


Rule = Callable[[Case], Finding | None]


def find(case: Case, rules: tuple[Rule, ...]) -> Finding:
    """The first rule that knows. A rule that breaks must not hide the incident: it is said, and the next one asked."""
    for rule in rules:
        try:
            finding = rule(case)
        except Exception as error:
            name = getattr(rule, "__name__", repr(rule))
            return Finding(
                "unknown",
                f"the rule {name} broke: {error!r}",
                (_plain(case),),
                "please report this",
                "possible",
            )
        if finding is not None:
            return finding
    return Finding("unknown", "no rule knows this", (_plain(case),), "look at what was seen", "possible")


def _plain(case: Case) -> str:
    """Without the evidence, which is in the JSON with all its series."""
    return shown(replace(case, evidence=None))
