"""How many workers fit into memory, on a machine laid out as files."""

from pathlib import Path

import pytest

from holdfast.core.host import Room
from holdfast.local.keeper.memory_budget import CALM_S, MemoryBudget
from holdfast.system.cgroups import MemoryFiles, growth_bytes
from tests.conftest import free_descriptors, lay

MIB = 1 << 20


def machine(root: Path, total: int, free: int, limit: int | None = None, used: int = 0, cached: int = 0) -> Path:
    """Its memory, and that of its only group, in MiB."""
    group = "sys/fs/cgroup/job"
    memory = f"MemTotal: {total * 1024} kB\nMemFree: 0 kB\nMemAvailable: {free * 1024} kB\nBuffers: 0 kB"
    files = {
        "proc/meminfo": memory,
        "proc/self/cgroup": "0::/job",
        "sys/fs/cgroup/cgroup.controllers": "memory",
        f"{group}/memory.max": "max" if limit is None else f"{limit * MIB}",
        f"{group}/memory.current": f"{used * MIB}",
        f"{group}/memory.stat": f"inactive_file {cached * MIB}\nactive_file 0",
    }
    return lay(root, files)


def workers(count: int, grown: int, most: int) -> list[tuple[int, int]]:
    return [(grown * MIB, most * MIB)] * count


def test_with_plenty_all_begin_at_once(tmp_path):
    assert MemoryBudget(4, root=machine(tmp_path, 64_000, 60_000)).said == Room(4, False)


def test_where_little_is_left_the_first_one_shows_what_it_needs(tmp_path):
    """Four of 250 do not fit into 1000, of which 300 are taken; two do."""
    watch = MemoryBudget(4, root=machine(tmp_path, 64_000, 60_000, limit=1000, used=300))
    assert watch.said == Room(1, False)
    assert watch.look(0.1, workers(1, 200, 250), proven=False) is None
    assert watch.look(0.2, workers(1, 0, 250), proven=True) == Room(2, False)
    assert "a worker needs up to 250 MiB" in watch.facts()


def test_what_an_earlier_epoch_needed_is_known(tmp_path):
    watch = MemoryBudget(4, 250 * MIB, root=machine(tmp_path, 64_000, 60_000, limit=1000, used=300))
    assert watch.said == Room(2, False)


def test_file_pages_are_not_in_the_way(tmp_path):
    watch = MemoryBudget(2, root=machine(tmp_path, 64_000, 60_000, limit=1000, used=950, cached=700))
    assert watch.used == 250 * MIB


def test_near_the_limit_dispatch_pauses_and_a_worker_goes_and_comes_back(tmp_path):
    watch = MemoryBudget(4, 100 * MIB, 4, root=machine(tmp_path, 64_000, 60_000, limit=1000, used=500))
    assert watch.look(0.1, workers(4, 100, 100), True) is None
    machine(tmp_path, 64_000, 60_000, limit=1000, used=850)  # the trainer grew
    assert watch.look(0.2, workers(4, 100, 100), True) == Room(4, True)
    machine(tmp_path, 64_000, 60_000, limit=1000, used=920)
    assert watch.look(0.3, workers(4, 100, 100), True) == Room(3, True)
    machine(tmp_path, 64_000, 60_000, limit=1000, used=500)
    assert watch.look(0.4, workers(3, 100, 100), True) == Room(3, False)
    assert watch.look(0.5 + CALM_S, workers(3, 100, 100), True) == Room(4, False)


def test_a_full_machine_is_no_danger_to_who_needs_little(tmp_path):
    watch = MemoryBudget(4, 10 * MIB, 4, root=machine(tmp_path, 64_000, 3_000))  # 95 % in use by others
    assert watch.look(0.1, workers(4, 5, 10), True) is None


def test_critical_is_only_where_a_worker_may_need_more_than_there_is(tmp_path):
    watch = MemoryBudget(4, 100 * MIB, 4, root=machine(tmp_path, 64_000, 60_000, limit=1000, used=980))
    watch.look(0.1, workers(4, 100, 100), True)
    assert watch.critical


def test_growth():
    assert growth_bytes(None, 4) is None
    assert growth_bytes(5, 4) == 5
    share = growth_bytes("auto", 4)
    assert share is not None
    assert share > 32 * MIB


def test_where_no_file_can_be_opened_memory_is_as_it_was_last(tmp_path):
    """For the keeper, which looks ten times a second. Who has never looked is told EMFILE."""
    (tmp_path / "proc").mkdir()
    meminfo = tmp_path / "proc/meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemFree: 0 kB\nMemAvailable: 600 kB\nBuffers: 0 kB\n")
    files = MemoryFiles(tmp_path)
    assert files.read(0.0) == (1000 << 10, 400 << 10)
    with free_descriptors(0):
        assert files.read(0.0) == (1000 << 10, 400 << 10)
        with pytest.raises(OSError, match="Too many open files"):
            MemoryFiles(tmp_path).read(0.0)
