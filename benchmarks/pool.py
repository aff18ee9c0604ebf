"""holdfast.Pool against other pools of processes, in one command: python benchmarks/pool.py

killed      20 tasks, number 7 sends SIGKILL to itself: how many results come, when, and what is said of it
empty       10,000 tasks that do nothing, submitted one by one: tasks per second
arrays      100 results of 40 MB each: results per second

loky and pebble are measured where they are installed (`make bench-pool` does that). Each pool is run in an interpreter
of its own, which has imported torch, in turns, so that none meets what another left behind. Goals: 19 results, and an
error that names task 7, SIGKILL and the finding, in under a second; as many empty tasks as ProcessPoolExecutor; five
times as many arrays.
"""

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any

WORKERS = 2
TASKS, GUILTY, TASK_S = 20, 7, 0.02
EMPTY = 10_000
ARRAYS, ARRAY_BYTES = 100, 40_000_000
# multiprocessing.Pool never answers for a task whose worker was killed; this is when we stop asking.
PATIENCE_S = 10.0
# One measurement in its own interpreter; the slowest takes a tenth of it.
RUN_PATIENCE_S = 300
ROUNDS = 3
KINDS = ("holdfast.Pool", "ProcessPoolExecutor", "multiprocessing.Pool", "loky", "pebble")


# What is run in workers --------------------------------------------------------------------------------------------


def work(number: int) -> int:
    if number == GUILTY:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(TASK_S)
    return number


def nothing(number: int) -> None:
    """An empty task."""


def array(number: int) -> Any:
    import numpy as np

    return np.full(ARRAY_BYTES // 8, number, dtype=np.float64)


# The pools, all as submit(fn, argument) -> result(timeout) ------------------------------------------------------------

Take = Callable[[float], Any]
Submit = Callable[[Callable[[int], Any], int], Take]


class Opened:
    """A pool; if `warm`, one whose workers are up."""

    def __init__(self, kind: str, warm: bool = True) -> None:
        self.submit: Submit
        self.close: Callable[[], Any]
        if kind == "multiprocessing.Pool":
            pool = multiprocessing.Pool(WORKERS)
            self.submit = lambda fn, number: pool.apply_async(fn, (number,)).get
            self.close = pool.terminate
        elif kind == "pebble":
            import pebble

            peer = pebble.ProcessPool(max_workers=WORKERS)
            self.submit = lambda fn, number: peer.schedule(fn, args=(number,)).result
            self.close = lambda: (peer.stop(), peer.join())
        else:
            executor = self._executor(kind)
            self.submit = lambda fn, number: executor.submit(fn, number).result
            self.close = executor.shutdown
        for take in [self.submit(nothing, number) for number in range(4 * WORKERS if warm else 0)]:
            take(PATIENCE_S)

    def _executor(self, kind: str) -> Any:
        if kind == "holdfast.Pool":
            import holdfast

            return holdfast.Pool(WORKERS)
        if kind == "loky":
            import loky

            return loky.ProcessPoolExecutor(WORKERS)
        return ProcessPoolExecutor(WORKERS)


# Measurements, each in an interpreter of its own ----------------------------------------------------------------------


def killed(kind: str) -> dict[str, Any]:
    """The time is that of all, from the start of the pool on; not of importing the library."""
    began = time.perf_counter()
    pool = Opened(kind, warm=False)
    came, errors = 0, []
    takes = [pool.submit(work, number) for number in range(TASKS)]
    for number, take in enumerate(takes):
        try:
            came += take(PATIENCE_S) == number
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    seconds = time.perf_counter() - began
    pool.close()
    return {"came": came, "seconds": seconds, "errors": errors}


def empty(kind: str) -> dict[str, Any]:
    pool = Opened(kind)
    began = time.perf_counter()
    takes = [pool.submit(nothing, number) for number in range(EMPTY)]
    for take in takes:
        take(PATIENCE_S * 6)
    seconds = time.perf_counter() - began
    pool.close()
    return {"seconds": seconds}


def arrays(kind: str) -> dict[str, Any]:
    """As results are taken, others are made: four are asked for at any time."""
    pool = Opened(kind)
    began = time.perf_counter()
    takes = [pool.submit(array, number) for number in range(4)]
    for number in range(ARRAYS):
        got = takes.pop(0)(PATIENCE_S * 6)
        assert got[0] == got[-1] == number
        del got
        if number + 4 < ARRAYS:
            takes.append(pool.submit(array, number + 4))
    seconds = time.perf_counter() - began
    pool.close()
    return {"seconds": seconds}


MEASURES = {"killed": killed, "empty": empty, "arrays": arrays}


def in_turns(measure: str, kinds: list[str], rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for _ in range(rounds):
        for kind in kinds:
            command = [sys.executable, __file__, "--one", measure, kind]
            done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_PATIENCE_S, check=False)
            if done.returncode:
                raise RuntimeError(f"{measure} of {kind} failed:\n{done.stderr}")
            yield kind, json.loads(done.stdout.splitlines()[-1])


# The table ----------------------------------------------------------------------------------------------------------


def show_killed(kinds: list[str]) -> None:
    print(f"\n{TASKS} tasks, number {GUILTY} is killed ({WORKERS} workers, {TASK_S * 1000:.0f} ms each)\n")
    for kind, told in in_turns("killed", kinds, 1):
        distinct = list(dict.fromkeys(told["errors"]))
        first = distinct[0].partition("\n")[0]
        print(f"  {kind:22} {told['came']:2} results  {told['seconds']:6.2f} s  {len(told['errors'])} x {first}")
        if kind == "holdfast.Pool":
            text = distinct[0]
            named = all(word in text for word in (f"task {GUILTY} ", "SIGKILL", "worker-killed"))
            good = told["came"] == TASKS - 1 and len(distinct) == 1 and named and told["seconds"] < 1
            print(f"  {'':22} {'as it should be' if good else 'MISSED'}")


def show_speed(measure: str, title: str, count: int, kinds: list[str], rounds: int, goal: float) -> None:
    print(f"\n{title} (median of {rounds}; lowest, highest)\n", flush=True)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind, told in in_turns(measure, kinds, rounds):
        seconds[kind].append(told["seconds"])
    base = median(seconds["ProcessPoolExecutor"])
    for kind in kinds:
        mine = sorted(seconds[kind])
        times = base / median(mine)
        verdict = ""
        if kind == "holdfast.Pool":
            verdict = f"  goal {goal:g}x: {'reached' if times >= goal else 'MISSED'}"
        rate = count / median(mine)
        print(f"  {kind:22} {rate:9.1f} per s  {times:6.2f}x  ({mine[0]:.2f}, {mine[-1]:.2f} s){verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, metavar=("MEASURE", "POOL"), help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    wanted = parser.parse_args()
    if wanted.one:
        measure, kind = wanted.one
        import torch  # noqa: F401  # as in a program that uses it, whichever pool that has: it makes each fork dearer

        if find_spec(kind.partition(".")[0]) is not None:
            import_module(kind.partition(".")[0])
        print(json.dumps(MEASURES[measure](kind)))
        return 0
    kinds = [kind for kind in KINDS if kind not in ("loky", "pebble") or find_spec(kind) is not None]
    show_killed(kinds)
    show_speed("empty", f"{EMPTY} empty tasks", EMPTY, kinds, wanted.rounds, 1.0)
    few = [kind for kind in kinds if kind in ("holdfast.Pool", "ProcessPoolExecutor", "loky")]
    show_speed("arrays", f"{ARRAYS} results of {ARRAY_BYTES // 10**6} MB", ARRAYS, few, wanted.rounds, 5.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
