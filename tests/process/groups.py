"""Groups of ranks in the tests: their start methods, whether they are there, and how they fail."""

import os
from pathlib import Path

import pytest

import holdfast
from holdfast.system import linux
from tests.conftest import METHODS, until

# Each rank that is not forked imports torch, seconds of it: HOLDFAST_SLOW=1 runs every test on every method.
SOME = METHODS if os.environ.get("HOLDFAST_SLOW") else ["fork"]
every_method = pytest.mark.parametrize("method", SOME)
# Where a new interpreter and a fork of this one are the two cases there are.
both = pytest.mark.parametrize("method", SOME[:2])


def gone(pid):
    """It may still wait to be reaped by its parent."""
    return linux.process_state(pid) in ("", "Z")


def pids_in(folder, count):
    """The pids of ranks that have said that they are there."""

    def all_there():
        return len([p for p in Path(folder).iterdir() if p.read_text()]) >= count

    until(all_there, f"{count} ranks did not come up", 60)
    return [int(p.read_text()) for p in Path(folder).iterdir()]


def fails(error, fn, args=(), nprocs=2, **options):
    with pytest.raises(error) as caught:
        holdfast.spawn(fn, args, nprocs, **options)
    return caught.value
