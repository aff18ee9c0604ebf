"""Who is named when rank 1 of two is killed? torch.multiprocessing.spawn, torchrun and holdfast.spawn, in turns.

    python benchmarks/ranks.py [RUNS]

A gloo group of two; rank 1 sends itself SIGKILL in the fourth step: at any moment, and at the end of a second, where a
launcher that keeps whole seconds takes the echo for the cause. Each run is a process of its own.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

LAUNCHERS = ("torch.multiprocessing.spawn", "torchrun", "torchrun with holdfast's record", "holdfast.spawn")
MOMENTS = ("any moment", "end of a second")
PATIENCE_S = 120


def train(rank: int, moment: str, port: int = 0) -> None:
    where = f"tcp://127.0.0.1:{port}" if port else "env://"
    dist.init_process_group("gloo", where, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    for step in range(1000):
        if rank == 1 and step == 4:
            while moment == "end of a second" and not 0.93 <= time.time() % 1 < 0.96:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))


def under_torchrun(moment: str, ours: bool) -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    if ours:
        from holdfast.launch.elastic import record
    record(train)(int(os.environ["RANK"]), moment)


def launch(launcher: str, moment: str) -> None:
    """In a process of its own: what it says goes to stderr."""
    if launcher == "holdfast.spawn":
        import holdfast

        holdfast.spawn(train, (moment,), nprocs=2)
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(train, (moment, port), nprocs=2)


def named(launcher: str, moment: str) -> str:
    """What the launcher calls the cause."""
    me = [sys.executable, __file__, "--as", launcher, moment]
    if launcher.startswith("torchrun"):
        with tempfile.TemporaryDirectory() as folder:
            run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", folder]
            text = _stderr([*run, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *me[1:]])
        text = text.partition("Root Cause (first observed failure)")[2]
        rank = re.search(r"rank +: (\d)", text)
        what = re.search(r"(Signal \d+ \(SIGKILL\)|signal SIGKILL|Connection \w+ by peer|SIGTERM)", text)
    else:
        text = _stderr(me)
        rank = re.search(r"[Pp]rocess (\d) (terminated|raised)", text)
        what = re.search(r"(signal SIGKILL|Connection \w+ by peer|exit code \d+)", text)
    return f"rank {rank[1] if rank else '?'}: {what[1] if what else text[-200:]}"


def _stderr(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False).stderr


def main(runs: int) -> None:
    found: dict[tuple[str, str], Counter[str]] = {(la, m): Counter() for la in LAUNCHERS for m in MOMENTS}
    for _ in range(runs):
        for (launcher, moment), names in found.items():
            names[named(launcher, moment)] += 1
    print("| launcher | killed at | named as the cause |\n|---|---|---|")
    for (launcher, moment), names in found.items():
        told = "; ".join(f"{name} ({count} of {runs})" for name, count in names.most_common())
        print(f"| {launcher} | {moment} | {told} |")


if __name__ == "__main__":
    if "--as" in sys.argv:
        who, when = sys.argv[2:4]
        if who.startswith("torchrun"):
            under_torchrun(when, ours="holdfast" in who)
        else:
            launch(who, when)
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
