"""Limits and counters of control groups, on made-up trees of both versions."""

from holdfast.local.cgroups import Group, group_of


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def tree(tmp_path, lines):
    write(tmp_path / "proc" / "7", cgroup=lines)
    return {"root": tmp_path / "sys", "proc": tmp_path / "proc"}


def test_version_1_takes_the_least_limit_on_the_way_up(tmp_path):
    places = tree(tmp_path, "4:memory:/job/step\n3:cpu,cpuacct:/\n2:pids:/job\n0::/\n")
    memory, pids = tmp_path / "sys" / "memory", tmp_path / "sys" / "pids"
    write(memory, memory__limit_in_bytes="9223372036854771712")
    write(memory / "job", memory__limit_in_bytes="1000")
    write(
        memory / "job" / "step",
        memory__limit_in_bytes="2000",
        memory__usage_in_bytes="500",
        memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
    )
    write(pids / "job", pids__max="max", pids__current="12")
    write(pids, pids__current="80")
    assert group_of(7, **places) == Group(1000, 500, 3, None, 12)


def test_version_2(tmp_path):
    places = tree(tmp_path, "0::/kube/pod/box\n")
    root = tmp_path / "sys"
    write(root / "kube", memory__max="max", pids__max="100")
    write(root / "kube" / "pod", memory__max="4096", pids__max="max")
    write(
        root / "kube" / "pod" / "box",
        memory__max="8192",
        memory__current="77",
        memory__events="low 0\nhigh 2\nmax 9\noom 1\noom_kill 5\n",
        pids__current="4",
    )
    assert group_of(7, **places) == Group(4096, 77, 5, 100, 4)


def test_version_2_in_a_container_that_does_not_see_its_own_path(tmp_path):
    places = tree(tmp_path, "0::/../../elsewhere\n")
    write(tmp_path / "sys", memory__max="4096", memory__current="1", memory__events="oom_kill 0\n")
    assert group_of(7, **places).memory_limit == 4096


def test_nothing_there(tmp_path):
    assert group_of(8, **tree(tmp_path, "")) == Group()
    assert group_of(7, **tree(tmp_path, "0::/\n")) == Group()
