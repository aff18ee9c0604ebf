"""The eight failures that people post most, once with torch's loader and once with Holdfast's: `make failures`.

It runs train.py in a process group of its own for each, and writes docs/failures.md: how each run ended, and the last
lines that it printed. Nothing is pretended: the kernel kills for memory, /dev/shm is full, the signals are sent. What
cannot be made on this machine is said.
"""

import contextlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import holdfast
from tests.faults.cause_table import GROUP, SMALL_SHM

from .train import BAD, SAMPLES

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("train.py")
PAGE = ROOT / "docs" / "failures.md"
LINES = 15
COLUMNS = 150
# Longer than any of them needs that does not hang.
LIMIT_S = 60.0
# Holdfast tells a worker that has been silent for 60 s; the run begins a few seconds before.
PATIENCE_S = 70.0
# What a run may take to end after Ctrl-C.
ENDS_S = 10.0
THEIRS = "from torch.utils.data import DataLoader"
OURS = "from holdfast import DataLoader"
MEMORY = "600M"


@dataclass(frozen=True, slots=True)
class Again:
    """A third run, with Holdfast: how it differs from the second."""

    settings: tuple[str, ...] = ()
    """Variables of the environment."""
    under: str = ""
    """A command before the script, which then keeps torch's import."""

    def __str__(self) -> str:
        return f"Holdfast, `{' '.join((*self.settings, self.under)).strip()}`"


@dataclass(frozen=True, slots=True)
class Failure:
    """One of the eight."""

    name: str
    """As train.py knows it."""
    title: str
    what: str
    within: str = "exec {run}"
    """A shell command around it."""
    again: Again | None = None
    patience_s: float = LIMIT_S
    """After that the user presses Ctrl-C."""
    terminated: bool = False
    """The whole process group gets SIGTERM in mid-epoch."""


@dataclass(frozen=True, slots=True)
class Run:
    """How it went with one loader."""

    loader: str
    end: str
    seconds: float
    right: int
    last: tuple[str, ...]


SKIP = Again(("HOLDFAST_BAD_SAMPLE=skip",))
FAILURES = (
    Failure(
        "memory",
        "Out of memory",
        f"Sample {BAD} needs 4 GiB, and the control group has {MEMORY[:-1]} MiB. The kernel kills the worker.",
        GROUP.replace("{kind}", "memory").replace("{limit}", MEMORY).replace("{file}", "memory.limit_in_bytes"),
        SKIP,
    ),
    Failure("segfault", "Segmentation fault", f"Native code crashes at sample {BAD}.", again=SKIP),
    Failure(
        "shared-file",
        "A file that was opened before the fork",
        "The dataset opens its file once, with `open()`. Each worker seeks and reads, and all move one position.",
        again=Again(("HOLDFAST_SHARED_FILES=error",)),
    ),
    Failure(
        "descriptors",
        "Descriptor leak",
        "Each sample opens a file and does not close it. A process may have 256 open files, by its soft and its hard "
        "limit (`ulimit -n 256`). Holdfast replaces a worker before it reaches the limit.",
        "ulimit -n 256; exec {run}",
    ),
    Failure(
        "hang",
        "Hang",
        f"Sample {BAD} never ends. After {PATIENCE_S:.0f} s the user presses Ctrl-C.",
        again=Again(("HOLDFAST_SAMPLE_TIMEOUT=3",)),
        patience_s=PATIENCE_S,
    ),
    Failure(
        "sigterm",
        "SIGTERM to the process group",
        "A scheduler ends the job: all its processes get SIGTERM, the trainer and the workers. Both loaders leave it "
        "to the script, which has no handler. `holdfast run` runs the script unchanged, and tells the signal.",
        again=Again(under="holdfast run"),
        terminated=True,
    ),
    Failure(
        "shapes",
        "Images of different shapes",
        f"Sample {BAD} is narrower than the others.",
        again=SKIP,
    ),
    Failure(
        "shared-memory",
        "Shared memory is full",
        "/dev/shm has 16 MB, and a batch 12 MB. (In a container of Docker's it has 64 MB.)",
        SMALL_SHM,
    ),
)


def missing(failure: Failure) -> str:
    """Why it cannot be made here; "" if it can."""
    if failure.within == SMALL_SHM and (os.getuid() != 0 or shutil.which("unshare") is None):
        return "it needs root and `unshare`"
    if "/sys/fs/cgroup/" in failure.within and not os.access("/sys/fs/cgroup/memory", os.W_OK):
        return "it needs root and control groups of version 1"
    return ""


def runs_of(failure: Failure) -> Iterator[Run]:
    yield run(failure, "torch", THEIRS)
    yield run(failure, "Holdfast", OURS)
    if failure.again is not None:
        yield run(failure, str(failure.again), THEIRS if failure.again.under else OURS, failure.again)


def run(failure: Failure, loader: str, imported: str, again: Again | None = None) -> Run:
    """In a folder and a process group of its own; when it returns nothing of them is left."""
    again = again or Again()
    with tempfile.TemporaryDirectory(prefix="holdfast-failures-") as name:
        folder = Path(name)
        script = SCRIPT.read_text()
        assert script.count(f"{THEIRS}\n") == 1
        (folder / "train.py").write_text(script.replace(THEIRS, imported))
        with open(folder / "output", "wb") as output:
            began = time.monotonic()
            process = subprocess.Popen(
                ["bash", "-c", failure.within.replace("{run}", command(failure, again))],
                cwd=folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **dict(each.split("=") for each in again.settings)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                end = end_of(process, failure, folder)
                seconds = time.monotonic() - began
            finally:
                remove(process)
        last = neutral((folder / "output").read_text(errors="replace"), folder)
        return Run(loader, end, seconds, came_right(folder), tuple(last.splitlines()[-LINES:]))


def command(failure: Failure, again: Again) -> str:
    start = f"-m {again.under} train.py" if again.under else "train.py"
    return f"{sys.executable} {start} {failure.name}"


def end_of(process: subprocess.Popen[bytes], failure: Failure, folder: Path) -> str:
    """Waits, and does what somebody else does to the run."""
    if failure.terminated:
        until = time.monotonic() + failure.patience_s
        while came_right(folder) < SAMPLES // 4:
            if time.monotonic() > until or process.poll() is not None:
                raise RuntimeError(f"{failure.name}: a quarter of the epoch did not come: status {process.returncode}")
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return status(process.wait(failure.patience_s))
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return f"Ctrl-C, {status(process.wait(ENDS_S))}"
    return f"Ctrl-C, still there {ENDS_S:.0f} s later"


def status(code: int) -> str:
    """A shell's status above 128 is a signal, too."""
    number = -code if code < 0 else code - 128
    with contextlib.suppress(ValueError):
        if number > 0:
            return f"killed by {signal.Signals(number).name}"
    return f"exit {code}"


def came_right(folder: Path) -> int:
    """Train.py may be about to write it."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int((folder / "right").read_text())
    return 0


def remove(process: subprocess.Popen[bytes]) -> None:
    """The whole process group, and the control group if the shell could not remove it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    group = Path(f"/sys/fs/cgroup/memory/holdfast-{process.pid}")
    until = time.monotonic() + 10
    while group.exists():
        try:
            group.rmdir()
        except OSError:  # its processes are still ending
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def neutral(output: str, folder: Path) -> str:
    """Without what is only so on this machine: its paths, and who had started this."""
    text = output.replace("\0", "").replace(f"{folder}/", "")
    for path in (*sorted({p for p in sys.path if p.startswith("/")}, key=len, reverse=True), f"{ROOT}/src"):
        text = text.replace(f"{path}/", "")
    text = text.replace(sys.executable, "python").replace(f"{ROOT}/", "").replace(str(ROOT), "")
    text = re.sub(r"(sent by pid \d+ \().*?\)(?: < .*)?, uid", r"\1another process), uid", text)
    text = re.sub(r"; this runs under [^;\n]*", "", text)
    return "\n".join(shorter(line.rstrip()) for line in text.splitlines())


def shorter(line: str) -> str:
    return line if len(line) <= COLUMNS else f"{line[: COLUMNS - 3]}..."


INTRODUCTION = f"""\
# Eight failures, side by side

People post these failures of data loading most. The same small training script,
[benchmarks/train.py](../benchmarks/train.py), meets each of them twice. Only its import differs:

```python
{THEIRS}
{OURS}
```

The script loads {SAMPLES} images in batches of 16, with two workers. It counts the images that came right: those with
their own value, at their place. Both loaders have their defaults. Where one setting makes a difference, a third run
has it.

For each run you see how it ended, after how many seconds (2 to 3 of them are imports), and how many samples came right.
Then come the last {LINES} lines of its output, stdout and stderr together, cut at {COLUMNS} columns. Paths are
shortened.

`make failures` makes all runs again and writes this page. It takes about five minutes. It needs root, control groups of
version 1 and `unshare`; the page says what could not be made.
"""


def versions() -> str:
    linux = ".".join(platform.release().split(".")[:2])
    return (
        f"These runs: {time.strftime('%Y-%m-%d')}, Holdfast {holdfast.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, Linux {linux}, {os.cpu_count()} CPUs."
    )


def glance(made: dict[Failure, list[Run]]) -> str:
    """One line for each failure."""
    rows = []
    for failure, runs in made.items():
        cells = [f"{run.end}, {run.right}" for run in runs[:2]] or ["not made", "not made"]
        rows.append(f"| {failure.title} | {cells[0]} | {cells[1]} |\n")
    return "".join((f"| how it ended, samples of {SAMPLES} | torch | Holdfast |\n|---|---|---|\n", *rows))


def section(failure: Failure, runs: list[Run]) -> str:
    heading = f"## {FAILURES.index(failure) + 1}. {failure.title}\n\n{failure.what}\n\n"
    if not runs:
        return f"{heading}Not made here: {missing(failure)}.\n"
    rows = [f"| {run.loader} | {run.end} | {run.seconds:.1f} | {run.right} of {SAMPLES} |\n" for run in runs]
    blocks = ["\n{}:\n\n```text\n{}\n```\n".format(run.loader, "\n".join(run.last)) for run in runs]
    return "".join((heading, "| loader | end | seconds | came right |\n|---|---|---|---|\n", *rows, *blocks))


def make(failure: Failure) -> list[Run]:
    """It says what happens while it happens."""
    if why := missing(failure):
        print(f"{failure.name:14} not made: {why}", flush=True)
        return []
    runs = []
    for each in runs_of(failure):
        print(f"{failure.name:14} {each.loader:40} {each.end:28} {each.seconds:5.1f} s {each.right:4d}", flush=True)
        runs.append(each)
    return runs


def main(wanted: list[str]) -> None:
    # A shell starts background jobs with Ctrl-C ignored, and the runs would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    made = {failure: make(failure) for failure in FAILURES if not wanted or failure.name in wanted}
    sections = [section(failure, runs) for failure, runs in made.items()]
    if wanted:
        print("\n".join(sections))
    else:
        PAGE.write_text("\n".join((INTRODUCTION, f"{versions()}\n", glance(made), *sections)))
        print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
