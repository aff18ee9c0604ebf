"""What a run will need, and what to set for it: arithmetic on a Machine and a Measured; nothing is read here."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

from holdfast.diagnose.fitness import Measured, duration, percentile
from holdfast.diagnose.machine import Machine
from holdfast.diagnose.machine_checks import Check, size

# torch's own default.
PREFETCH = 2
# The share of free memory that loading may use. The model's own batches, and surprises, need the rest.
_SHARE = 0.8
# A sample may take this many times the slowest one seen before it counts as hung, and this many seconds at least.
_PATIENCE = 20
_LEAST_TIMEOUT_S = 30
# Slower samples than this are worth more batches in reserve, if they are few.
_UNEVEN_S = 0.01
# Beyond so many samples a second the dataset is not what takes the time, and its rate would promise too much.
_FAST = 10_000
# Errors that an outage, not the sample, may have caused.
_TRANSIENT = ("OSError", "ConnectionError", "TimeoutError", "ConnectionResetError", "BlockingIOError")


@dataclass(frozen=True, slots=True)
class Forecast:
    """Memory of loading, once all workers are busy and all batches wait."""

    workers: int
    prefetch: int
    batch_bytes: int
    worker_bytes: int
    free_bytes: int
    growth_bytes: int = 0
    """What all workers together keep by the end of an epoch, where they grow."""

    @property
    def waiting_bytes(self) -> int:
        """Batches that are ready, and one that is being filled, of each worker."""
        return self.workers * (self.prefetch + 1) * self.batch_bytes

    @property
    def total_bytes(self) -> int:
        return self.waiting_bytes + self.workers * self.worker_bytes + self.growth_bytes


@dataclass(frozen=True, slots=True)
class Setting:
    """What to pass to the DataLoader, and why."""

    num_workers: int
    prefetch_factor: int
    batch_size: int
    context: str | None = None
    policy: dict[str, Any] = field(default_factory=dict)
    ragged: bool = False
    """The default collate cannot stack these samples: a collate_fn is missing."""
    reasons: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """To paste."""
        lines = ["loader = holdfast.DataLoader(", "    dataset,", f"    batch_size={self.batch_size},"]
        lines.append(f"    num_workers={self.num_workers},")
        if self.num_workers:
            lines.append(f"    prefetch_factor={self.prefetch_factor},")
            lines += [f'    multiprocessing_context="{self.context}",'] if self.context else []
        lines += ["    collate_fn=YOUR_FUNCTION,"] if self.ragged else []
        inside = ", ".join(f"{name}={json.dumps(value)}" for name, value in self.policy.items())
        return "\n".join([*lines, f"    policy=holdfast.Policy({inside}),", ")"])


def forecast(machine: Machine, measured: Measured, workers: int, batch_size: int, prefetch: int = PREFETCH) -> Forecast:
    """Batches of the mean size; a worker as large as the largest reading of the one that was tried out."""
    sizes = [sample.bytes for sample in measured.samples]
    mean = sum(sizes) / len(sizes) if sizes else 0
    return Forecast(
        workers,
        prefetch,
        math.ceil(mean * batch_size),
        _worker_bytes(measured, batch_size),
        machine.memory_free,
        int(measured.growth_bytes * (measured.length or len(sizes))) if workers else 0,
    )


def _worker_bytes(measured: Measured, batch_size: int) -> int:
    """Its own pages, the most it needed while loading, and the samples of a batch before they are collated."""
    life = measured.life
    if not life:
        return 0
    own = max(sample.private for sample in life)
    passing = max(max(0, sample.peak - sample.resident) for sample in life)
    return own + passing + max(sample.bytes for sample in life) * batch_size


def memory_forecast(expected: Forecast) -> Check:
    """Against what is free, in the cgroup or on the host."""
    seen = [
        f"{expected.workers} workers x {size(expected.worker_bytes)} of their own",
        f"{expected.workers} workers x {expected.prefetch + 1} batches x {size(expected.batch_bytes)}",
        f"free: {size(expected.free_bytes)}",
    ]
    if expected.growth_bytes:
        seen.insert(2, f"{size(expected.growth_bytes)} that they keep, over an epoch (see memory-growth)")
    says = (
        f"{expected.workers} workers will need about {size(expected.total_bytes)} of {size(expected.free_bytes)} free"
    )
    if expected.total_bytes <= expected.free_bytes * _SHARE:
        return Check("memory-forecast", "ok", says, tuple(seen))
    fitting = _fitting(expected)
    advice = f"num_workers={fitting} at most, or smaller batches (batch_size)"
    if fitting == 1 and _each(expected) + expected.growth_bytes > expected.free_bytes * _SHARE:
        advice = "smaller batches or samples: not even one worker fits (batch_size, prefetch_factor=1)"
    over = expected.total_bytes > expected.free_bytes
    return Check("memory-forecast", "problem" if over else "warning", says, tuple(seen), advice)


def _fitting(expected: Forecast) -> int:
    """How many workers fit; one at least."""
    each = _each(expected)
    room = expected.free_bytes * _SHARE - expected.growth_bytes
    return max(1, int(room / each)) if each else max(1, expected.workers)


def _each(expected: Forecast) -> float:
    """What one worker needs, with its batches."""
    return (expected.total_bytes - expected.growth_bytes) / max(1, expected.workers)


def recommend(
    machine: Machine, measured: Measured, batch_size: int, fork_safe: bool, workers: int | None = None
) -> Setting:
    """`workers`: what the user asked for; it is kept where it fits into memory and processors."""
    reasons: list[str] = []
    count = _workers(machine, measured, batch_size, workers, reasons)
    prefetch = _prefetch(machine, measured, batch_size, count, reasons)
    context = None
    if not fork_safe and not measured.unpicklable and measured.start_method == "fork":
        context = "forkserver"
        reasons.append('multiprocessing_context="forkserver": this process is not safe to fork (see fork-safety)')
    if fork_safe and measured.unpicklable and measured.start_method != "fork":
        context = "fork"
        reasons.append('multiprocessing_context="fork": the dataset cannot be pickled (see picklable)')
    policy = _policy(machine, measured, count, reasons)
    ragged = len({sample.shape for sample in measured.samples}) > 1
    if ragged:
        reasons.append("collate_fn: samples have different shapes (see shapes)")
    return Setting(count, prefetch, batch_size, context, policy, ragged, tuple(reasons))


def _workers(machine: Machine, measured: Measured, batch_size: int, asked: int | None, reasons: list[str]) -> int:
    cpus = machine.cpus
    spare = 1 if cpus > 2 else 0
    count = asked if asked is not None else cpus - spare
    why = "as asked" if asked is not None else f"{cpus} usable processors" + (", one for the trainer" if spare else "")
    if count > cpus:
        count, why = cpus, f"{count} were asked for, and {cpus} processors are usable"
    fitting = _fitting(forecast(machine, measured, max(1, count), batch_size))
    if measured.samples and fitting < count:
        count, why = fitting, f"more would not fit into {size(machine.memory_free)} of free memory"
    if measured.length and count > (batches := math.ceil(measured.length / batch_size)):
        count, why = batches, f"there are {batches} batches in an epoch"
    rate = _rate(measured)
    speed = (
        f"; about {rate * max(1, min(count, cpus)):,.0f} samples/s, {rate:,.0f} from one" if 0 < rate < _FAST else ""
    )
    reasons.append(f"num_workers={count}: {why}{speed}")
    return count


def _rate(measured: Measured) -> float:
    """Samples a second from one worker."""
    total = sum(measured.seconds)
    return len(measured.seconds) / total if total else 0.0


def _prefetch(machine: Machine, measured: Measured, batch_size: int, workers: int, reasons: list[str]) -> int:
    seconds = measured.seconds
    usual, high = percentile(seconds, 0.5), percentile(seconds, 0.95)
    deeper = forecast(machine, measured, workers, batch_size, 2 * PREFETCH)
    if high < max(_UNEVEN_S, 4 * usual):
        reasons.append(f"prefetch_factor={PREFETCH}: samples take similar times")
        return PREFETCH
    if deeper.total_bytes > deeper.free_bytes * _SHARE:
        reasons.append(f"prefetch_factor={PREFETCH}: samples vary in time, but memory is short")
        return PREFETCH
    reasons.append(f"prefetch_factor={2 * PREFETCH}: samples vary in time, {duration(usual)} to {duration(high)}")
    return 2 * PREFETCH


def _policy(machine: Machine, measured: Measured, workers: int, reasons: list[str]) -> dict[str, Any]:
    policy: dict[str, Any] = {}
    slowest = measured.seconds[-1] if measured.seconds else 0.0
    policy["sample_timeout"] = _round_up(max(_LEAST_TIMEOUT_S, _PATIENCE * slowest))
    reasons.append(f"sample_timeout={policy['sample_timeout']}: the slowest sample seen took {duration(slowest)}")
    if measured.may_skip:
        policy["bad_sample"] = "skip"
        share = len(measured.bad) / max(1, len(measured.bad) + len(measured.samples))
        reasons.append(f'bad_sample="skip": {share:.0%} of the samples tried cannot be loaded')
        if share > 0.05:
            policy["max_bad"] = min(1.0, math.ceil(share * 20) / 10)
            reasons.append(f"max_bad={policy['max_bad']}: about twice the share that was bad here")
    if measured.may_skip and any(bad.error.startswith(_TRANSIENT) for bad in measured.bad):
        policy["retries"] = 2
        reasons.append("retries=2: an OSError may go away")
    if measured.growth_bytes:
        gib = max(1, int(machine.memory_free * _SHARE / max(1, workers) / (1 << 30)))
        policy["worker_memory"] = f"{gib}GiB"
        reasons.append(f'worker_memory="{gib}GiB": workers grow; beyond it the line that allocates raises MemoryError')
    return policy


def _round_up(seconds: float) -> int:
    """To a number that people would write."""
    for nice in (30, 60, 120, 300, 600, 1200, 1800):
        if seconds <= nice:
            return nice
    return 3600
