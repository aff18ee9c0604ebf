"""The doctor on real datasets: samples that kill, raise, hang, leak, vary; and what it answers to nonsense."""

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import holdfast
from holdfast.cli import doctor
from holdfast.diagnose.fitness import check_dataset
from holdfast.loader.measure import weigh
from holdfast.loader.probe import pickled_size, probe, spread


class Good(Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.full((3, 8, 8), float(index)), index


class Awful(Good):
    """The first kills, the last raises, one in the middle hangs."""

    def __getitem__(self, index):
        if index == 0:
            os.kill(os.getpid(), 9)
        if index == 199:
            raise OSError("it is gone")
        if index == 100:
            time.sleep(100)
        return index


class Leaks(Good):
    def __init__(self):
        self.kept = []

    def __getitem__(self, index):
        self.kept += [open(os.devnull), open(os.devnull)]
        return index


class Grows(Leaks):
    def __getitem__(self, index):
        self.kept.append(bytearray(os.urandom(1 << 10) * 1024))
        return index


class Locked(Good):
    def __init__(self):
        self.inner = {"lock": threading.Lock()}


class Ragged(Good):
    def __getitem__(self, index):
        return {"image": torch.zeros(3, 4 + (index == 199))}


class Restless(Good):
    def __getitem__(self, index):
        return random.SystemRandom().random()


class Augmented(Good):
    def __getitem__(self, index):
        return torch.rand(3)


class Sticky(Good):
    """Gives what was asked for first, since the last change of mind."""

    previous = current = None

    def __getitem__(self, index):
        if index != self.current:
            self.previous, self.current = self.current, index
        return self.previous


class Handles(Good):
    def __getitem__(self, index):
        return threading.Lock()


class Seeks(Good):
    """Reads a file that it opened before there were workers."""

    def __init__(self):
        self.file = open(__file__, "rb", buffering=0)

    def __getitem__(self, index):
        self.file.seek(index)
        return self.file.read(1)[0]


class Preads(Seeks):
    """As HDF5 does."""

    def __getitem__(self, index):
        return os.pread(self.file.fileno(), 1, index)[0]


class Stream(IterableDataset):
    def __init__(self, bad=None):
        self.bad = bad

    def __iter__(self):
        for i in range(100):
            if i == self.bad:
                raise ValueError("bad item")
            yield torch.zeros(4), i


class Empty(Good):
    def __len__(self):
        return 0


class Chatty(Good):
    def __init__(self):
        print("hello from the dataset")

    def __getitem__(self, index):
        print("and from a sample")
        return index


instance = Good()


def broken():
    raise RuntimeError("no files\nhere")


def needs_arguments(folder):
    return Good()


class Tee:
    """What a module may put in the place of stderr."""

    def write(self, text):
        os.write(2, text.encode())

    def flush(self):
        pass

    def isatty(self):
        raise OSError("no idea")


def with_a_tee():
    sys.stderr = Tee()
    return Good()


def five():
    return 5


def call(name, *words):
    """The exit status, as `holdfast doctor` would give it."""
    parser = argparse.ArgumentParser()
    doctor.arguments(parser)
    return doctor.run(parser.parse_args([f"{__name__}:{name}", *words]))


def checks_of(name, capsys, *words, expect=None):
    """Verdict and words of each check, from the JSON."""
    status = call(name, "--json", "--timeout", "1", "--workers", "1", *words)
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == 1 and answer["exit_status"] == status
    if expect is not None:
        assert status == expect
    return {check["name"]: check for check in answer["checks"]}, answer


def test_a_good_dataset_is_ok_and_gets_its_settings(capsys):
    checks, answer = checks_of("Good", capsys, "--batch-size", "16", expect=0)
    assert {check["verdict"] for check in checks.values() if check["group"] == "dataset"} == {"ok"}
    assert answer["dataset"]["length"] == 200 and answer["dataset"]["loaded"] == 64
    assert answer["dataset"]["shapes"] == ["(float32[3, 8, 8], int)"]
    assert "batch_size=16" in answer["setting"]["code"]
    assert answer["forecast"]["total_bytes"] > 0


def test_samples_that_kill_raise_and_hang_are_named_and_the_rest_is_measured(capsys):
    checks, answer = checks_of("Awful", capsys, "--samples", "3", expect=1)
    ends = {bad["index"]: bad["error"] for bad in answer["dataset"]["bad"]}
    assert "killed by SIGKILL" in ends[0] and "hanging" in ends[100] and ends[199] == "OSError: it is gone"
    assert checks["samples"]["verdict"] == "problem"
    assert "OSError: it is gone" in " ".join(checks["samples"]["seen"])

    _, answer = checks_of("Awful", capsys, "--samples", "40", expect=1)
    assert answer["dataset"]["loaded"] + len(answer["dataset"]["bad"]) == 40
    assert 'bad_sample="skip"' in answer["setting"]["code"]


def test_descriptors_that_are_left_open(capsys):
    checks, answer = checks_of("Leaks", capsys, expect=0)
    assert checks["descriptor-growth"]["verdict"] == "warning"
    assert answer["dataset"]["descriptors_per_sample"] == pytest.approx(2)


def test_memory_that_is_kept(capsys):
    checks, answer = checks_of("Grows", capsys, expect=0)
    assert checks["memory-growth"]["verdict"] == "warning"
    assert answer["dataset"]["growth_bytes_per_sample"] == pytest.approx(1 << 20, rel=0.3)


def test_what_cannot_be_pickled_is_named_by_its_path(capsys):
    checks, _ = checks_of("Locked", capsys, expect=0)
    assert checks["picklable"]["verdict"] == "warning"
    assert "dataset.inner['lock']" in checks["picklable"]["seen"][0]


def test_what_cannot_be_pickled_is_tried_all_the_same_where_nothing_is_forked(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "forkserver")
    taken = probe(Locked(), "data:locked", samples=4)
    assert len(taken.samples) == 4 and not taken.bad
    assert {check.name: check.verdict for check in check_dataset(taken, 1)}["picklable"] == "problem"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_are_tried_too(method, monkeypatch):
    monkeypatch.setattr(
        multiprocessing.context._default_context, "_actual_context", multiprocessing.get_context(method)
    )
    taken = probe(Good(), "data:good", samples=4)
    assert taken.start_method == method
    assert len(taken.samples) == 4 and not taken.bad


def test_variable_shapes(capsys):
    checks, _ = checks_of("Ragged", capsys, expect=0)
    assert checks["shapes"]["verdict"] == "warning"
    assert "{image: float32[3, 5]}: 1 samples, index 199" in checks["shapes"]["seen"]


@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [
        ("Restless", "warning", "no seed reaches"),
        ("Augmented", "ok", "the seed decides"),
        ("Sticky", "problem", "loaded before it"),
    ],
)
def test_random_and_stateful_datasets(name, verdict, words, capsys):
    checks, _ = checks_of(name, capsys)
    assert checks["repeatable"]["verdict"] == verdict
    assert words in checks["repeatable"]["says"]


@pytest.mark.parametrize(("name", "verdict"), [("Seeks", "problem"), ("Preads", "ok")])
def test_a_file_that_was_open_before_is_judged_by_how_it_is_read(name, verdict, capsys):
    """The worker is watched: a position that it moves is moved for all."""
    checks, _ = checks_of(name, capsys)
    assert checks["open-files"]["verdict"] == verdict
    assert checks["open-files"]["seen"] == [os.path.realpath(__file__)]


def test_it_ends_with_a_block_for_a_bug_report(capsys):
    assert call("Good", "--samples", "2", "--workers", "1") == 0
    block = capsys.readouterr().out.partition("For a bug report\n")[2].splitlines()
    assert block[0].startswith(f"  versions       holdfast {holdfast.__version__}, torch {torch.__version__}")
    labels = [line[2:17].strip() for line in block if line[2:3].strip()]
    assert labels[1:9] == [
        "system",
        "compiled parts",
        "processors",
        "memory",
        "limits",
        "cgroup",
        "/dev/shm",
        "start method",
    ]


def test_without_a_compiler_doctor_and_report_say_what_is_missing():
    """In an interpreter that cannot import the extensions."""
    pure, source = Path(__file__).parents[1] / "pure", Path(holdfast.__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{pure}{os.pathsep}{source}", "COLUMNS": "140"}
    commands = {
        "holdfast": ["-m", "holdfast", "doctor"],
        "report": ["-c", "import holdfast; print(holdfast.DataLoader([1]).report())"],
    }
    for words in commands.values():
        done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=False)
        assert "missing: who sends a signal; fast copies of large batches" in done.stdout, done.stderr
    assert done.stdout.splitlines()[0].startswith("Holdfast report (compiled parts that are missing: ")


@pytest.mark.parametrize("width", [50, 80, 120])
def test_it_wraps_to_the_terminal(width, capsys, monkeypatch):
    """All but what is to be pasted."""
    monkeypatch.setenv("COLUMNS", str(width))
    call("Awful", "--samples", "3", "--timeout", "1", "--workers", "1")
    lines = capsys.readouterr().out.partition("To paste")[0].splitlines()
    assert [line for line in lines if len(line) > width and " " in line.strip()] == []


def test_samples_that_cannot_be_sent(capsys):
    checks, _ = checks_of("Handles", capsys, expect=1)
    assert "cannot be sent" in checks["samples"]["says"]


def test_streams(capsys):
    checks, answer = checks_of("Stream", capsys, "--samples", "20", expect=0)
    assert answer["dataset"]["kind"] == "stream" and answer["dataset"]["loaded"] == 20
    assert checks["shapes"]["says"].endswith("(float32[4], int)")


def test_a_stream_that_breaks_is_told_by_its_place():
    taken = probe(Stream(bad=5), "data:stream", samples=20, sample_timeout=5)
    assert len(taken.samples) == 5
    assert [(bad.index, bad.error) for bad in taken.bad] == [(5, "ValueError: bad item")]


def test_an_empty_dataset_is_a_problem(capsys):
    checks, answer = checks_of("Empty", capsys, expect=1)
    assert checks["samples"]["says"] == "the dataset is empty"
    assert "setting" not in answer


def test_the_time_for_trying_is_bounded():
    class Slow(Good):
        def __getitem__(self, index):
            time.sleep(0.1)
            return index

    taken = probe(Slow(), "data:slow", samples=60, sample_timeout=5, budget_s=0.5)
    assert taken.cut_short and 1 <= len(taken.samples) < 20


def test_what_the_dataset_prints_does_not_spoil_the_json(capfd):
    assert call("Chatty", "--json", "--samples", "4") in (0, 1)
    answer = json.loads(capfd.readouterr().out)
    assert answer["dataset"]["loaded"] == 4


def test_a_dataset_that_replaces_stderr(capfd):
    """With a stream that does not say whether it is a terminal."""
    assert call("with_a_tee", "--samples", "2", "--workers", "1") == 0
    assert "trying samples of" in capfd.readouterr().err


def test_an_instance_a_class_and_a_loader_are_taken(capsys):
    assert call("instance", "--samples", "2", "--workers", "1") == 0
    out = capsys.readouterr().out
    assert "To paste" in out and "\033" not in out


def test_without_a_dataset_the_machine_alone_is_checked(capsys):
    parser = argparse.ArgumentParser()
    doctor.arguments(parser)
    assert doctor.run(parser.parse_args(["--workers", "0"])) in (0, 1)
    out = capsys.readouterr().out
    assert "Machine" in out and "Dataset" not in out


def test_strict_makes_warnings_count():
    assert call("Locked", "--samples", "2", "--workers", "1") == 0
    assert call("Locked", "--samples", "2", "--workers", "1", "--strict") == 1


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (f"{__name__}:broken", "broken() raised RuntimeError: no files here"),
        (f"{__name__}:needs_arguments", "missing 1 required positional argument"),
        (f"{__name__}:five", "gives a int"),
        (f"{__name__}:nothing", "has no 'nothing'; it has: Good"),
        ("no_such_module:x", "No module named 'no_such_module'"),
        ("no_colon", "write module:name"),
        ("os:", "write module:name"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_status_2(target, words, capsys):
    parser = argparse.ArgumentParser()
    doctor.arguments(parser)
    assert doctor.run(parser.parse_args([target])) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ctypes.string_at(0)", "(SIGSEGV)"),
        ("os._exit(3)", "(exit code 3)"),
        ("os.kill(os.getpid(), 9)", "(SIGKILL)"),
    ],
)
def test_a_module_that_ends_the_process_does_not_end_the_doctor(line, words, tmp_path, monkeypatch, capfd):
    (tmp_path / "awful_module.py").write_text(f"import ctypes, os\n{line}\n")
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    doctor.arguments(parser)
    assert doctor.run(parser.parse_args(["awful_module:data"])) == 2
    said = capfd.readouterr().err
    assert f"holdfast doctor: importing and making awful_module:data ended the process {words}" in said


@pytest.mark.parametrize("words", [["--workers", "-1"], ["--samples", "0"], ["--batch-size", "many"]])
def test_numbers_that_make_no_sense(words):
    parser = argparse.ArgumentParser()
    doctor.arguments(parser)
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(words)
    assert stopped.value.code == 2


def test_indices_are_spread_over_the_whole_length():
    assert spread(3, 64) == [0, 1, 2]
    assert spread(1000, 3) == [0, 500, 999] or spread(1000, 3) == [0, 499, 999]
    assert spread(0, 64) == [] and spread(10, 1) == [0]
    assert len(spread(10**9, 64)) == 64 and spread(10**9, 64)[-1] == 10**9 - 1


def test_shared_values_count_as_picklable():
    """A worker that is not forked gets them while it starts; plain pickle would refuse."""
    size, why_not = pickled_size([multiprocessing.get_context("spawn").Value("i", 0)])
    assert size and not why_not


def test_a_view_weighs_what_it_shows():
    assert weigh(torch.zeros(1000, 1000)[0]) == (4000, "float32[1000]", weigh(torch.zeros(1000))[2])
    assert weigh(torch.zeros(()))[0] == 4
    assert weigh([1, 2, 3, 4, 5])[1] == "[int x 5]"
