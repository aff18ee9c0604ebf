"""While next() waits, whoever looks is told: log, report and run folder do not wait for the next batch."""

import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from holdfast import DataLoader
from holdfast.system.run_files import records_of

from ..conftest import ROOT, until
from .waiting import Hangs


@contextmanager
def training(how):
    command = [sys.executable, "-m", "tests.process.waiting", how]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT.parent, start_new_session=True
    ) as process:
        try:
            assert process.stdout.readline() == "waits\n"
            yield process
        finally:
            process.kill()


def kept(folder, kind="incident"):
    records = (record for path in folder.glob("trainer-*.jsonl") for record in records_of(path))
    return [record for record in records if record["record"] == kind]


@pytest.mark.parametrize("how", ["hangs", "left"])
def test_a_hang_is_told_while_next_waits(how, run_dir):
    """With the default policy; in next(), and in iter() that leaves the epoch before. A SIGKILL takes none of it."""
    with training(how) as process:
        line = process.stderr.readline()
        until(lambda: kept(run_dir), "the incident is not in the run folder")
        process.kill()
    assert line.startswith("worker 0 has been silent for 1 s while loading ") and "[hang-lock]" in line
    (incident, *_) = kept(run_dir)
    assert incident["finding"] == "hang-lock" and "waiting.py" in incident["stack"]
    assert incident["index"] == (3 if how == "hangs" else None)


def test_each_death_is_in_the_run_folder_at_once(run_dir):
    """A sample kills its workers again and again; the trainer is killed before any batch has come."""
    with training("dies") as process:
        until(lambda: len(kept(run_dir)) >= 3, "three deaths are not in the run folder", 60.0)
        process.kill()
    assert {incident["index"] for incident in kept(run_dir)} == {3}
    assert all(incident["signal"] == "SIGSEGV" for incident in kept(run_dir))


def test_totals_come_while_next_waits(run_dir):
    """And they count the waiting that is under way."""

    def waited():
        return max((shot["stats"]["waited_s"] for shot in kept(run_dir, "totals")), default=0.0)

    with training("hangs"):
        until(lambda: waited() > 1.5, "the totals are stale", 60.0)
        before = waited()
        until(lambda: waited() > before + 1.0, "the totals are written once", 60.0)


def test_ctrl_c_in_a_hang_leaves_word_of_the_sample():
    """The report does not say that nothing went wrong."""
    with training("hangs") as process:
        process.stderr.readline()  # the worker is silent for a second
        process.send_signal(signal.SIGINT)
        text = process.stdout.read()
    assert "nothing went wrong" not in text
    assert re.search(r"worker 0 \(pid \d+\) has been on index 3 \(batch 3\) for [\d.]+ s", text), text
    assert re.search(r"next\(\) was interrupted after [\d.]+ s \(KeyboardInterrupt\)", text), text
    assert float(re.search(r"waited ([\d.]+) s$", text, re.MULTILINE)[1]) >= 1.0


def test_what_interrupts_a_hang_ends_with_the_sample_and_what_to_do():
    """A note on the exception, which Python prints below the traceback."""
    iterator = iter(DataLoader(Hangs(), num_workers=1))
    for _ in range(3):
        next(iterator)
    threading.Timer(2.0, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt) as caught:
        next(iterator)
    (note,) = caught.value.__notes__
    first, *rest = note.splitlines()
    assert re.match(r"worker 0 \(pid \d+\) has been on index 3 \(batch 3\) for [\d.]+ s", first)
    assert any(line.startswith("    try    Policy(sample_timeout=seconds)") for line in rest)


def test_a_short_wait_that_is_interrupted_is_no_incident():
    """And the iterator goes on: nothing was half done."""
    loader = DataLoader(Hangs(), num_workers=1)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    threading.Timer(0.2, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert not loader.incidents
    waited = loader.stats()["waited_s"]
    assert waited == loader.stats()["waited_s"], "nobody waits any more"


def test_a_timeout_names_the_sample_and_the_next_call_waits_on():
    """Its fields say index and worker, and the report has it."""
    loader = DataLoader(Hangs(), num_workers=1, timeout=1)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    for _ in range(2):
        with pytest.raises(
            TimeoutError, match=r"^DataLoader timed out after 1 seconds: batch 3 has not come\n"
        ) as caught:
            next(iterator)
        assert (caught.value.index, caught.value.worker) == (3, 0)
    assert [incident.finding for incident in loader.incidents] == ["sample-unfinished"] * 2
