"""What a program puts in the place of Python's own streams must not keep a loader from working."""

import json
import subprocess
import sys

import pytest

import holdfast
from holdfast import DataLoader

from .data import Numbers


class Tee:
    """As people write it: it writes to two files, and has nothing else."""

    def __init__(self, *files):
        self.files = files

    def write(self, text):
        for file in self.files:
            file.write(text)


class Flushing(Tee):
    def flush(self):
        for file in self.files:
            file.flush()


class Closed(Tee):
    """Its flush raises what that of a closed file raises."""

    def flush(self):
        raise ValueError("I/O operation on closed file")


STREAMS = {"tee": Tee, "flushing": Flushing, "closed": Closed, "none": lambda *files: None}


def replaced(kind, method):
    """In a process of its own: an epoch, a pool and ranks, with other streams."""
    ours = STREAMS[kind]
    for name in ("stdout", "stderr"):
        setattr(sys, name, ours(getattr(sys, name)))
    loader = DataLoader(Numbers(20), batch_size=4, num_workers=2, multiprocessing_context=method)
    right = [[int(i) for batch in loader for i in batch] == list(range(20))]
    if method == "fork":
        with holdfast.Pool(2) as pool:
            right.append(list(pool.map(abs, range(-20, 0), progress=True)) == list(range(20, 0, -1)))
        holdfast.spawn(talk, nprocs=1, start_method="fork")
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    print(f"\n{json.dumps(right)}")


def talk(rank):
    """More than a pipe holds."""
    for number in range(4000):
        print(f"line {number} of rank {rank}, long enough to fill a pipe with a few thousand of its kind")


@pytest.mark.parametrize(("kind", "method"), [*((kind, "fork") for kind in STREAMS), ("tee", "spawn")])
def test_streams_of_the_programs_own(kind, method):
    """A Tee class without `closed` or `flush`, or None: loaders, pools and ranks work all the same."""
    code = f"from tests.process.test_surroundings import replaced; replaced({kind!r}, {method!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(json.loads(done.stdout.splitlines()[-1])) == {True}
