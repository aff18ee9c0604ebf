"""Hundreds of workers start, and a keeper that is refused descriptors says so."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).with_name("many.py"))
# More than the 278 orders that a socket holds by default.
MANY = 310


def run(name, workers, method, soft, hard):
    """What the script says. One that is still there after that time hangs, however busy the machine is."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip(f"needs a hard limit of {hard} descriptors")
    command = [sys.executable, "-W", "ignore", SCRIPT, name, *map(str, (workers, method, soft, hard))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(("name", "method"), [("loader", "fork"), ("loader", "spawn"), ("pool", "fork")])
def test_hundreds_of_workers_start(name, method):
    """The keeper gets each order, however long it takes to fork: all workers are there at once."""
    told = run(name, MANY, method, 1024, 4096)
    assert told["exact"]
    assert not told.get("findings")


def test_the_keeper_has_as_many_descriptors_as_it_may():
    """It needs more of them than the trainer: its soft limit goes up to the hard one."""
    told = run("slow", 100, "fork", 200, 1024)
    assert told["exact"]
    assert told["findings"] == []


def test_a_keeper_without_descriptors_goes_on_with_the_workers_that_it_has():
    """Nothing is lost, and the report names the limit instead of a killer."""
    told = run("slow", 100, "fork", 200, 200)
    assert told["exact"]
    assert set(told["findings"]) == {"descriptors-exhausted"}
    assert "EMFILE" in told["text"]
    assert "descriptors open in the keeper, three for each worker; the limit is 200" in told["text"]


def test_streams_that_cannot_all_start_for_want_of_descriptors_end_with_that_word():
    """No worker can play another there, so the run ends, and says why."""
    told = run("loader", 100, "fork", 200, 200)
    assert "could not be started" in told["error"]
    assert set(told["findings"]) == {"descriptors-exhausted"}
    assert "descriptors open in the keeper, three for each worker; the limit is 200" in told["error"]
