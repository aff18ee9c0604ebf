"""A real torchrun of two ranks: its error files and its summary carry our findings, and name the right rank."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("torchrun_script.py")


def torchrun(how, folder):
    """What torchrun prints, and the error files by rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--log-dir", str(folder), str(SCRIPT), how]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ran.returncode != 0
    found = {int(path.parent.name): json.loads(path.read_text()) for path in folder.rglob("error.json")}
    return ran.stderr, found


def root_cause(text):
    return text.partition("Root Cause (first observed failure)")[2]


@pytest.mark.parametrize(
    ("how", "finding", "words"),
    [("raise", "rank-raised", "ValueError: legitimate"), ("exit", "worker-exited", "terminated with exit code 3")],
)
def test_the_error_file_of_a_rank_that_raised_or_exited_has_its_finding(how, finding, words, tmp_path):
    text, files = torchrun(how, tmp_path)
    check(files[1], finding, words)
    assert f"holdfast explain {finding}" in root_cause(text)
    assert re.search(r"rank +: 1 \(local_rank: 1\)", root_cause(text))


def check(file, finding, words):
    told = file["message"]["extraInfo"]
    assert told["holdfast"]["finding"] == finding
    assert words in told["py_callstack"]


@pytest.mark.parametrize(
    ("how", "finding", "words"),
    [
        ("late kill", "worker-killed", "terminated with signal SIGKILL"),
        ("segfault", "worker-segfault", "torchrun_script.py"),
    ],
)
def test_so_has_that_of_a_rank_that_was_killed(how, finding, words, tmp_path):
    """At the end of a second, too, when torchrun by itself blames rank 0. torchrun may look before the witness has
    written: then there is no file this time.
    """
    for attempt in range(4):
        text, files = torchrun(how, tmp_path / str(attempt))
        assert re.search(r"rank +: 1 \(local_rank: 1\)", root_cause(text))
        assert how == "segfault" or "SIGSEGV" not in text  # rank 0 is stopped by torchrun, and does not crash for that
        if 0 in files:  # torchrun may have stopped it before it had noticed
            assert files[0]["message"]["extraInfo"]["holdfast"]["finding"] == "rank-failed-first"
        if 1 in files:
            break
    check(files[1], finding, words)
