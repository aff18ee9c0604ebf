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
from holdfast.cli.top import lines_of
from holdfast.diagnose.narrator import Record
from holdfast.diagnose.run_reader import RunPart
from holdfast.diagnose.stats import LoaderStats, PoolStats
from holdfast.system.run_files import records_of

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
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["stats"]["samples"] == 40
    assert shown["running"] is False


def test_a_loader_that_only_its_iterator_remembers(tmp_path, monkeypatch, capsys):
    """`for batch in DataLoader(...)`: the loader itself is gone when the loop begins."""
    monkeypatch.setenv("HOLDFAST_RUN_DIR", str(tmp_path))
    iterator = iter(DataLoader(Numbers(40), batch_size=4, num_workers=2))
    gc.collect()
    next(iterator)
    assert main(["top", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["running"] is True
    assert sum(1 for _ in iterator) == 9
    assert main(["top", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert (shown["running"], shown["stats"]["samples"]) == (False, 40)


def test_nothing_to_see_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HOLDFAST_RUN_DIR", raising=False)
    assert main(["top", str(tmp_path), "--once"]) == 0
    assert "no loader or pool has written" in capsys.readouterr().out
    assert main(["top", str(tmp_path / "absent"), "--once"]) == 1
    assert "HOLDFAST_RUN_DIR" in capsys.readouterr().err
    assert main(["top", "--once"]) == 1


def part(at, stats, kind="loader"):
    times = {"since": 0.0, "at": at, "totals_at": at, "workers_at": 0.0}
    state = {"running": True, "over": False, "workers": (), "untold": 0}
    return RunPart(name="7-0", kind=kind, pid=7, command="", stats=stats, record=Record(), **times, **state)


def test_rates_are_of_the_time_between_two_looks_and_the_device_has_its_share():
    def look(at, batches, waited):
        return part(at, LoaderStats(batches=batches, waited_s=waited, restarts=1, device_waited_share=0.125))

    first, second = look(100, 1000, 10), look(102, 1300, 10.5)
    (line, _) = lines_of([second], {"7-0": first}, now=102.5)
    assert "150.0/s; waited 25% of the time; the device waited for data 12.5% of the time" in line
    assert "silent for 60 s" in lines_of([second], {}, now=162)[0]


HEAD = {"record": "part", "at": 10.0, "schema": 2, "kind": "loader", "pid": 7, "command": "train"}
TOTALS = {"record": "totals", "at": 100.0, "running": True, "stats": {"batches": 10, "per_worker": []}}
FACT = {"record": "workers", "at": 100.0, "workers": []}


def text_of(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


BROKEN = {
    "no JSON": "{",
    "nothing": "",
    "a list": "[1, 2]\n",
    "a number": "7\n",
    "nothing in it": "{}\n",
    "no text": b"\xff\xfe\x00\n",
    "deep": "[" * 100_000 + "\n",
    "a long number": f'{{"at": {"9" * 5000}}}\n',
    "no head": text_of(TOTALS),
    "another version": text_of(HEAD | {"schema": 99}, TOTALS),
    "text for a number": text_of(HEAD, TOTALS | {"at": "100"}),
    "text for a start": text_of(HEAD | {"at": "0"}, TOTALS),
    "a number for text": text_of(HEAD | {"command": 7}, TOTALS),
    "a number too large": text_of(HEAD, TOTALS | {"at": 10**400}),
    "stats that are a list": text_of(HEAD, TOTALS | {"stats": [1]}),
    "text for a count": text_of(HEAD, TOTALS | {"stats": {"batches": "10"}}),
    "null for a count": text_of(HEAD, TOTALS | {"stats": {"waited_s": None}}),
    "workers that are a number": text_of(HEAD, TOTALS | {"stats": {"per_worker": 3}}),
    "workers that are numbers": text_of(HEAD, TOTALS | {"stats": {"per_worker": [3]}}),
    "caches that are a list": text_of(HEAD, TOTALS | {"stats": {"caches": [3]}}),
    "a kind that is a list": text_of(HEAD | {"kind": ["pool"]}, TOTALS),
    "an incident of nothing": text_of(HEAD, {"record": "incident", "at": 1.0}),
}
BROKEN_FACTS = {
    "workers that are a number": text_of(FACT | {"workers": 3}),
    "a worker without a place": text_of(FACT | {"workers": [{"worker": 0}]}),
    "an end of nothing": text_of({"record": "exited", "at": 1.0}),
    "a cause that is none": text_of({"record": "exited", "at": 1.0, "cause": "LOVE", "code": 9}),
    "a trainer that is a number": text_of({"record": "trainer", "at": 1.0, "ended": 3}),
}


@pytest.mark.parametrize("how", [*BROKEN, *(f"facts: {how}" for how in BROKEN_FACTS)])
def test_a_file_that_makes_no_sense_is_left_out(how, run_dir, capsys):
    """The others are shown, and one line says which is not."""
    (whole,) = run_dir.glob("trainer-*.jsonl")
    text = BROKEN.get(how, text_of(HEAD, TOTALS))
    (run_dir / "trainer-1-0.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    (run_dir / "keeper-1-0.jsonl").write_text(BROKEN_FACTS.get(how.removeprefix("facts: "), ""))
    for command in ("top", "report"):
        assert main([command, str(run_dir), *(["--once"] if command == "top" else [])]) == 0
        said = capsys.readouterr()
        lines = [*said.out.splitlines(), *said.err.splitlines()]
        assert any("10 batches" in line for line in lines)
        assert [line for line in lines if "trainer-1-0.jsonl" in line] == lines[-1:]
        assert main([command, str(run_dir), "--json"]) == 0
        said = capsys.readouterr()
        assert [shown["name"] for shown in json.loads(said.out)] == [whole.stem.removeprefix("trainer-")]
        assert "trainer-1-0.jsonl" in said.err and len(said.err.splitlines()) == 1


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink(os.devnull, path)], ids=range(3))
def test_what_is_no_file_is_left_out(make, run_dir, capsys):
    """Nobody waits for a pipe's writer."""
    make(run_dir / "trainer-1-0.jsonl")
    assert main(["top", str(run_dir), "--once"]) == 0
    said = capsys.readouterr().out
    assert "10 batches" in said and "left out trainer-1-0.jsonl" in said


def test_a_file_that_becomes_another_kind_between_two_looks():
    """Its rates are those since the start."""
    one = part(100, LoaderStats(batches=10, waited_s=1))
    other = part(100, PoolStats(done=50, submitted=50), "pool")
    assert "0.5/s" in lines_of([other], {"7-0": one}, now=101)[0]


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
        (file,) = tmp_path.glob("trainer-*.jsonl")

        def said(kind):
            return [record for record in records_of(file) if record["record"] == kind]

        until(lambda: said("totals")[-1]["stats"]["lost"] == 1, "the totals are not written while a task runs")
        process.send_signal(signal.SIGKILL)
    assert [record["finding"] for record in said("incident")] == ["task-raised", "worker-killed"]
    assert main(["top", str(tmp_path), "--once"]) == 0
    assert "2 of 3 tasks" in capsys.readouterr().out
