"""How long a killed worker is felt: SIGKILL from another process in mid-epoch, and the longest wait for a batch.

Samples sleep for 1 ms, so the trainer waits all the time and every delay shows. The lost work, less than one batch of
8 ms, is part of the result: it is not subtracted. Each run also proves that every sample came, once and in order.
"""

import logging
import os
import random
import subprocess
import sys
import time
from statistics import median

from datasets import Slow
from speed import KINDS, WORKERS, Loader, end
from table import Row, ms

import holdfast

RUNS = 10
# Without a kill: what the machine itself does to the longest wait.
QUIET_RUNS = 3
SAMPLES = 2000  # 1.1 s with two workers
SAMPLE_S = 0.001
BATCH = 8
# Before the clock runs: by then all workers are up, and have told their pids.
FIRST_BATCHES = 10
KILL_AFTER_S = (0.2, 0.5)
GOAL_S = 0.1


def gap_after_kill() -> Row:
    """One row."""
    logging.getLogger("holdfast").setLevel(logging.ERROR)  # ten deaths are what we came for
    chooser = random.Random(0)
    gaps, missing = [], 0
    for run in range(RUNS):
        loader = new_loader("holdfast")
        gap, seen = longest_wait(loader, run % WORKERS, chooser.uniform(*KILL_AFTER_S))
        assert isinstance(loader, holdfast.DataLoader)
        if loader.stats()["restarts"] != 1:
            raise RuntimeError(f"run {run}: {loader.stats()['restarts']} restarts and not 1; no gap was measured")
        missing += seen != list(range(SAMPLES))
        gaps.append(gap)
    quiet = [longest_wait(new_loader("holdfast"), None, 0.0)[0] for _ in range(QUIET_RUNS)]
    gap = median(gaps)
    wrong = f"; SAMPLES LOST OR DOUBLE in {missing} runs" if missing else ""
    return Row(
        name="gap after SIGKILL",
        theirs=fate_of_torch(),
        ours=ms(gap),
        result=ms(gap),
        spread=f"{ms(min(gaps))}, {ms(max(gaps))}",
        goal=f"< {ms(GOAL_S)}",
        missed=gap >= GOAL_S or missing > 0,
        note=f"without a kill {ms(median(quiet))}{wrong}",
        numbers={"gap_s": gaps, "quiet_s": quiet, "runs_with_wrong_samples": missing},
    )


def new_loader(kind: str) -> Loader:
    return KINDS[kind](Slow(SAMPLES, SAMPLE_S), batch_size=BATCH, num_workers=WORKERS)


def longest_wait(loader: Loader, victim: int | None, delay_s: float) -> tuple[float, list[int]]:
    """The longest time between two batches less the usual one, and the samples that came."""
    iterator = iter(loader)
    seen: list[int] = []
    for _ in range(FIRST_BATCHES):
        seen += next(iterator).tolist()
    killer = None
    if victim is not None:
        pid = iterator._workers[victim].pid  # type: ignore[attr-defined]  # there with torch's and with ours
        if pid is None:
            raise RuntimeError(f"the pid of worker {victim} is not known after {FIRST_BATCHES} batches")
        killer = start_killer(pid, delay_s)
    try:
        clock = time.perf_counter
        waits = []
        last = clock()
        for batch in iterator:
            now = clock()
            waits.append(now - last)
            last = now
            seen += batch.tolist()
    finally:
        if killer is not None:
            killer.wait(10)
        end(iterator)
    return max(waits) - median(waits), seen


def start_killer(pid: int, delay_s: float) -> subprocess.Popen[bytes]:
    """Another process that kills this one a little later. By a pidfd: the number may be somebody else's by then."""
    fd = os.pidfd_open(pid)
    try:
        orders = f"import signal, time; time.sleep({delay_s}); signal.pidfd_send_signal({fd}, signal.SIGKILL)"
        return subprocess.Popen([sys.executable, "-I", "-S", "-c", orders], pass_fds=[fd])
    finally:
        os.close(fd)


def fate_of_torch() -> str:
    """What the same does to torch's loader: one run."""
    try:
        longest_wait(new_loader("torch"), 0, KILL_AFTER_S[0])
    except RuntimeError:
        return "run ends"
    return "run goes on"
