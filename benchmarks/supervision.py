"""What supervision costs: CPU seconds per batch, of all processes, with it and without.

Without: the keeper only forks and reaps; the workers' loop is `[dataset[i] for i in indices]`, and nothing is written
into a pulse. (What the trainer's ledger costs is in both.)

The machine is far noisier than the 2 % in question. So loaders with and without live side by side in one interpreter
and take turns of a fraction of a second: whoever has no turn waits for room and uses nothing. The trainer sleeps as
soon as it must wait: how long it would look out for the next batch first is chance, and in both. A third loader,
without again, is the control: it shows what this method says of two things that are equal. Processes differ by where
their memory happens to lie, so all are made anew several times.

Run as a script it measures one load and prints JSON: python supervision.py NAME
"""

import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any

from datasets import LOADS, Load
from table import Row, ms

GENERATIONS = 6
TURNS = 18
TURN_S = 0.08
# For the workers to fill what was taken: then they wait, and the CPU of all that was taken has been used.
SETTLE_S = 0.03
GOAL = 0.02
PATIENCE_S = 180.0
BARE, SUPERVISED, CONTROL = "bare", "supervised", "control"


def supervision_cost(load: Load) -> Row:
    """One row, measured in an interpreter of its own: parts of the library are replaced there."""
    done = subprocess.run([sys.executable, __file__, load.name], stdout=subprocess.PIPE, timeout=PATIENCE_S, check=True)
    costs: dict[str, list[float]] = json.loads(done.stdout)
    extra = shares(costs, SUPERVISED)
    control = shares(costs, CONTROL)
    low, high = interval(extra)
    unsure = "; too noisy to tell" if low < GOAL <= high else ""
    return Row(
        name=f"supervision, {load.name}",
        theirs=f"({ms(median(costs[BARE]))})",
        ours=ms(median(costs[SUPERVISED])),
        result=f"{median(extra):+.2%}",
        spread=f"{low:+.1%}, {high:+.1%}",
        goal=f"< {GOAL:.0%}",
        missed=median(extra) >= GOAL,
        note=f"CPU per batch, (bare loop); 95 % interval; control {median(control):+.2%}{unsure}",
        numbers={"cpu_s_per_batch": costs, "extra": extra, "control": control},
    )


def shares(costs: dict[str, list[float]], of: str) -> list[float]:
    """What it costs more than the bare loop, turn by turn."""
    return [cost / bare - 1 for cost, bare in zip(costs[of], costs[BARE], strict=True)]


def interval(values: list[float]) -> tuple[float, float]:
    """Where the true median lies, with 95 %: a count of coin flips, whatever the distribution."""
    ranked = sorted(values)
    middle, reach = len(ranked) / 2, 0.98 * math.sqrt(len(ranked))
    return ranked[max(0, math.floor(middle - reach))], ranked[min(len(ranked) - 1, math.ceil(middle + reach))]


@contextmanager
def bare_loop() -> Iterator[None]:
    """Loaders made inside have no supervision; their processes are forked with what is replaced here."""
    from holdfast.loader.fetch import MapFetcher
    from holdfast.local import watch
    from holdfast.local.pulse import Pulse

    tick_s, enter, one_by_one, init = watch.TICK_S, Pulse.enter, MapFetcher._one_by_one, MapFetcher.__init__

    def without_words(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "words": None})

    watch.TICK_S = 3600.0
    Pulse.enter = lambda self, stage, position=0: None  # type: ignore[method-assign]
    MapFetcher._one_by_one = lambda self, draw, troubles: [  # type: ignore[method-assign]
        self.dataset[index] for index in draw.indices
    ]
    MapFetcher.__init__ = without_words  # type: ignore[method-assign]
    try:
        yield
    finally:
        watch.TICK_S, Pulse.enter, MapFetcher._one_by_one = tick_s, enter, one_by_one  # type: ignore[method-assign]
        MapFetcher.__init__ = init  # type: ignore[method-assign]


def measure(load: Load) -> dict[str, list[float]]:
    """CPU seconds per batch, of each turn of each of the three."""
    from speed import WARM_BATCHES, end, take

    from holdfast.local import vigil

    vigil.SPIN_S = 0.0
    costs: dict[str, list[float]] = {BARE: [], SUPERVISED: [], CONTROL: []}
    dataset = load.make()
    shuffled = partial(random.Random(0).sample, list(costs), len(costs))  # nobody always follows the same other
    for _ in range(GENERATIONS):
        iterators = {}
        for name in shuffled():
            with nullcontext() if name == SUPERVISED else bare_loop():
                iterators[name] = begin(load, dataset)
        rates = []
        for iterator in iterators.values():
            count, seconds = take(iterator, TURN_S, WARM_BATCHES)
            rates.append(count / seconds)
            time.sleep(SETTLE_S)
        batches = max(1, round(median(rates) * TURN_S))
        for _ in range(TURNS):
            for name in shuffled():
                costs[name].append(cpu_of(iterators[name], batches) / batches)
        for iterator in iterators.values():
            end(iterator)
    return costs


def begin(load: Load, dataset: Any) -> Any:
    """An iterator whose processes are up: they must be forked while the library is as it shall be for them."""
    from speed import WORKERS, take

    import holdfast

    iterator: Any = iter(holdfast.DataLoader(dataset, batch_size=load.batch_size, num_workers=WORKERS))
    while any(worker.pid is None for worker in iterator._workers):
        take(iterator, 0.0)
    return iterator


def cpu_of(iterator: Any, batches: int) -> float:
    """CPU seconds of trainer, keeper and workers for so many batches; nobody else works meanwhile."""
    pids = [iterator._host.keeper_pid, *(worker.pid for worker in iterator._workers)]
    before = cpu_s(pids)
    for _ in range(batches):
        next(iterator)
    time.sleep(SETTLE_S)
    return cpu_s(pids) - before


def cpu_s(pids: list[int]) -> float:
    """CPU seconds of this process and these. Unlike rusage, the clock of a process can be read while it lives."""
    return time.process_time() + sum(time.clock_gettime(_clock_of(pid)) for pid in pids)


def _clock_of(pid: int) -> int:
    """What clock_getcpuclockid(3) gives, which Python does not have: Linux's CPUCLOCK_SCHED of that process."""
    return (~pid << 3) | 2


if __name__ == "__main__":
    from holdfast.local.linux import die_with_parent

    die_with_parent(os.getppid())  # whatever ends the benchmark ends this
    (wanted,) = (load for load in LOADS if load.name == sys.argv[1])
    json.dump(measure(wanted), sys.stdout)
