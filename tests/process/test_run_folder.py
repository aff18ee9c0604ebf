"""The run folder says what happened, whatever becomes of the trainer: its keeper writes, too."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast import DataLoader
from holdfast.__main__ import main
from holdfast.diagnose.run_reader import parts_of
from holdfast.system.run_files import records_of

from ..conftest import until

TRAIN = """
import os, signal, sys, time
import torch
from torch.utils.data import Dataset
from holdfast import DataLoader, Policy

class Odd(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index == 17:
            HOW
        return index

if __name__ == "__main__":
    policy = Policy(sample_timeout=1.0, strikes=100, restarts=1000)
    for batch in DataLoader(Odd(), batch_size=4, num_workers=2, policy=policy, multiprocessing_context="METHOD"):
        pass
    END
"""


def facts(folder):
    files = list(folder.glob("keeper-*.jsonl"))
    return [record for file in files for record in records_of(file)]


@contextmanager
def training(folder, tmp_path, how, method="fork", end="pass"):
    """A trainer in a process of its own; it is ended at the end, and its keeper has written its last record."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("HOW", how).replace("METHOD", method).replace("END", end))
    env = {**os.environ, "HOLDFAST_RUN_DIR": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, str(script)], env=env, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()

    def over():
        return all([*records_of(file)][-1]["record"] in ("trainer", "stopped") for file in folder.glob("keeper-*"))

    until(over, "a keeper has not written its last record")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_hang_and_the_kill_of_the_trainer_are_in_the_folder(folder, tmp_path, capsys, method):
    """Which sample, which line, and that the trainer was killed: from the folder alone."""
    with training(folder, tmp_path, "time.sleep(1000)", method) as process:
        until(lambda: any(fact["record"] == "exited" for fact in facts(folder)), "no worker was killed for its hang")
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert main(["report", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "while loading index 17" in said
    assert f'"{tmp_path / "train.py"}", line 12 in __getitem__' in said
    assert "sample-hung" in said or "hang-" in said
    assert "trainer-ended" in said and "the trainer was killed by SIGKILL" in said


def count(folder, name, kind):
    return sum(each["record"] == kind for file in folder.glob(f"{name}-*.jsonl") for each in records_of(file))


def test_what_the_trainer_had_no_time_to_tell_is_diagnosed(folder, tmp_path, capsys):
    """A trainer that is stopped hears nothing; its keeper goes on."""

    def untold():
        return count(folder, "keeper", "exited") > count(folder, "trainer", "incident")

    with training(folder, tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)") as process:
        limit = time.monotonic() + 60
        while True:  # stopped between a death and its next life, it misses none: then once more
            assert time.monotonic() < limit, "in a minute no worker died while the trainer was stopped"
            process.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            while not untold() and time.monotonic() < stopped + 1:
                time.sleep(0.05)
            if untold():
                break
            process.send_signal(signal.SIGCONT)
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert main(["report", str(folder), "--json"]) == 1
    (part,) = json.loads(capsys.readouterr().out)
    incidents = part["report"]["incidents"]
    assert part["untold"] >= 2, "a death, and the trainer's own end"
    assert {each["finding"] for each in incidents} == {"worker-segfault", "trainer-ended"}
    # A worker that tries a batch again does not note the index (docs/report.md); it never notes another one.
    assert 17 in {each["index"] for each in incidents} <= {17, None}


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("os._exit(3)", "exit code 3"),
        ("os.abort()", "SIGABRT ended it: a crash of its own"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "exit by SIGKILL"),
    ],
)
def test_how_a_trainer_ended(folder, tmp_path, capsys, end, words):
    """In the middle of an epoch; the kernel tells the keeper."""
    with training(folder, tmp_path, "pass", end=f"it = iter(DataLoader(Odd(), num_workers=1)); next(it); {end}") as it:
        it.wait(60)
    main(["report", str(folder)])
    said = capsys.readouterr().out
    if not any(fact["record"] == "trainer" and fact["exit_code"] is not None for fact in facts(folder)):
        pytest.skip("this kernel does not keep the exit code, and somebody was quicker to reap")
    assert "trainer-ended" in said and words in said


def test_a_run_that_ends_in_order_says_nothing_of_an_end(folder, tmp_path, capsys):
    """Not even where an epoch is left in the middle."""
    with training(folder, tmp_path, "pass", end="it = iter(DataLoader(Odd(), num_workers=2)); next(it)") as process:
        assert process.wait(60) == 0
    assert main(["report", str(folder)]) == 0
    assert "nothing went wrong" in capsys.readouterr().out
    assert {part.over for part in parts_of(folder)[0]} == {True}


def test_the_keeper_notes_the_index_at_hand(folder, tmp_path):
    """While the trainer waits, the folder says what each worker does."""
    with training(folder, tmp_path, "time.sleep(1000)") as process:

        def at_hand():
            notes = [fact["workers"] for fact in facts(folder) if fact["record"] == "workers"]
            return any(worker["index"] == 17 and worker["on"]["stage"] == "FETCH" for note in notes for worker in note)

        until(at_hand, "the keeper has not noted index 17", 60.0)
        assert process.poll() is None


@pytest.mark.parametrize("cut", range(0, 200, 23))
def test_a_log_that_is_cut_at_any_byte_can_be_read(folder, tmp_path, cut, capsys):
    """What a SIGKILL in the middle of a write leaves."""
    folder.mkdir()
    head = {"record": "part", "at": 1.0, "schema": 2, "kind": "loader", "pid": 7, "command": "train"}
    lines = [head, *({"record": "totals", "at": 2.0, "running": True, "stats": {"batches": n}} for n in range(3))]
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (folder / "trainer-7-0.jsonl").write_bytes(text[: len(text) - cut])
    (part,), odd = parts_of(Path(folder))
    assert not odd and part.stats.batches in range(3)


def test_a_relative_folder_stays_where_it_is(tmp_path, monkeypatch):
    """The script may change its directory in the middle of an epoch."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_RUN_DIR", "run")
    iterator = iter(DataLoader(range(40), num_workers=1))
    next(iterator)
    os.chdir("elsewhere")
    assert len(list(iterator)) == 39
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "run").iterdir()) == ["keeper", "trainer"]
    assert not list((tmp_path / "elsewhere").iterdir())
