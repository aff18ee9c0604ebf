"""The search for the best number of workers, on pretended loaders: how near it comes to the best fixed number.

The curves are those of samples that compute, that wait, that get in each other's way, and that need nothing; the
batches slow and fast; the machine is used by others, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import pytest

from holdfast.core.autoscale import Autoscale
from tests.core.pretended import Pretended, Run

# One for each seed: how much the rate of each half second differs by chance.
NOISE = (0.05, 0.10, 0.15, 0.10, 0.05)
UNEVEN = 0.1


def up_to(knee: int) -> Callable[[int], float]:
    """As many as that bring more; the others bring nothing."""
    return lambda workers: min(workers, knee)


def falling(peak: int, how: float) -> Callable[[int], float]:
    """More than `peak` are in each other's way."""
    return lambda workers: workers if workers <= peak else peak * (peak / workers) ** how


def heavy(workers: int) -> float:
    """Measured: samples of 128 MiB that also wait, on two processors; straight lines between."""
    points = ((1, 16), (2, 30), (4, 49), (8, 60), (16, 42))
    for (low, slow), (high, fast) in pairwise(points):
        if workers <= high:
            return slow + (fast - slow) * (workers - low) / (high - low)
    raise AssertionError(workers)


@dataclass(frozen=True)
class Curve:
    rate_of: Callable[[int], float]
    start: int = 2
    most: int = 16
    share: float = 0.85
    """Of the best fixed number's rate, from the first batch on: what the search costs is in it."""

    @property
    def best(self) -> int:
        return max(range(1, self.most + 1), key=self.rate_of)


CURVES = {
    "computes": Curve(up_to(2), share=0.95),
    "computes, and more cost something": Curve(falling(2, 0.06), share=0.92),
    "waits": Curve(up_to(1000)),
    "waits, many processors": Curve(up_to(1000), start=8, most=64, share=0.6),
    "five": Curve(up_to(5)),
    "twelve": Curve(up_to(12)),
    "heavy": Curve(heavy),
    "a sharp peak at six": Curve(falling(6, 1.0), share=0.75),
    "a sharp peak at three": Curve(falling(3, 1.0)),
    "flat": Curve(lambda workers: 1.0, share=0.95),
    "one is best": Curve(falling(1, 0.4)),
    "far too many at first": Curve(falling(3, 0.6), start=8, most=64, share=0.65),
}


def played(curve: Curve, per_s: float, batches: int, seed: int, fixed: bool = False) -> Run:
    top = curve.rate_of(curve.best)
    autoscale = (
        Autoscale(curve.best, curve.best, adapt=False) if fixed else Autoscale(curve.most, curve.start, adapt=True)
    )
    noise = NOISE[seed % len(NOISE)]
    return Pretended(autoscale, lambda n: per_s * curve.rate_of(n) / top, noise, UNEVEN, seed=seed).play(batches)


@pytest.mark.parametrize(("per_s", "batches"), [(3, 1500), (30, 6000)])
@pytest.mark.parametrize("name", CURVES)
def test_it_comes_near_the_best_fixed_number(name, per_s, batches):
    """After a bounded number of batches it is within a tenth; what it cost until then is bounded, too."""
    curve = CURVES[name]
    runs = [played(curve, per_s, batches, seed) for seed in range(len(NOISE))]
    best = median(played(curve, per_s, batches, seed, fixed=True).rate for seed in range(len(NOISE)))
    assert median(run.late_rate for run in runs) >= 0.9 * best
    assert median(run.rate for run in runs) >= curve.share * best


@pytest.mark.parametrize("name", ["computes", "waits", "heavy"])
def test_it_comes_near_the_best_fixed_number_with_fast_batches(name):
    curve = CURVES[name]
    run, best = played(curve, 3000, 30_000, seed=1), played(curve, 3000, 10_000, seed=2, fixed=True).rate
    assert run.late_rate >= 0.9 * best
    assert run.rate >= 0.75 * best, "within ten seconds, the search included"


@pytest.mark.parametrize("name", CURVES)
def test_it_does_not_flap(name):
    """Each change costs the start of a worker, or the batch of one."""
    for seed in range(len(NOISE)):
        run = played(CURVES[name], 30, 9000, seed)
        changes = [at for at, _ in run.numbers]
        assert len(changes) <= 30
        assert sum(at > run.seconds / 2 for at in changes) <= 14, f"still restless after {run.seconds / 2:.0f} s"


def test_nothing_is_tried_while_the_trainer_does_not_wait():
    autoscale = Autoscale(16, 4, adapt=True)
    run = Pretended(autoscale, up_to(1000), 0.1, UNEVEN, step_s=0.5).play(500)
    assert [number for _, number in run.numbers] == [4]


def test_it_notices_that_times_have_changed():
    """Samples that needed a processor begin to wait for a disk."""
    autoscale = Autoscale(16, 2, adapt=True)
    now = [up_to(2)]
    loader = Pretended(autoscale, lambda workers: 10 * now[0](workers), 0.05, UNEVEN)
    assert loader.play(1000).last <= 4
    now[0] = up_to(1000)
    assert loader.play(10_000).last == 16


def test_workers_that_start_slowly_are_waited_for(monkeypatch):
    """Batches in order wait for those that the new ones have been given."""
    monkeypatch.setattr("tests.core.pretended.START_S", 2.0)
    run = played(CURVES["waits"], 100, 6000, seed=0)
    assert run.last == 16
