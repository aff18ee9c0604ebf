"""A kill that the kernel's counters show explains one death, and soon or never."""

import pytest

from holdfast.system import cgroups
from holdfast.system.cgroups import Oom, OomWatch


@pytest.fixture
def counters(monkeypatch):
    kills = {"cgroup": 3, "host": 10}
    monkeypatch.setattr(cgroups, "oom_kills", lambda: kills["cgroup"])
    monkeypatch.setattr(cgroups, "host_oom_kills", lambda: kills["host"])
    return kills


def test_a_kill_in_the_group_explains_one_death(counters):
    watch = OomWatch(0.0)
    assert watch.claim(1.0) is None
    counters["cgroup"], counters["host"] = 5, 12
    assert watch.claim(2.0) == Oom("cgroup", 3, 4)
    assert watch.claim(2.1) == Oom("cgroup", 4, 5)
    assert watch.claim(2.2) is None


def test_a_kill_elsewhere_on_the_host(counters):
    """The kernel counts each kill in the victim's group, too: this one was a neighbour's."""
    watch = OomWatch(0.0)
    counters["host"] = 11
    assert watch.claim(0.5) == Oom("elsewhere", 10, 11)


def test_a_kill_that_may_have_been_anybodys(counters):
    """Where the counter of the group cannot be read."""
    counters["cgroup"] = None
    watch = OomWatch(0.0)
    counters["host"] = 11
    assert watch.claim(0.5) == Oom("host", 10, 11)


def test_a_neighbours_kill_does_not_hide_our_own(counters):
    watch = OomWatch(0.0)
    counters["host"] = 11
    watch.look(1.5)
    counters["cgroup"], counters["host"] = 4, 12
    assert watch.claim(1.6) == Oom("cgroup", 3, 4)
    assert watch.claim(1.7) == Oom("elsewhere", 10, 11)


def test_an_old_kill_is_nobodys(counters):
    """Some other process was killed for memory; a worker that is killed much later was not."""
    watch = OomWatch(0.0)
    counters["cgroup"] = 4
    watch.look(1.5)
    assert watch.claim(60.0) is None


def test_counters_that_cannot_be_read(counters):
    counters["cgroup"] = counters["host"] = None
    watch = OomWatch(0.0)
    assert not watch.readable
    assert watch.claim(1.0) is None
