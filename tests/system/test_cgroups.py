"""Limits and counters of control groups, on machines that are trees of files."""

from holdfast.system.cgroups import ControlGroup, group_of
from tests.conftest import lay

GIB = 1 << 30
MIB = 1 << 20


def test_cgroup_v2_gives_the_tightest_group_on_the_way_up(tmp_path):
    root = lay(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory pids",
            "sys/fs/cgroup/pod/memory.max": str(8 * GIB),
            "sys/fs/cgroup/pod/memory.current": str(7 * GIB),
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB // 2}\nactive_file {GIB // 2}",
            "sys/fs/cgroup/pod/box/memory.max": "max",
            "sys/fs/cgroup/pod/box/memory.events": "low 0\nhigh 2\nmax 9\noom 1\noom_kill 5",
            "sys/fs/cgroup/pod/box/pids.max": "100",
            "sys/fs/cgroup/pod/box/pids.current": "40",
            "sys/fs/cgroup/pod/cpu.max": "max 100000",
            "sys/fs/cgroup/pod/box/cpu.max": "250000 100000",
        },
    )
    assert group_of(root=root) == ControlGroup(
        version=2, memory_limit=8 * GIB, memory_used=6 * GIB, oom_kills=5, pids_max=100, pids_now=40, cpus=2.5
    )


def test_cgroup_v1_with_joined_controllers(tmp_path):
    root = lay(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n2:pids:/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(4 * GIB),
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}",
            "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "400000",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/pids/pids.max": "max",
        },
    )
    assert group_of(root=root) == ControlGroup(version=1, memory_limit=4 * GIB, memory_used=GIB, oom_kills=3, cpus=4.0)


def test_in_a_container_the_hosts_path_is_not_there_and_the_mount_itself_counts(tmp_path):
    root = lay(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/0123",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(MIB),
        },
    )
    assert group_of(root=root).memory_limit == GIB


def test_without_cgroups_nothing_is_limited(tmp_path):
    assert group_of(root=tmp_path) == ControlGroup()
