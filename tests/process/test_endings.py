"""The last ten lines of an uncaught error are the answer: what happened, to which sample, where, what to try."""

import re
import subprocess
import sys

import pytest

from ..conftest import ROOT

HERE = r'  File ".*endings.py", line \d+,? in '
IN_READ = HERE + "read\n"
# kind: what its last ten lines must match.
ENDINGS = {
    "plain": (
        r"^ValueError: bad header in 17.jpg$",
        r"^in worker \d \(pid \d+\) while loading index 17 \(batch 4, attempt 1\)$",
        IN_READ + r'    raise ValueError\(f"bad header in \{index\}.jpg"\)$',
        r"^  sample-raised: ",
        r"^    try    ",
    ),
    "long": ("loading index 17 ", IN_READ, r"^  sample-raised: .*bad header in 17.jpg$", "    try    "),
    "arguments": (r"OwnError: 17.jpg is broken \(5\)$", "loading index 17 ", IN_READ, "    try    "),
    "unpicklable": ("Locked: it holds a lock$", "loading index 17 ", IN_READ, "exception-not-picklable", "    try    "),
    "exit": (
        "SampleError: in worker .* index 17 .* raised SystemExit: 3$",
        IN_READ + r"    sys.exit\(3\)$",
        "    try ",
    ),
    "unsendable": (
        "CannotSend: the sample at index 17 holds something that cannot be sent to another process: .* is a lock$",
        "^    seen   ",
        "^    try    ",
        r"^in worker \d \(pid \d+\) while sending batch 4 ",
    ),
    "collate": ("^TypeError: these do not fit$", "collating batch 4 ", HERE + "broken_collate\n", "    try    "),
    "init": (
        "^RuntimeError: there is no GPU 7$",
        "in worker 0 while it started$",
        HERE + "broken_init\n",
        "    try    ",
    ),
    "segfault": (
        r"WorkerLost: worker \d was killed by SIGSEGV while loading index 17 \(batch 4, ",
        IN_READ + r"    ctypes.string_at\(0\)$",
        "^  worker-segfault: ",
        "^    seen   ",
        "^    try    ",
    ),
    "kill": (r"WorkerLost: worker \d was killed by SIGKILL while loading index 17 ", "^    seen   ", "^    try    "),
    "deadline": (
        r"WorkerLost: worker \d was killed for hanging [\d.]+ s while loading index 17 ",
        IN_READ + r"    threading.Event\(\).wait\(\)$",
        "^    seen   no sign of life",
        "^    try    ",
    ),
    "timeout": (
        "BatchTimeout: DataLoader timed out after 1 seconds: batch 4 has not come$",
        r"^worker \d \(pid \d+\) has been on index 17 \(batch 4\) for [\d.]+ s$",
        "^  sample-unfinished: ",
        "^    seen   its pulse has not changed for ",
        "^    try    ",
    ),
    "timeout after a silence": (
        "BatchTimeout: DataLoader timed out after 3 seconds: batch 4 has not come$",
        r"^worker \d \(pid \d+\) has been on index 17 \(batch 4\) for ",
        IN_READ + r"    threading.Event\(\).wait\(\)$",
        "^    try    ",
    ),
    "many": (
        r"TooManyBad: \d+ of \d+ samples are bad",
        r"^    last   index \d+ \(batch \d+\) in worker \d: .*no label$",
        HERE + "__getitem__\n",
        "^    try    ",
    ),
    "stream": (
        "^ValueError: bad record$",
        r"in worker \d .* loading an item \(batch",
        HERE + "__iter__\n",
        "    try    ",
    ),
    "replayed": ("StreamBroken: .* gave other items", "    try    ", r"in worker \d \(pid \d+\)", "stream-diverged$"),
    "torn": (
        r"LoaderTorn: .* after \d batches of this epoch$",
        'seen   LookupError: the sampler has no more, at File ".*endings.py", line',
        "    try    make a new iterator",
    ),
    "closed": (
        "LoaderTorn: the workers of this loader were shut down",
        "1 batches of this epoch",
        "    try    make a new",
    ),
}
# Without workers the traceback is the user's own, and a note says the index.
INLINE = {
    "plain": (
        "    raise ValueError",
        "^ValueError: bad",
        r"trainer \(num_workers=0\) while loading index 17 \(batch 4",
    ),
    "arguments": ("OwnError: 17.jpg is broken", "while loading index 17 "),
    "unpicklable": ("Locked: it holds a lock", "while loading index 17 "),
    "collate": (r"    raise TypeError", "^TypeError: these do not fit$", "while collating batch 4 "),
    "many": ("TooManyBad: ", r"last   index \d+ \(batch \d+\) in the trainer: ", HERE, "    try    "),
    "stream": ("    raise ValueError", "^ValueError: bad record$", "while loading an item"),
}


def output_of(kind, workers, start="fork"):
    """All that it prints on stderr."""
    command = [sys.executable, "-m", "tests.process.endings", kind, str(workers), start]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, cwd=ROOT.parent)
    assert done.returncode == 1, done.stderr
    return done.stderr


def says(text, *patterns):
    last = "\n".join(text.splitlines()[-10:])
    missed = [pattern for pattern in patterns if not re.search(pattern, last, re.MULTILINE)]
    assert not missed, f"{missed} not in\n{last}"


@pytest.mark.parametrize("kind", ENDINGS)
def test_the_last_ten_lines_are_the_answer(kind):
    text = output_of(kind, 2)
    says(text, *ENDINGS[kind])
    stack = text.partition('Traceback (most recent call last):\n  File "<frozen runpy>')[0]
    assert "/holdfast/loader/" not in stack, "frames of ours hide the user's"


@pytest.mark.parametrize("kind", INLINE)
def test_so_they_are_without_workers(kind):
    says(output_of(kind, 0), *INLINE[kind])


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_so_they_are_with_other_start_methods(start):
    says(output_of("plain", 1, start), *ENDINGS["plain"])
