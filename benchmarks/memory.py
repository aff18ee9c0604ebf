"""How much memory: the peak of trainer and all its descendants while batches run, each in a fresh interpreter.

Counted twice. The sum of their PSS: in it a shared page is counted once in all; but what lies in a shared memory file
that no process maps at the moment is in nobody's PSS, and that is where torch's batches are on their way (files that
are open and mapped by nobody are in the note). And, where one can be made (that takes root), the peak of a memory
control group of their own, in which every page is one, whoever maps it. (Pages of libraries that were in memory before
are nobody's there, as many for both: this process has imported torch.) Neither may be above torch's.

The row of the benchmark is 38 MB batches; for all loads: python memory.py
As a script with arguments it is the trainer: python memory.py torch|holdfast LOAD
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import IO, NamedTuple

from datasets import LARGE_IMAGES, LOADS, Load
from table import Row

RUN_S = 4.0
SAMPLE_S = 0.03
# For an interpreter with torch to start, on a busy machine.
START_S = 60.0
ROUNDS = 3
PEAKS = ("memory.peak", "memory.max_usage_in_bytes")


class Peak(NamedTuple):
    """The highest of each, in bytes; `group` is 0 where there was none."""

    group: float
    pss: float
    with_files: float


def peak_memory(load: Load = LARGE_IMAGES) -> Row:
    """One row."""
    runs = [(peak_of("torch", load), peak_of("holdfast", load)) for _ in range(ROUNDS)]
    ratios = [ours.pss / theirs.pss for theirs, ours in runs]
    of_groups = median(ours.group / theirs.group if theirs.group else 0.0 for theirs, ours in runs)
    theirs, ours = (Peak(*map(median, zip(*peaks, strict=True))) for peaks in zip(*runs, strict=True))
    group = f"control group {theirs.group / 1e6:.0f} and {ours.group / 1e6:.0f} MB, {of_groups:.2f} x; "
    return Row(
        name=f"peak memory, {load.name}",
        theirs=f"{theirs.pss / 1e6:.0f} MB",
        ours=f"{ours.pss / 1e6:.0f} MB",
        result=f"{median(ratios):.2f} x",
        spread=f"{min(ratios):.2f}, {max(ratios):.2f}",
        goal="<= 1 x",
        missed=max(median(ratios), of_groups) > 1,
        note=f"PSS; {group if theirs.group else ''}with unmapped files "
        f"{theirs.with_files / 1e6:.0f} and {ours.with_files / 1e6:.0f} MB",
        numbers={"torch": [theirs for theirs, _ in runs], "holdfast": [ours for _, ours in runs], "ratios": ratios},
    )


def peak_of(kind: str, load: Load) -> Peak:
    """The peak of one run; this process is the sampler."""
    command = [sys.executable, __file__, kind, load.name, str(os.getpid())]
    with control_group() as group:
        if group is not None:
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
            try:
                assert trainer.stdout is not None
                _expect(trainer.stdout, b"running\n", START_S)
                mapped = all_of_it = 0
                give_up = time.monotonic() + START_S
                while not select.select([trainer.stdout], [], [], SAMPLE_S)[0] and time.monotonic() < give_up:
                    pids = tree(trainer.pid)
                    now = sum(pss(pid) for pid in pids)
                    mapped, all_of_it = max(mapped, now), max(all_of_it, now + unmapped(pids))
                _expect(trainer.stdout, b"done\n", 0.0)
                trainer.wait(START_S)
                return Peak(0 if group is None else peak_in(group), mapped, all_of_it)
            finally:
                trainer.kill()


@contextmanager
def control_group() -> Iterator[Path | None]:
    """A new memory group, cgroup v1 or v2; None where none can be made."""
    root = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").is_dir() else Path("/sys/fs/cgroup")
    group = root / f"holdfast-benchmark-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        yield group if any((group / name).exists() for name in PEAKS) else None
    finally:
        for _ in range(50):  # whoever was in it may take a moment to be gone
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def peak_in(group: Path) -> int:
    return next(int((group / name).read_text()) for name in PEAKS if (group / name).exists())


def _expect(stream: IO[bytes], line: bytes, patience_s: float) -> None:
    ready = select.select([stream], [], [], patience_s)[0]
    said = stream.readline() if ready else b"nothing"
    if said != line:
        raise RuntimeError(f"the trainer said {said!r} and not {line!r}")


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for parent in found:
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):
                found += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
        except OSError:
            continue  # it has ended
    return found


def pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it has ended
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def unmapped(pids: list[int]) -> int:
    """What lies in shared memory files that these hold open, and none of them maps."""
    maps, sizes = set(), {}
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            maps |= {int(line.split()[4]) for line in lines if is_shared_memory(line)}
            for fd in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{fd}"
                if is_shared_memory(os.readlink(path)):
                    about = os.stat(path)
                    sizes[about.st_ino] = about.st_blocks * 512
        except OSError:
            continue  # it has ended, or closed that one
    return sum(size for inode, size in sizes.items() if inode not in maps)


def is_shared_memory(path: str) -> bool:
    return "/dev/shm/" in path or "/memfd:" in path


def train(kind: str, load: Load) -> None:
    from speed import KINDS, WARM_BATCHES, WORKERS, end, take

    iterator = iter(KINDS[kind](load.make(), batch_size=load.batch_size, num_workers=WORKERS))
    take(iterator, 0.0, WARM_BATCHES)
    print("running", flush=True)
    take(iterator, RUN_S)
    print("done", flush=True)
    end(iterator)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        from holdfast.system.linux import die_with_parent

        die_with_parent(int(sys.argv[3]))  # whatever ends the benchmark ends this
        train(sys.argv[1], next(load for load in LOADS if load.name == sys.argv[2]))
    else:
        import table

        for each in LOADS:
            print(table.line(peak_memory(each).cells), flush=True)
