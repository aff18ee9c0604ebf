"""Nobody outlives the one it works for, also where that one is killed in the middle of a fork."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import until
from .groups import gone

ROOT = Path(__file__).parents[2]


def run(*words):
    """How a script of the tests ended. (It is reaped at once: nobody waits for the end of what it prints.)"""
    command = [sys.executable, "-W", "ignore", "-m", "tests.process.orphans", *map(str, words)]
    return subprocess.run(command, stdout=subprocess.DEVNULL, timeout=240, check=False, cwd=ROOT).returncode


@pytest.mark.parametrize("name", ["pool", "loader"])
def test_a_worker_whose_keeper_was_killed_while_it_forked_does_nothing(name, tmp_path):
    """It has another parent when it looks for the first time, and must not take that one for its keeper."""
    assert run(name, tmp_path) == 0
    born = int((tmp_path / "born").read_text())
    ran = [int(path.name.partition("-")[0]) for path in (tmp_path / "runs").iterdir()]
    assert len(ran) == 1
    assert born not in ran
    assert gone(born)


@pytest.mark.parametrize("name", ["keeper", "rank", "apart", "repro"])
def test_what_is_being_forked_goes_with_a_trainer_that_is_killed_meanwhile(name, tmp_path):
    """It finds out at its first look, though nothing tells it."""
    assert run(name, tmp_path) == -signal.SIGKILL
    born = int((tmp_path / "born").read_text())
    try:
        until(lambda: gone(born), "it lives on")
    finally:
        holder = tmp_path / "holder"
        for pid in (born, int(holder.read_text()) if holder.exists() else 0):
            if pid and not gone(pid):
                os.kill(pid, signal.SIGKILL)
