"""What a process had is told where it helps, and nowhere else."""

from holdfast.core.messages import Cause, Leave, What
from holdfast.diagnose.finding import Case
from holdfast.diagnose.incident import what_it_had
from holdfast.system.cgroups import ControlGroup
from holdfast.system.evidence import Evidence
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
