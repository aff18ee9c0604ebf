"""One record behind the log line, the exception text, the report and the JSON."""

import json
import signal
import time
from dataclasses import replace

import pytest

from holdfast.core.messages import Cause, Did, Stage, What
from holdfast.diagnose.finding import Case, find
from holdfast.diagnose.incident import BadSample, incident_of
from holdfast.diagnose.narrator import KEPT, Record
from holdfast.diagnose.report import Report
from holdfast.diagnose.run_reader import rebuilt
from holdfast.diagnose.stats import LoaderStats, PoolStats, WorkerStats, to_dict
from holdfast.system.evidence import Evidence, View

CRASH = Case(
    what=What.EXITED,
    worker=2,
    life=3,
    pid=4711,
    task=88,
    index=123,
    stage=Stage.FETCH,
    attempt=2,
    strike=2,
    needed=2,
    cause=Cause.SIGNAL,
    code=signal.SIGSEGV,
    evidence=Evidence(pid=4711, stack="Fatal Python error: Segmentation fault"),
    did="left the sample out",
)
STATS = LoaderStats(batches=3, samples=12, restarts=1, bad_samples=1, waited_s=0.1, workers=2)


def test_what_nobody_has_measured_is_not_told():
    """A process without descriptors does not exist: this one ended before anybody looked at it."""
    row = WorkerStats(worker=0, batches=1, samples=4)
    text = str(Report(Record(), replace(STATS, per_worker=(row, replace(row, worker=1, descriptors=7)))))
    assert "descriptors" not in text.partition("worker 0: ")[2].partition("\n")[0]
    assert "worker 1: 4 samples" in text and "; grew by 0 MiB at most, 7 descriptors" in text
    assert " 0 descriptors" not in text


def test_the_text_is_asserted_whole():
    assert str(incident_of(CRASH)) == (
        "worker 2 was killed by SIGSEGV while loading index 123 (batch 88, attempt 2, strike 2 of 2)\n"
        "  worker-segfault: SIGSEGV: native code touched memory that is not its own\n"
        "    seen   exit by SIGSEGV; the Python stack at the crash, below\n"
        "    did    left the sample out\n"
        "    try    the last Python line of the stack called the library that crashed; "
        'Policy(bad_sample="skip") goes on without such samples\n'
        "    more   holdfast explain worker-segfault\n"
        "    stack\n"
        "      Fatal Python error: Segmentation fault"
    )


def test_what_is_not_certain_says_so_and_deaths_beyond_the_strikes_are_counted():
    killed = replace(
        CRASH, code=signal.SIGKILL, strike=3, evidence=Evidence(pid=4711, counters=True), did="tried again"
    )
    incident = incident_of(replace(killed, done=Did.SENT_AGAIN))
    assert "(batch 88, attempt 2, death 3 at this sample)" in incident.headline
    assert "\n  worker-killed (likely): " in str(incident)
    assert " [worker-killed] (likely)" in incident.line


def test_repeats_are_counted_by_sample_and_end():
    """The log has the 1st, 2nd, 4th, ... of the same; another end is another line."""
    record = Record()
    same = incident_of(replace(CRASH, did="tried again"))
    assert [record.add(same) for _ in range(3)] == [1, 2, 3]
    assert record.add(incident_of(replace(CRASH, did="left it out"))) == 1
    assert record.add(replace(same, index=124)) == 1
    nowhere = replace(same, index=None)
    assert [record.add(nowhere) for _ in range(2)] == [1, 1], "they may be about different tasks"


def test_same_incidents_are_folded():
    record = Record()
    noon = time.mktime((2026, 3, 1, 12, 0, 0, 0, 0, -1))
    for i in range(7):
        record.add(incident_of(replace(CRASH, at=noon + 61 * i)))
    record.add_bad(BadSample(123, 88, "SIGSEGV", 2))
    text = str(Report(record, STATS))
    assert "worker-segfault x7, first 12:00:00, last 12:06:06\n" in text
    assert text.count("native code touched") == 1
    record.add(incident_of(replace(CRASH, did="gave it up")))
    assert "did    gave it up" in str(Report(record, STATS))
    assert "index 123 in batch 88" in text


def test_the_last_time_is_known_of_incidents_that_are_only_counted():
    record = Record()
    noon = time.mktime((2026, 3, 1, 12, 0, 0, 0, 0, -1))
    for i in range(KEPT + 5):
        record.add(incident_of(replace(CRASH, at=noon + 86400 * (i == KEPT + 4))))
    assert f"x{KEPT + 5}, first 2026-03-01 12:00:00, last 2026-03-02 12:00:00" in str(Report(record, STATS))


def test_native_frames_stand_behind_the_stack_where_they_tell_more():
    frames = ("wait (libc.so.6)", "lock_it (libmine.so)")
    evidence = Evidence(pid=1, stack='File "x.py", line 3 in f', view=View(native=frames))
    stack = incident_of(replace(CRASH, evidence=evidence)).stack
    assert stack.startswith('File "x.py"') and stack.endswith(
        "innermost first:\n  wait (libc.so.6)\n  lock_it (libmine.so)"
    )
    plain = Evidence(pid=1, stack='File "x.py", line 3 in f', view=View(native=frames[:1]))
    assert incident_of(replace(CRASH, evidence=plain)).stack == 'File "x.py", line 3 in f'


def test_the_json_is_versioned_and_complete():
    record = Record()
    record.add(incident_of(CRASH))
    data = json.loads(Report(record, STATS).to_json())
    assert data["schema"] == 1
    (incident,) = data["incidents"]
    assert (incident["signal"], incident["index"], incident["stage"], incident["pid"]) == (
        "SIGSEGV",
        123,
        "fetch",
        4711,
    )
    assert incident["evidence"]["pid"] == 4711 and incident["evidence"]["look"] is None
    assert incident["evidence"]["stack"] == "", "it is a field of the incident"


@pytest.mark.parametrize("kind", [LoaderStats, PoolStats])
def test_totals_become_a_dict_in_one_place_and_come_back(kind):
    stats = kind(restarts=2, per_worker=(WorkerStats(worker=1, batches=3),))
    data = json.loads(json.dumps(to_dict(stats)))
    assert data["restarts"] == 2 and data["per_worker"][0]["batches"] == 3
    assert "device_ran_s" not in data, "nothing was measured"
    assert rebuilt(kind, data | {"later": 1}) == stats, "a later version may have more"


def test_a_broken_rule_does_not_hide_the_incident():
    def broken(case):
        raise RuntimeError("oops")

    finding = find(CRASH, (broken,))
    assert finding.name == "unknown" and "oops" in finding.says and "4711" in finding.seen[0]


def test_what_no_rule_knows_is_unknown():
    assert find(CRASH, ()).name == "unknown"


def test_a_healthy_run_says_so():
    assert "nothing went wrong" in str(Report(Record(), STATS))
