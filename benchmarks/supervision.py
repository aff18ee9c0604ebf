"""What supervision costs: CPU seconds per batch, of all processes, with it and without.

Without: the keeper only forks and reaps; the workers' loop is `[dataset[i] for i in indices]`, and nothing is written
into a pulse. (What the trainer's ledger costs is in both.)

The machine is far noisier than the 2 % in question. So loaders with and without, two of each, live side by side in one
interpreter and take turns of a fraction of a second: whoever has no turn waits for room and uses nothing. The trainer
sleeps as soon as it must wait: how long it would look out for the next batch first is chance, and in both. Processes
differ by where their memory happens to lie, by more than what is asked for, so all are made anew a dozen times; what
two equal ones differ by is the control.

Run as a script it measures one load and prints JSON: python supervision.py NAME
"""

import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

from datasets import LOADS, Load
from table import Row, ms

GENERATIONS = 12
TURNS = 9
TURN_S = 0.08
# For the workers to fill what was taken: then they wait, and the CPU of all that was taken has been used.
SETTLE_S = 0.03
GOAL = 0.02
PATIENCE_S = 180.0
BARE, SUPERVISED = ("bare", "bare too"), ("supervised", "supervised too")


def supervision_cost(load: Load) -> Row:
    """One row, measured in an interpreter of its own: parts of the library are replaced there."""
    command = [sys.executable, __file__, load.name, str(os.getpid())]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=PATIENCE_S, check=True)
    costs: dict[str, list[float]] = json.loads(done.stdout)
    extra = shares(costs, SUPERVISED, BARE)
    control = [abs(share) for pair in (BARE, SUPERVISED) for share in shares(costs, pair[:1], pair[1:])]
    low, high = interval(extra)
    unsure = "; too noisy to tell" if low < GOAL <= high else ""
    return Row(
        name=f"supervision, {load.name}",
        theirs=f"({ms(median(cost for name in BARE for cost in costs[name]))})",
        ours=ms(median(cost for name in SUPERVISED for cost in costs[name])),
        result=f"{median(extra):+.2%}",
        spread=f"{low:+.1%}, {high:+.1%}",
        goal=f"< {GOAL:.0%}",
        missed=median(extra) >= GOAL,
        note=f"CPU per batch, (bare loop); 95 % interval; two equal ones differ by {median(control):.1%}{unsure}",
        numbers={"cpu_s_per_batch": costs, "extra": extra, "control": control},
    )


def shares(costs: dict[str, list[float]], of: Sequence[str], to: Sequence[str]) -> list[float]:
    """What these cost more than those, in each generation."""
    ours, theirs = (map(sum, zip(*(costs[name] for name in names), strict=True)) for names in (of, to))
    return [ours / theirs - 1 for ours, theirs in zip(ours, theirs, strict=True)]


def interval(values: list[float]) -> tuple[float, float]:
    """Where the true median lies, with 95 %: a count of coin flips, whatever the distribution."""
    ranked = sorted(values)
    low = max(0, math.floor(len(ranked) / 2 - 0.98 * math.sqrt(len(ranked))))
    return ranked[low], ranked[len(ranked) - 1 - low]


@contextmanager
def bare_loop() -> Iterator[None]:
    """Loaders made inside have no supervision; their processes are forked with what is replaced here."""
    from holdfast.loader.fetch import MapFetcher
    from holdfast.local.keeper import worker_watch
    from holdfast.local.protocol.pulse import Pulse

    fetcher, pulse = MapFetcher.__init__, Pulse.__init__

    def without_context(self: Any, *args: Any, **kwargs: Any) -> None:
        fetcher(self, *args, **{**kwargs, "context": None})

    def without_stages(self: Any, *args: Any) -> None:
        pulse(self, *args)
        self.enter = lambda stage, position=0: None

    def samples(self: Any, draw: Any, troubles: Any) -> list[Any]:
        return [self.dataset[index] for index in draw.indices]

    with (
        patch.object(worker_watch, "TICK_S", 3600.0),
        patch.object(Pulse, "__init__", without_stages),
        patch.object(MapFetcher, "__init__", without_context),
        patch.object(MapFetcher, "_one_by_one", samples),
    ):
        yield


def measure(load: Load) -> dict[str, list[float]]:
    """CPU seconds per batch of each of the four, the median turn of each generation."""
    from speed import WARM_BATCHES, end, take

    from holdfast.local.trainer import local_host

    local_host.SPIN_S = 0.0
    costs: dict[str, list[float]] = {name: [] for name in (*BARE, *SUPERVISED)}
    dataset = load.make()
    shuffled = partial(random.Random(0).sample, list(costs), len(costs))  # nobody always follows the same other
    for _ in range(GENERATIONS):
        iterators = {}
        for name in shuffled():
            with nullcontext() if name in SUPERVISED else bare_loop():
                iterators[name] = begin(load, dataset)
        rates = []
        for iterator in iterators.values():
            count, seconds = take(iterator, TURN_S, WARM_BATCHES)
            rates.append(count / seconds)
            time.sleep(SETTLE_S)
        batches = max(1, round(median(rates) * TURN_S))
        turns: dict[str, list[float]] = {name: [] for name in costs}
        for _ in range(TURNS):
            for name in shuffled():
                turns[name].append(cpu_of(iterators[name], batches) / batches)
        for name, iterator in iterators.items():
            costs[name].append(median(turns[name]))
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
    from holdfast.system.linux import die_with_parent

    die_with_parent(int(sys.argv[2]))  # whatever ends the benchmark ends this
    (wanted,) = (load for load in LOADS if load.name == sys.argv[1])
    json.dump(measure(wanted), sys.stdout)
