"""Checks of a dataset that was tried out: what fails, grows, leaks or differs. Measured by loader/probe.py.

The records are plain; the checks are pure functions of them. What to set follows from them in forecast.py.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from holdfast.diagnose.machine_checks import Check, size

# Fewer samples in one worker's life say nothing of growth.
_ENOUGH = 12
# An allocator takes memory in steps: less than this, over all samples seen, is no growth.
_STEP_BYTES = 8 << 20
# A descriptor now and then is a cache; one in five samples is a leak.
_LEAKED_PER_SAMPLE = 0.2
# What Holdfast lets a worker have open, at most.
_MOST_DESCRIPTORS = 65_536
# With more than this share bad, the dataset is at fault, not its samples.
_FEW_BAD = 0.25
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample, as measured inside the worker that loaded it."""

    index: object
    seconds: float
    bytes: int
    shape: str
    digest: str = ""
    pid: int = 1
    resident: int = 0
    peak: int = 0
    private: int = 0
    """Memory that is the worker's alone; read now and then only: 0 where it was not."""
    descriptors: int = 0
    unsendable: str = ""
    """Why it cannot be sent to the trainer; empty when it can."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """One index again, later and in another order: what differed from the first time."""

    index: object
    by_order: bool
    """The first load of it now, with the seed of then, is not what it was."""
    by_call: bool
    """Two loads at once, with one seed, differ."""
    by_seed: bool
    """Another seed gives another sample: augmentation."""


@dataclass(frozen=True, slots=True)
class Bad:
    """A sample that raised, hung or killed its worker."""

    index: object
    error: str
    finding: str = ""
    stack: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that the probe learnt of a dataset."""

    name: str
    expression: str = ""
    """Python that makes the dataset, for a command to paste: "data.train()"."""
    kind: str = "map"
    length: int | None = None
    asked: int = 0
    samples: tuple[Sample, ...] = ()
    repeats: tuple[Repeat, ...] = ()
    bad: tuple[Bad, ...] = ()
    import_s: float = 0.0
    pickled_bytes: int | None = None
    unpicklable: str = ""
    start_method: str = "fork"
    fork_safe: bool = True
    """Nothing that this process has started breaks in a fork of it."""
    cut_short: bool = False

    @property
    def seconds(self) -> list[float]:
        return sorted(sample.seconds for sample in self.samples)

    @property
    def may_skip(self) -> bool:
        """True where bad samples are few enough to go on without; a stream ends with its first."""
        few = len(self.bad) <= _FEW_BAD * (len(self.bad) + len(self.samples))
        return bool(self.bad) and few and self.kind == "map"

    @property
    def life(self) -> tuple[Sample, ...]:
        """The samples of the worker that loaded most of them: what grows, grows within one life."""
        if not self.samples:
            return ()
        pid = Counter(sample.pid for sample in self.samples).most_common(1)[0][0]
        return tuple(sample for sample in self.samples if sample.pid == pid)

    @property
    def growth_bytes(self) -> float:
        """Resident memory per sample; 0 where it is within what an allocator does. The first samples warm up."""
        life = self.life
        if len(life) < _ENOUGH:
            return 0.0
        quarter = len(life) // 4
        early = median(sample.resident for sample in life[quarter : 2 * quarter])
        late = median(sample.resident for sample in life[-quarter:])
        apart = len(life) - 2 * quarter
        return (late - early) / apart if late - early >= _STEP_BYTES else 0.0

    @property
    def leaked_descriptors(self) -> float:
        """Per sample; 0 where a cache explains them."""
        life = self.life
        if len(life) < _ENOUGH:
            return 0.0
        half = life[len(life) // 2 :]
        each = (half[-1].descriptors - half[0].descriptors) / (len(half) - 1)
        return each if each >= _LEAKED_PER_SAMPLE else 0.0


def percentile(ordered: list[float], share: float) -> float:
    """A percentile of sorted numbers; 0 if there are none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def check_dataset(measured: Measured, workers: int) -> tuple[Check, ...]:
    """All of them; those that have nothing to go by say nothing."""
    found = (check(measured, workers) for check in ALL)
    return tuple(check for check in found if check is not None)


def _indices(indices: list[object]) -> str:
    more = f", and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else ""
    return ", ".join(map(repr, indices[:_SHOWN])) + more


def _command(measured: Measured, index: object) -> str:
    """Loads one sample in the foreground; ends also where it hangs."""
    what = f"{measured.expression}[{index!r}]" if measured.kind == "map" else f"list({measured.expression})"
    return f"timeout 60 {_python(measured, what)}"


def _python(measured: Measured, what: str) -> str:
    return f'python -c "import {measured.name.partition(":")[0]}; {what}"'


# The checks ----------------------------------------------------------------------------------------------------------


def loads(measured: Measured, workers: int) -> Check:
    """Samples that raise, hang or kill."""
    tried = len(measured.samples) + len(measured.bad)
    seen = [f"index {bad.index!r}: {bad.error}" if bad.index is not None else bad.error for bad in measured.bad]
    more = [f"and {len(seen) - _SHOWN} more"] if len(seen) > _SHOWN else []
    if measured.length == 0:
        look = _python(measured, f"print(len({measured.expression}))")
        return Check("samples", "problem", "the dataset is empty", (), f"see that it finds its files: {look}")
    if measured.bad:
        first = next((bad.index for bad in measured.bad if bad.index is not None), 0)
        says = f"{len(measured.bad)} of {tried} samples cannot be loaded"
        if not measured.samples and all(bad.index is None for bad in measured.bad):
            says = "no worker could start to load samples"
        skip = 'go on without them by Policy(bad_sample="skip"); ' if measured.may_skip else ""
        advice = f"{skip}to see the first of them fail: {_command(measured, first)}"
        return Check("samples", "problem", says, (*seen[:_SHOWN], *more), advice)
    unsendable = [sample for sample in measured.samples if sample.unsendable]
    if unsendable:
        says = f"{len(unsendable)} of {tried} samples hold what cannot be sent to the trainer"
        facts = tuple(f"index {sample.index!r}: {sample.unsendable}" for sample in unsendable[:_SHOWN])
        advice = "return plain data (tensors, arrays, numbers, strings); to look at one: "
        return Check("samples", "problem", says, facts, advice + _command(measured, unsendable[0].index))
    of = "" if measured.length is None else f" of {measured.length}"
    if measured.cut_short and tried < measured.asked:
        says = f"{tried} samples{of} load; the time for trying ran out before all {measured.asked}"
        return Check("samples", "ok", says)
    return Check("samples", "ok", f"{tried} samples{of} load")


def picklable(measured: Measured, workers: int) -> Check:
    """Forked workers inherit the dataset; all others unpickle it. From Python 3.14 on nothing is forked by default."""
    if measured.unpicklable:
        forked = measured.start_method == "fork"
        advice = "open such things at the first __getitem__, or leave them out by __getstate__"
        if not forked and measured.fork_safe:
            advice += "; until then: multiprocessing_context='fork'"
        says = "the dataset cannot be pickled: it works in forked workers only"
        return Check("picklable", "warning" if forked else "problem", says, (measured.unpicklable,), advice)
    assert measured.pickled_bytes is not None
    return Check("picklable", "ok", f"{size(measured.pickled_bytes)} pickled")


def speed(measured: Measured, workers: int) -> Check | None:
    """A batch is as slow as its slowest sample."""
    seconds = measured.seconds
    if not seconds:
        return None
    usual, high = percentile(seconds, 0.5), percentile(seconds, 0.95)
    seen = (f"median {duration(usual)}, 95 % within {duration(high)}, slowest {duration(seconds[-1])}",)
    # (the first sample warms caches and imports; it is slow in every dataset)
    slow = [s for s in measured.samples[1:] if s.seconds > max(0.1, 10 * usual)]
    if slow:
        slow.sort(key=lambda sample: -sample.seconds)
        facts = (*seen, *(f"index {sample.index!r}: {duration(sample.seconds)}" for sample in slow[:_SHOWN]))
        says = f"{len(slow)} of {len(seconds)} samples take more than ten times as long as usual"
        advice = f"look at the first of them: {_command(measured, slow[0].index)}"
        return Check("speed", "warning", says, facts, advice)
    return Check("speed", "ok", f"{duration(usual)} a sample", seen)


def duration(seconds: float) -> str:
    """Seconds as people read them: "12 ms"."""
    for least, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= least:
            return f"{seconds / least:.3g} {unit}"
    return f"{seconds * 1e6:.0f} us"


def shapes(measured: Measured, workers: int) -> Check | None:
    """The default collate stacks; it cannot stack what differs."""
    if not measured.samples:
        return None
    groups: dict[str, list[object]] = {}
    for sample in measured.samples:
        groups.setdefault(sample.shape, []).append(sample.index)
    sizes = [sample.bytes for sample in measured.samples]
    about = f"{size(median(sizes))} a sample, {size(max(sizes))} at most"
    if len(groups) == 1:
        return Check("shapes", "ok", f"all samples are alike: {next(iter(groups))}", (about,))
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    facts = [f"{shape}: {len(indices)} samples, index {_indices(indices)}" for shape, indices in ordered[:_SHOWN]]
    more = [f"and {len(groups) - _SHOWN} more shapes"] if len(groups) > _SHOWN else []
    return Check(
        "shapes",
        "warning",
        f"samples have {len(groups)} different shapes: the default collate cannot stack them",
        (*facts, *more, about),
        "crop or pad them in the dataset, or pass DataLoader(..., collate_fn=YOUR_FUNCTION)",
    )


def growth(measured: Measured, workers: int) -> Check | None:
    """Memory that a worker does not give back."""
    life = measured.life
    if len(life) < _ENOUGH:
        return None
    each = measured.growth_bytes
    total = life[-1].resident - life[0].resident
    seen = (f"resident {size(life[0].resident)} -> {size(life[-1].resident)} over {len(life)} samples of one worker",)
    if not each:
        return Check("memory-growth", "ok", f"{size(max(0, total))} over {len(life)} samples", seen)
    epoch = "" if measured.length is None else f", {size(each * measured.length / max(1, workers))} an epoch and worker"
    says = f"a worker grows by {size(each)} with each sample{epoch}"
    advice = "find what the dataset keeps (caches, lists); meanwhile bound it by Policy(worker_memory=...), see below"
    return Check("memory-growth", "warning", says, seen, advice)


def leaks(measured: Measured, workers: int) -> Check | None:
    """Descriptors that a worker does not close."""
    life = measured.life
    if len(life) < _ENOUGH:
        return None
    each = measured.leaked_descriptors
    seen = (f"{life[0].descriptors} -> {life[-1].descriptors} open over {len(life)} samples of one worker",)
    if not each:
        return Check("descriptor-growth", "ok", f"{life[-1].descriptors} open, and not growing", seen)
    epoch = each * (measured.length or 0) / max(1, workers)
    return Check(
        "descriptor-growth",
        "problem" if epoch > _MOST_DESCRIPTORS or life[-1].descriptors > 1000 else "warning",
        f"a worker leaves {each:.1f} descriptors open with each sample: 'Too many open files' is a matter of time",
        seen,
        "close what __getitem__ opens: with open(path, 'rb') as file: ...",
    )


def repeatable(measured: Measured, workers: int) -> Check | None:
    """The same index gives the same sample, in any order; random numbers come from the seed alone."""
    repeats = measured.repeats
    if not repeats:
        return None
    restless = [repeat.index for repeat in repeats if repeat.by_call]
    if restless:
        says = (
            "two loads of one index with one seed differ: a generator that no seed reaches, or a memory of past calls"
        )
        advice = (
            "depend on the index alone, and draw where workers are seeded: torch.rand, numpy.random.rand, random.random"
        )
        return Check("repeatable", "warning", says, (f"index {_indices(restless)}",), advice)
    moved = [repeat.index for repeat in repeats if repeat.by_order]
    if moved:
        says = "a sample depends on which were loaded before it: shuffling and several workers change the data"
        advice = "let __getitem__ depend on its index alone: file.seek(offset_of[index]) before each read"
        return Check("repeatable", "problem", says, (f"index {_indices(moved)}",), advice)
    if any(repeat.by_seed for repeat in repeats):
        return Check("repeatable", "ok", "random, and the seed decides: augmentation is repeatable")
    return Check("repeatable", "ok", f"{len(repeats)} samples were the same again, in another order")


DatasetCheck = Callable[[Measured, int], Check | None]
ALL: tuple[DatasetCheck, ...] = (loads, picklable, speed, shapes, growth, leaks, repeatable)
