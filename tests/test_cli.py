"""The command line, as a user calls it."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from holdfast import Policy
from holdfast.cli import demo


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
    assert all(proof["faults"].values()) and len(proof["faults"]) == 9, proof["faults"]
    assert proof["kills_from_outside"] >= 1


def test_each_fault_of_the_demo_has_a_batch_of_its_own():
    """A batch that dies with its worker does not tell what else had happened in it."""
    faults = set(demo.FAULTS)
    batches = [faults & set(index.tolist()) for index, _, _ in demo._loader(demo.Images(), 2, Policy())]
    assert [found for found in batches if len(found) > 1] == []
    assert set().union(*batches) == faults


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "--list"],
        ["explain", "worker-killed"],
        ["--help"],
        ["doctor", "--workers", "1"],
        ["demo", "--help"],
    ],
)
def test_a_reader_that_leaves_is_no_error(words):
    """`holdfast ... | head`: no traceback, neither at once nor while Python ends."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", *words], stdout=pipe, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.stderr == ""
    assert done.returncode == (0 if "--help" in words else 128 + signal.SIGPIPE)  # argparse ignores it by itself


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
