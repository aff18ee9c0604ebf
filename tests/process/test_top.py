"""`holdfast top` shows loaders and pools that run, from what they write once a second."""

import gc
import json
import os
import signal
import subprocess
import sys

import pytest

from holdfast import DataLoader, Pool
from holdfast.__main__ import main
from holdfast.cli.top import Shot, lines_of, shot_of
from holdfast.diagnose.stats import LoaderStats

from ..conftest import until
from . import calls
from .data import Numbers


@pytest.fixture
def run_dir(run_dir):
    """A loader has written to it."""
    assert len(list(DataLoader(Numbers(40, 0.002), batch_size=4, num_workers=2))) == 10
    return run_dir


def test_it_shows_each_loader_and_its_workers(run_dir, capsys):
    assert main(["top", str(run_dir), "--once"]) == 0
    text = capsys.readouterr().out
    assert "10 batches" in text
    assert text.count("  worker ") == 2
    assert " 0 descriptors" not in text, "nobody has looked at a worker that lived so shortly"


def test_the_folder_may_come_from_the_environment_and_the_totals_as_json(run_dir, capsys):
    assert main(["top", "--json"]) == 0
    (shot,) = json.loads(capsys.readouterr().out)
    assert shot["stats"]["samples"] == 40
    assert shot["running"] is False


def test_a_loader_that_only_its_iterator_remembers(tmp_path, monkeypatch, capsys):
    """`for batch in DataLoader(...)`: the loader itself is gone when the loop begins."""
    monkeypatch.setenv("HOLDFAST_RUN_DIR", str(tmp_path))
    iterator = iter(DataLoader(Numbers(40), batch_size=4, num_workers=2))
    gc.collect()
    next(iterator)
    assert main(["top", "--json"]) == 0
    (shot,) = json.loads(capsys.readouterr().out)
    assert shot["running"] is True
    assert sum(1 for _ in iterator) == 9
    assert main(["top", "--json"]) == 0
    (shot,) = json.loads(capsys.readouterr().out)
    assert (shot["running"], shot["stats"]["samples"]) == (False, 40)


def test_nothing_to_see_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HOLDFAST_RUN_DIR", raising=False)
    assert main(["top", str(tmp_path), "--once"]) == 0
    assert "no loader or pool has written" in capsys.readouterr().out
    assert main(["top", str(tmp_path / "absent"), "--once"]) == 1
    assert "HOLDFAST_RUN_DIR" in capsys.readouterr().err
    assert main(["top", "--once"]) == 1


def test_rates_are_of_the_time_between_two_looks_and_the_device_has_its_share():
    def shot(at, batches, waited):
        stats = LoaderStats(batches=batches, waited_s=waited, restarts=1, device_waited_share=0.125)
        return Shot("7-0", "loader", 7, since=0, at=at, running=True, last_incident="it hung", stats=stats)

    first, second = shot(100, 1000, 10), shot(102, 1300, 10.5)
    (line, more) = lines_of([second], {"7-0": first}, now=102.5)
    assert "150.0/s; waited 25% of the time; the device waited for data 12.5% of the time" in line
    assert "last: it hung" in more
    assert "silent for 60 s" in lines_of([second], {}, now=162)[0]


GOOD = {"name": "7-0", "pid": 7, "since": 0, "at": 100, "running": True, "last_incident": "", "stats": {}}
BROKEN = {
    "no JSON": "{",
    "nothing": "",
    "a list": "[1, 2]",
    "a number": "7",
    "nothing in it": "{}",
    "no text": b"\xff\xfe\x00",
    "deep": "[" * 100_000,
    "a long number": f'{{"at": {"9" * 5000}}}',
    "no stats": json.dumps(GOOD),
    "stats that are a list": json.dumps(GOOD | {"stats": [1]}),
    "text for a number": lambda shot: shot | {"at": "100"},
    "text for a start": lambda shot: shot | {"since": "0"},
    "a number for text": lambda shot: shot | {"last_incident": 7},
    "a number too large": lambda shot: shot | {"at": 10**400},
    "text for a count": lambda shot: shot | {"stats": shot["stats"] | {"batches": "10"}},
    "null for a count": lambda shot: shot | {"stats": shot["stats"] | {"waited_s": None}},
    "workers that are a number": lambda shot: shot | {"stats": shot["stats"] | {"per_worker": 3}},
    "workers that are numbers": lambda shot: shot | {"stats": shot["stats"] | {"per_worker": [3]}},
    "caches that are a list": lambda shot: shot | {"stats": shot["stats"] | {"caches": [3]}},
    "another kind": lambda shot: shot | {"kind": "pool"},
    "a kind that is a list": lambda shot: shot | {"kind": ["pool"]},
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_file_that_makes_no_sense_is_left_out(how, run_dir, capsys):
    """The others are shown, and one line says which is not."""
    (whole,) = run_dir.glob("stats-*.json")
    text = BROKEN[how]
    text = text if not callable(text) else json.dumps(text(json.loads(whole.read_text())))
    (run_dir / "stats-1-0.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["top", str(run_dir), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("10 batches" in line for line in lines)
    assert [line for line in lines if "stats-1-0.json" in line] == lines[-1:]
    assert main(["top", str(run_dir), "--json"]) == 0
    said = capsys.readouterr()
    assert [shot["name"] for shot in json.loads(said.out)] == [whole.stem.removeprefix("stats-")]
    assert "stats-1-0.json" in said.err and len(said.err.splitlines()) == 1


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink(os.devnull, path)], ids=range(3))
def test_what_is_no_file_is_left_out(make, run_dir, capsys):
    """Nobody waits for a pipe's writer."""
    make(run_dir / "stats-1-0.json")
    assert main(["top", str(run_dir), "--once"]) == 0
    said = capsys.readouterr().out
    assert "10 batches" in said and "left out stats-1-0.json" in said


def test_a_file_that_becomes_another_kind_between_two_looks():
    """Its rates are those since the start."""
    stats = {"restarts": 0, "retries": 0, "per_worker": []}
    one = GOOD | {"stats": stats | {"batches": 10, "waited_s": 1, "bad_samples": 0}}
    names = ("done", "submitted", "running", "waiting", "raised", "lost", "cancelled")
    other = GOOD | {"kind": "pool", "stats": stats | dict.fromkeys(names, 50)}
    assert "0.5/s" in lines_of([shot_of(other)], {"7-0": shot_of(one)}, now=101)[0]


def test_a_pool_has_its_own_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOLDFAST_RUN_DIR", str(tmp_path))
    with Pool(2, mp_context="fork") as pool:
        assert sum(pool.map(calls.nap, [0.01] * 20)) == pytest.approx(0.2)
    assert main(["top", str(tmp_path), "--once"]) == 0
    first, second, *workers = capsys.readouterr().out.splitlines()
    assert first.startswith(f"pool {os.getpid()}-")
    assert "20 of 20 tasks" in first
    assert "0 with workers, 0 waiting" in first
    assert second.startswith("  0 workers restarted, 0 raised, 0 lost, 0 cancelled, 0 retries")
    assert len(workers) == 2
    assert all(" tasks  busy " in line and "descriptors" in line for line in workers)


KILLED = """
import os, signal
from holdfast import Pool
from tests.process import calls
with Pool(2, mp_context="fork") as pool:
    slow = pool.submit(calls.nap, 100)
    pool.submit(os.kill, 0, "not a signal").exception()
    pool.submit(calls.die, 9).exception()
    print("ready", flush=True)
    slow.result()
"""


def test_what_happened_in_a_pool_outlives_who_made_it(tmp_path, capsys):
    """Incidents and totals are in the folder while the pool runs, and when its program was killed."""
    env = {**os.environ, "HOLDFAST_RUN_DIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout.readline() == b"ready\n"
        (file,) = tmp_path.glob("incidents-*.jsonl")
        findings = [json.loads(line)["finding"] for line in file.read_text().splitlines()]

        def lost():
            return json.loads(next(tmp_path.glob("stats-*.json")).read_text())["stats"]["lost"]

        until(lambda: lost() == 1, "the totals are not written while a task runs")
        process.send_signal(signal.SIGKILL)
    assert findings == ["task-raised", "worker-killed"]
    assert main(["top", str(tmp_path), "--once"]) == 0
    assert "2 of 3 tasks" in capsys.readouterr().out
