"""Incidents are written at once, and the sample of one can be loaded again with the same random numbers."""

import os
import signal
import subprocess
import sys

import numpy as np
import torch
from torch.utils.data import Dataset

from holdfast import DataLoader, Policy
from holdfast.__main__ import main
from holdfast.diagnose import run_folder
from holdfast.system.run_files import records_of


class Moody(Dataset):
    """One sample raises with the random numbers that it drew, or kills its process."""

    def __init__(self, deadly=False):
        self.deadly = deadly

    def __len__(self):
        return 12

    def __getitem__(self, index):
        numbers = (torch.rand(1).item(), float(np.random.rand()))
        if index == 6 and self.deadly:
            os.kill(os.getpid(), signal.SIGSEGV)
        if index == 6:
            raise ValueError(f"drew {numbers}")
        return index


def incidents_of(file):
    return [record for record in records_of(file) if record["record"] == "incident"]


def run_epoch(dataset):
    loader = DataLoader(dataset, batch_size=4, num_workers=2, policy=Policy(bad_sample="skip", max_bad=1.0))
    assert sum(len(batch) for batch in loader) == 11
    return loader


def test_a_sample_that_raised_raises_the_same_again(run_dir, capsys):
    loader = run_epoch(Moody())
    (file,) = run_dir.glob("trainer-*.jsonl")
    (incident,) = incidents_of(file)
    assert incident["finding"] == "sample-raised"
    assert incident["again"]["indices"] == [4, 5, 6]
    assert main(["repro", str(file), "--trust"]) == 1
    said = capsys.readouterr()
    assert loader.incidents[0].says.partition("ValueError: ")[2] in said.err
    assert "failed again" in said.out


def test_a_sample_that_ended_its_worker_ends_a_child(run_dir, capfd):
    run_epoch(Moody(deadly=True))
    (file,) = run_dir.glob("trainer-*.jsonl")
    assert main(["repro", str(file), "--incident", "0", "--trust"]) == 1
    said = capfd.readouterr()
    assert "worker-segfault" in said.out and "ended by SIGSEGV" in said.out
    assert "Segmentation fault" in said.err and "test_repro.py" in said.err


def test_the_dataset_can_be_made_anew(run_dir, capsys):
    run_epoch(Moody())
    (file,) = run_dir.glob("trainer-*.jsonl")
    file.with_suffix(".dataset").unlink()
    assert main(["repro", str(file)]) == main(["repro", str(file), "--trust"]) == 2
    assert "--dataset module:name" in capsys.readouterr().err
    assert main(["repro", str(file), "--dataset", "tests.process.test_repro:Moody"]) == 1
    assert main(["repro", str(file), "--incident", "7"]) == 2
    assert main(["repro", str(file) + ".not"]) == 2


def test_a_folder_gives_its_newest_sample_and_lists_the_others(run_dir, capsys):
    """Two loaders failed at the same sample: two files. One of another run cannot be read, and is left out."""
    run_epoch(Moody())
    (first,) = run_dir.glob("trainer-*.jsonl")
    run_epoch(Moody())
    (second,) = set(run_dir.glob("trainer-*.jsonl")) - {first}
    (run_dir / "trainer-1-0.jsonl").write_text("{")
    assert main(["repro", str(run_dir), "--trust"]) == 1
    said = capsys.readouterr()
    assert "failed again" in said.out and "left out" in said.err
    assert "the newest of 2 incidents with a sample" in said.out
    assert f"holdfast repro {first} --incident 0:" in " ".join(said.out.split()) and str(second) not in said.out
    assert main(["repro", str(run_dir), "--incident", "9"]) == 2
    assert "no incident 9 with a sample" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_costs_no_batch(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOLDFAST_RUN_DIR", str(tmp_path / "file" / "run"))
    run_epoch(Moody())
    assert caplog.text.count("incidents cannot be kept") == 1
    assert caplog.text.count("totals cannot be kept") == 1


def test_a_large_dataset_is_not_kept(run_dir, monkeypatch):
    monkeypatch.setattr(run_folder, "MOST_BYTES", 10)
    run_epoch(Moody())
    assert sorted(path.suffix for path in run_dir.iterdir()) == [".jsonl", ".jsonl"]  # the trainer's and the keeper's


def test_indices_keep_their_types_and_those_before_may_fail(run_dir, capsys):
    sampler = [[np.int64(6), np.int64(1)], [np.int64(2), np.int64(6)], [6, 6]]
    loader = DataLoader(Moody(), batch_sampler=sampler, num_workers=1, policy=Policy(bad_sample="skip", max_bad=1.0))
    assert len(list(loader)) == 2
    (file,) = run_dir.glob("trainer-*.jsonl")
    for number, incident in enumerate(loader.incidents):
        assert main(["repro", str(file), "--incident", str(number), "--trust"]) == 1
        assert incident.says.partition("ValueError: ")[2] in capsys.readouterr().err


def test_a_run_without_incidents_writes_its_totals_and_nothing_else(run_dir):
    assert len(list(DataLoader(range(8), num_workers=1))) == 8
    assert sorted(path.name.partition("-")[0] for path in run_dir.iterdir()) == ["keeper", "trainer"]
    (file,) = run_dir.glob("trainer-*.jsonl")
    assert {record["record"] for record in records_of(file)} == {"part", "totals"}


def test_incidents_outlive_a_killed_trainer(run_dir):
    code = (
        "import os, signal; from holdfast import DataLoader, Policy; from tests.process.test_repro import Moody\n"
        "for batch in DataLoader(Moody(True), batch_size=4, num_workers=1, policy=Policy(bad_sample='skip')):\n"
        "    if 7 in batch: os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    (file,) = run_dir.glob("trainer-*.jsonl")
    assert {incident["index"] for incident in incidents_of(file)} == {6}
