"""What a process had is told where it helps, and nowhere else; and a line of the log fits."""

import os
import re
import signal
from itertools import product

import pytest

from holdfast.core.messages import Cause, Leave, Stage, What
from holdfast.diagnose.finding import Case
from holdfast.diagnose.incident import incident_of, what_it_had
from holdfast.loader.loader_narrator import _DID_ABOUT_DEATH
from holdfast.remote_exception import Raised
from holdfast.system.cgroups import ControlGroup
from holdfast.system.evidence import Evidence
from holdfast.system.procfs import system_call
from holdfast.system.snapshot import Bounds, Snapshot

LOOK = Snapshot(
    age_s=1.25,
    descriptors=30,
    paths=(("/data/a.h5", 9), ("pipe", 3)),
    threads=3,
    others=("reader S", "reader S"),
    children=((7, "ffmpeg -i x"),),
)
BOUNDS = Bounds((("RLIMIT_NOFILE", 1024, 4096),), (0, 1))


def had(finding, evidence, **more):
    return what_it_had(finding, Case(what=What.EXITED, worker=0, evidence=evidence, **more))


def test_of_an_ordinary_death_nothing_is_added():
    assert had("worker-segfault", Evidence(pid=1, look=LOOK, bounds=BOUNDS)) == ()
    assert had("unknown", Evidence(pid=1)) == ()
    assert had("unknown", None) == ()


def test_of_an_unknown_one_all_is_told():
    assert had("unknown", Evidence(pid=1, look=LOOK, bounds=BOUNDS)) == (
        "1.2 s before: 30 descriptors open, the limit is 1024 (9 x /data/a.h5, 3 x pipe)",
        "3 threads (besides the main one: reader S, reader S)",
        "processes it had started: 7 (ffmpeg -i x)",
    )


def test_paths_are_not_told_twice():
    evidence = Evidence(pid=1, look=LOOK, bounds=BOUNDS)
    assert any("descriptors" in fact for fact in had("descriptors-exhausted", evidence))
    facts = had("descriptors-exhausted", evidence, cause=Cause.RECYCLED, code=Leave.DESCRIPTORS)
    assert not any("descriptors" in fact for fact in facts), "the rule has named its files"


def test_near_the_limit_on_processes_threads_and_children_are_told():
    """Native code that is refused a thread may abort."""
    group = ControlGroup(version=2, pids_max=60, pids_now=46)
    facts = had("worker-aborted", Evidence(pid=1, look=LOOK, bounds=BOUNDS, group=group))
    assert facts == (
        "1.2 s before: 3 threads (besides the main one: reader S, reader S)",
        "cgroup pids.max 60, in use 46 without it",
        "processes it had started: 7 (ffmpeg -i x)",
    )


# The log line ---------------------------------------------------------------------------------------------------------

COLUMNS = 120
RAISED = Raised("ValueError", "the file /data/a/very/long/path/to/a/sample.png " * 9, "Traceback\n", None, None)
DONE = [text.format(at_work=3) for text in _DID_ABOUT_DEATH.values()] + ["", "x" * 300]


@pytest.mark.parametrize("what", What)
@pytest.mark.parametrize("index", [37, "train/a/very/long/key/" * 9, (1, "a (b)")])
def test_a_line_of_the_log_fits(what, index):
    """With the prefix that logging gives it by default, whatever happened to whatever sample; it names the finding,
    and what was done is not lost to why it happened.
    """
    causes = list(Cause) if what is What.EXITED else [None]
    for cause, stage, did in product(causes, (None, *Stage), DONE):
        about = {"task": None if stage in (None, Stage.BOOT, Stage.INIT, Stage.IDLE) else 123_456, "index": index}
        case = Case(
            what=what, worker=31, cause=cause, code=9, stage=stage, did=did, strike=2, needed=17, raised=RAISED, **about
        )
        incident = incident_of(case)
        line = incident.line
        assert len(f"WARNING:holdfast:{line}") <= COLUMNS
        assert f"[{incident.finding}]" in line
        assert did[:3] in line and "nothing done" not in line
        assert "could not start while" not in line and "could not be started while" not in line


def test_what_fits_is_told_in_full():
    case = Case(
        what=What.EXITED, worker=1, cause=Cause.EXIT, code=3, task=9, index=37, stage=Stage.FETCH, did="went on"
    )
    line = incident_of(case).line
    assert line == "worker 1 exited with code 3 while loading index 37 (batch 9, attempt 1) [worker-exited]; went on"


def test_a_worker_that_could_not_start_is_told_once():
    assert incident_of(Case(what=What.BOOT, worker=0, stage=Stage.INIT, raised=RAISED)).headline == (
        "worker 0 could not start"
    )


def test_a_system_call_that_has_no_name_here_is_a_number():
    """A process that stopped itself is in kill(): "in the system call number 62"."""
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        os.waitpid(pid, os.WUNTRACED)
        call = system_call(pid).name
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert re.fullmatch(r"number \d+|\w+|", call)
