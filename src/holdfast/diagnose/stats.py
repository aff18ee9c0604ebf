"""Stats: the totals of a loader or of a pool, as records. Users get them as a dict: see `to_dict`."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """What one worker has done and used, over all its lives. Memory and descriptors are those of its present life."""

    worker: int
    batches: float = 0
    """For a pool: tasks."""
    samples: float = 0
    bytes_sent: float = 0
    busy_s: float = 0.0
    memory_bytes: float = 0
    peak_bytes: float = 0
    descriptors: float = 0
    waiting_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderStats:
    """A loader, over all its epochs."""

    batches: int = 0
    samples: int = 0
    retries: int = 0
    restarts: int = 0
    bad_samples: int = 0
    waited_s: float = 0.0
    """How long next() waited for a batch."""
    ran_s: float = 0.0
    """How long the epochs took."""
    workers: int = 0
    cpus: int = 0
    per_worker: tuple[WorkerStats, ...] = ()
    caches: dict[str, dict[str, float]] = field(default_factory=dict)
    device_waited_s: float | None = None
    """The device's own measure of how long it waited for data; None where no device was measured."""
    device_ran_s: float | None = None
    device_waited_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """A pool. `running`: calls that are with workers now; `waiting`: calls that wait for one."""

    submitted: int = 0
    done: int = 0
    raised: int = 0
    lost: int = 0
    cancelled: int = 0
    retries: int = 0
    restarts: int = 0
    running: int = 0
    waiting: int = 0
    workers: int = 0
    per_worker: tuple[WorkerStats, ...] = ()


Stats = LoaderStats | PoolStats


def to_dict(stats: Stats) -> dict[str, Any]:
    """For users and for JSON. What was not measured is left out."""
    found = {each.name: getattr(stats, each.name) for each in fields(stats)}
    found["per_worker"] = [asdict(row) for row in stats.per_worker]
    return {name: value for name, value in found.items() if value is not None}


def summary(stats: Stats) -> str:
    """The totals in one line."""
    match stats:
        case LoaderStats():
            return (
                f"{stats.batches} batches, {stats.samples} samples delivered; {stats.restarts} workers restarted, "
                f"{stats.bad_samples} bad samples, {stats.retries} retries"
            )
        case PoolStats():
            return (
                f"{stats.done} of {stats.submitted} tasks done, {stats.raised} of them raised, {stats.lost} were lost; "
                f"{stats.cancelled} cancelled, {stats.retries} retries, {stats.restarts} workers restarted"
            )


def done_by(stats: Stats, worker: WorkerStats) -> str:
    """What a worker has done, in the words of its face."""
    return f"{worker.batches:,.0f} tasks" if isinstance(stats, PoolStats) else f"{worker.samples:,.0f} samples"
