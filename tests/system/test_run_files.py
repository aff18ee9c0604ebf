"""Logs of JSON lines: one writer, whole lines, a bounded size."""

import json
import os
import signal

import pytest

from holdfast.system import run_files
from holdfast.system.run_files import AppendLog, records_of


@pytest.fixture
def log(tmp_path):
    return AppendLog(tmp_path / "trainer-1-0.jsonl", ("totals",))


def test_what_is_appended_is_read_in_its_order(log):
    log.append("part", pid=7)
    log.append("incident", headline="it died")
    assert [(each["record"], each.get("pid"), each.get("headline")) for each in records_of(log.path)] == [
        ("part", 7, None),
        ("incident", None, "it died"),
    ]


def test_a_line_that_a_kill_cut_short_does_not_spoil_the_next(log):
    """The writer that comes after begins a line of its own."""
    log.append("part")
    with open(log.path, "ab") as file:
        file.write(b'{"record": "incident", "headl')
    log.append("totals", n=1)
    assert [each["record"] for each in records_of(log.path)] == ["part", "totals"]


def test_a_writer_that_is_killed_at_any_moment_leaves_whole_records(tmp_path):
    """Records of many pages: a SIGKILL may cut a write between two of them."""
    for delay in range(5):
        path = tmp_path / f"keeper-1-{delay}.jsonl"
        pid = os.fork()
        if pid == 0:
            log = AppendLog(path, ())
            for number in range(10_000):
                log.append("exited", number=number, stack="x" * 50_000)
            os._exit(0)
        while not path.exists() or path.stat().st_size < (delay + 1) * 300_000:
            pass
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        numbers = [each["number"] for each in records_of(path)]
        assert len(numbers) >= 5 and numbers == list(range(len(numbers)))


def test_a_log_stays_small_and_keeps_what_is_no_routine(log, monkeypatch):
    """Periodic records go first; the head stays, and so do the latest."""
    monkeypatch.setattr(run_files, "MOST_BYTES", 20_000)
    log.append("part")
    for number in range(2000):
        log.append("totals", number=number)
        if number % 100 == 0:
            log.append("incident", number=number)
        assert log.path.stat().st_size <= 20_000
    kept = list(records_of(log.path))
    assert kept[0]["record"] == "part"
    assert kept[-1]["number"] == 1999
    incidents = [each["number"] for each in kept if each["record"] == "incident"]
    assert incidents == list(range(incidents[0], 2000, 100)) and len(incidents) > 5
    assert not log.path.with_suffix(".draft").exists()


def test_incidents_alone_are_bounded_too(log, monkeypatch):
    monkeypatch.setattr(run_files, "MOST_BYTES", 20_000)
    log.append("part")
    for number in range(200):
        log.append("incident", number=number, text="x" * 900)
    kept = list(records_of(log.path))
    assert kept[0]["record"] == "part" and kept[-1]["number"] == 199
    assert log.path.stat().st_size <= 20_000


@pytest.mark.parametrize(
    "text", ["", "\n", "7\n", "[1]\n", "{}\n", '{"record": 7}\n', '{"record": "x"}', "\ufffe\n", "[" * 9999]
)
def test_what_is_no_record_is_passed_over(log, text):
    log.path.write_text(text)
    assert list(records_of(log.path)) == []


def test_what_json_does_not_know_is_said(log):
    with pytest.raises(TypeError):
        log.append("totals", odd=object())
    shown = AppendLog(log.path, (), str)
    shown.append("incident", odd=ValueError("x"))
    assert json.loads(log.path.read_text())["odd"] == "x"
