"""The command line, as a user calls it."""

import json
import re
import subprocess
import sys

import pytest


def holdfast(*words, timeout=100):
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *words], capture_output=True, text=True, timeout=timeout, check=False
    )


def test_the_demo_proves_it():
    done = holdfast("demo", "--json", "--epochs", "1")
    assert done.returncode == 0, done.stderr
    proof = json.loads(done.stdout)["proof"]
    assert proof["samples_delivered"] == proof["samples_expected"] == 1536
    assert proof["duplicated"] == 0
    assert proof["same_losses"] and proof["same_order"]
    assert proof["workers_restarted"] >= 7


def test_help_and_nonsense():
    assert "demo" in holdfast("--help").stdout
    assert holdfast("nonsense").returncode == 2
    assert holdfast("--version").stdout.startswith("holdfast 0.")


@pytest.mark.parametrize(
    "words",
    [
        "--version",
        "--help",
        "explain worker-segfault",
        "explain --list",
        "top . --once",
        "top . --json",
        "repro .",
        "run --help",
        "doctor --help",
    ],
)
def test_a_command_that_only_reads_does_not_wait_for_torch(words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "holdfast", *words.split()],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == (2 if words == "repro ." else 0), done.stderr
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "holdfast.errors" in imported
    assert not imported & {"torch", "numpy"}
