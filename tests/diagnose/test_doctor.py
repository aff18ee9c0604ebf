"""The doctor's judgement, on machines that are records and trees of files: no process is started."""

import re

import pytest

from holdfast.diagnose import fitness, libraries, machine_checks
from holdfast.diagnose.fitness import Bad, Measured, Repeat, Sample, check_dataset
from holdfast.diagnose.forecast import forecast, memory_forecast, recommend
from holdfast.diagnose.libraries import Process, check_process, openmp_runtimes
from holdfast.diagnose.machine import Machine, read_machine
from holdfast.diagnose.machine_checks import check_machine, size
from holdfast.system.cgroups import ControlGroup
from tests.conftest import lay

GIB = 1 << 30
MIB = 1 << 20


# Reading -------------------------------------------------------------------------------------------------------------


def test_limits_memory_and_processors_are_read_from_files(tmp_path):
    root = lay(
        tmp_path,
        {
            "proc/self/limits": "Limit  Soft Limit  Hard Limit  Units\n"
            "Max open files            1024                 4096                 files\n"
            "Max address space         unlimited            unlimited            bytes\n"
            "Max processes             500                  unlimited            processes",
            "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-2,6\nVmData:\t   2048 kB",
            "proc/meminfo": "MemTotal:  1024 kB\nMemAvailable:  512 kB\nSwapTotal: 8 kB\nCommitLimit: 9 kB",
            "proc/sys/kernel/yama/ptrace_scope": "1",
            "proc/sys/vm/overcommit_memory": "2",
            "sys/devices/system/cpu/online": "0-7",
            "sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never",
            "sys/class/infiniband/mlx5_0": "",
        },
    )
    machine = read_machine(root)
    assert (machine.nofile, machine.nproc, machine.address_space) == ((1024, 4096), (500, None), (None, None))
    assert (machine.cpus_allowed, machine.cpus_online, machine.cpus) == (4, 8, 4)
    assert (machine.memory_total, machine.memory_available, machine.own_data) == (MIB, MIB // 2, 2 * MIB)
    assert (machine.hugepages, machine.ptrace_scope, machine.overcommit) == ("always", 1, 2)
    assert machine.infiniband and machine.shm_total is None


def test_this_machine_can_be_read_and_every_check_has_something_to_say():
    for check in check_machine(read_machine(), 2):
        assert check.says and check.verdict in ("ok", "warning", "problem")
        assert "broke" not in check.says


def test_quota_and_affinity_both_count():
    assert Machine(cpus_allowed=16, cgroup=ControlGroup(cpus=3.5)).cpus == 4
    assert Machine(cpus_allowed=16, cgroup=ControlGroup(cpus=0.2)).cpus == 1
    assert (
        Machine(memory_available=4 * GIB, cgroup=ControlGroup(memory_limit=3 * GIB, memory_used=GIB)).memory_free
        == 2 * GIB
    )


# The machine ---------------------------------------------------------------------------------------------------------


def test_a_machine_without_worries_is_ok_throughout():
    assert [check.verdict for check in check_machine(Machine(), 8)] == ["ok"] * len(machine_checks.ALL)


@pytest.mark.parametrize(
    ("machine", "name", "verdict", "words"),
    [
        (Machine(cpus_allowed=2), "processors", "warning", "num_workers=2"),
        (Machine(memory_available=GIB), "memory", "problem", "ps aux"),
        (Machine(memory_available=5 * GIB), "memory", "warning", "ps aux"),
        (Machine(swap_total=GIB, swap_free=0), "memory", "warning", "ps aux"),
        (
            Machine(cgroup=ControlGroup(memory_limit=8 * GIB, memory_used=7 * GIB)),
            "memory-limit",
            "warning",
            "--memory=16g",
        ),
        (Machine(cgroup=ControlGroup(memory_limit=GIB, memory_used=GIB)), "memory-limit", "problem", "--memory=2g"),
        (Machine(nofile=(512, 4096)), "descriptors", "warning", "ulimit -n 4096"),
        (Machine(nofile=(64, None)), "descriptors", "problem", "ulimit -n 65536"),
        (Machine(nofile=(256, 256)), "descriptors", "warning", "--ulimit nofile=65536:65536"),
        (Machine(nproc=(105, 105)), "processes", "problem", "ulimit -u unlimited"),
        (Machine(cgroup=ControlGroup(pids_max=60, pids_now=20)), "processes", "warning", "--pids-limit=-1"),
        (Machine(address_space=(4 * GIB, None)), "address-space", "problem", "ulimit -v unlimited"),
        (Machine(address_space=(64 * GIB, None)), "address-space", "warning", "spark.executor.pyspark.memory"),
        (Machine(data=(4 * GIB, None)), "address-space", "warning", "ulimit -d unlimited"),
        (Machine(overcommit=2), "overcommit", "warning", "sysctl vm.overcommit_memory=0"),
        (Machine(overcommit=2, commit_left=GIB), "overcommit", "problem", "forkserver"),
        (Machine(shm_total=64 * MIB, shm_free=64 * MIB), "shared-memory", "warning", "--shm-size=8g"),
        (Machine(shm_total=None, shm_free=None), "shared-memory", "warning", "--shm-size=8g"),
        (Machine(hugepages="always", memory_available=3 * GIB), "hugepages", "warning", "echo madvise >"),
        (Machine(infiniband=True, memlock=(65536, 65536)), "locked-memory", "warning", "ulimit -l unlimited"),
        (Machine(ptrace_scope=3), "tracing", "warning", "ptrace_scope=1"),
    ],
)
def test_each_worry_is_named_with_what_to_type(machine, name, verdict, words):
    check = next(check for check in check_machine(machine, 8) if check.name == name)
    assert check.verdict == verdict
    assert words in check.advice


def test_root_is_not_bound_by_the_process_limit():
    check = machine_checks.processes(Machine(nproc=(10, 10), root=True), 8)
    assert check.verdict == "ok"


def test_a_check_that_breaks_hides_no_other(monkeypatch):
    def broken(machine, workers):
        raise KeyError("oops")

    monkeypatch.setattr(machine_checks, "ALL", (broken, machine_checks.memory))
    first, second = check_machine(Machine(), 1)
    assert (first.name, first.verdict) == ("broken", "warning") and "oops" in first.says
    assert second.name == "memory"


def test_sizes_as_people_read_them():
    assert [size(n) for n in (None, 5, 2048, 3 * MIB, 11.2 * GIB, 2048 * GIB)] == [
        "unlimited",
        "5 bytes",
        "2.0 KiB",
        "3.0 MiB",
        "11.2 GiB",
        "2.0 TiB",
    ]


# The libraries -------------------------------------------------------------------------------------------------------


def test_a_clean_process_is_ok_throughout():
    assert {check.verdict for check in check_process(Process(), 8, 8)} == {"ok"}


@pytest.mark.parametrize(
    ("process", "name", "verdict", "words"),
    [
        (Process(versions={"numpy": "2.1.0", "torch": "2.2.1+cu118"}), "library-versions", "problem", "torch"),
        (Process(versions={"numpy": "2.0.0rc1", "pandas": "2.2.1"}), "library-versions", "problem", "'numpy<2'"),
        (
            Process(versions={"opencv-python": "4.10", "opencv-python-headless": "4.9"}),
            "opencv",
            "problem",
            "pip install opencv-python-headless",
        ),
        (Process(openmp=("libgomp", "libiomp5")), "openmp", "warning", "MKL_THREADING_LAYER=GNU"),
        (Process(environment={"OMP_NUM_THREADS": "8"}), "threads", "warning", "OMP_NUM_THREADS=1"),
        (Process(cuda=True), "fork-safety", "problem", "forkserver"),
        (Process(threads=("watcher",)), "fork-safety", "warning", "forkserver"),
        (Process(native_threads=3, modules=frozenset({"cv2"})), "fork-safety", "warning", "cv2.setNumThreads(0)"),
        (Process(modules=frozenset({"grpc"})), "fork-safety", "warning", "forkserver"),
        (Process(threads=("watcher",), picklable=False), "fork-safety", "warning", "make the dataset picklable"),
        (Process(open_files=("/data/train.h5",)), "open-files", "warning", "first __getitem__"),
        (Process(open_files=("/d/a.tar",), moved=("/d/a.tar",)), "open-files", "problem", "first __getitem__"),
        (Process(open_files=("/data/index.sqlite",), moved=()), "open-files", "warning", "first __getitem__"),
    ],
)
def test_each_library_worry_is_named_with_what_to_type(process, name, verdict, words):
    check = next(check for check in check_process(process, 8, 8) if check.name == name)
    assert check.verdict == verdict
    assert words in check.advice


def test_new_enough_libraries_go_with_numpy_2():
    versions = {"numpy": "2.1", "torch": "2.6.0", "pandas": "2.2.2", "opencv-python": "4.10.0.84"}
    assert libraries.library_versions(Process(versions=versions), 1, 1).verdict == "ok"
    assert libraries.library_versions(Process(versions={"numpy": "1.26", "torch": "2.1"}), 1, 1).verdict == "ok"


def test_a_file_that_is_read_by_pread_is_no_shared_position():
    """HDF5 reads so: it was tried, and nothing moved."""
    check = libraries.shared_files(Process(open_files=("/data/train.h5",), moved=()), 4, 8)
    assert check.verdict == "ok" and "moved no position" in check.says


def test_without_a_dataset_nothing_is_said_of_what_it_would_load():
    """Threads, open files and OpenMP of the doctor itself are not those of the training."""
    names = {check.name for check in check_process(Process(threads=("mine",)), 8, 8, dataset=False)}
    assert names == {"library-versions", "opencv", "threads"}


def test_a_bug_report_names_what_is_asked_first():
    about = libraries.bug_report(Machine(), Process(versions={"numpy": "2.1", "torch": "2.6"}), "9.9")
    assert about["versions"].startswith("holdfast 9.9, torch 2.6, numpy 2.1, Python 3.")
    assert set(about) > {"compiled parts", "limits", "cgroup", "/dev/shm", "start method"}


def test_workers_that_are_not_forked_inherit_nothing():
    process = Process(start_method="spawn", cuda=True, threads=("a",), open_files=("/x.h5",))
    assert {check.verdict for check in check_process(process, 8, 8)} == {"ok"}


def test_openmp_runtimes_are_found_in_the_maps():
    maps = (
        "7f00-7f01 r-xp 0 08:01 1 /site/torch/lib/libgomp-a34b3233.so.1\n"
        "7f02-7f03 r-xp 0 08:01 2 /site/mkl/libiomp5.so\n"
        "7f04-7f05 r-xp 0 08:01 3 /site/libompl_other.so\n"
    )
    assert openmp_runtimes(maps) == ("libgomp", "libiomp5")


# The dataset ---------------------------------------------------------------------------------------------------------


def samples(count=64, **changes):
    """Of one worker; a change is a value, or a function of the place."""
    plain = {"seconds": 0.01, "bytes": MIB, "shape": "float32[3]", "resident": 200 * MIB, "peak": 210 * MIB}
    plain |= {"private": 50 * MIB, "descriptors": 12}
    made = []
    for i in range(count):
        made.append(
            Sample(index=i, **{k: v(i) if callable(v) else v for k, v in (plain | changes).items()}),
        )
    return tuple(made)


def measured(**changes):
    plain = {"name": "data:train", "expression": "data.train()", "length": 10_000, "asked": 64, "pickled_bytes": 100}
    return Measured(**(plain | {"samples": samples()} | changes))


def verdict_of(check_name, taken, workers=4):
    return next(check for check in check_dataset(taken, workers) if check.name == check_name)


def test_a_good_dataset_is_ok_throughout():
    taken = measured(repeats=(Repeat(1, False, False, False),))
    checks = check_dataset(taken, 4)
    assert len(checks) == len(fitness.ALL)
    assert {check.verdict for check in checks} == {"ok"}


def test_bad_samples_are_a_problem_with_a_command_that_shows_the_first():
    check = verdict_of("samples", measured(bad=(Bad(7, "worker 0 was killed by SIGKILL"),)))
    assert check.verdict == "problem" and "index 7" in check.seen[0]
    assert check.advice.endswith('python -c "import data; data.train()[7]"')
    assert 'bad_sample="skip"' in check.advice


def test_nobody_is_advised_to_skip_a_dataset_that_is_bad_as_a_whole():
    check = verdict_of("samples", measured(samples=(), bad=tuple(Bad(i, "OSError: gone") for i in range(64))))
    assert check.verdict == "problem" and "skip" not in check.advice and check.seen[-1] == "and 59 more"


def test_what_cannot_be_pickled_matters_most_where_nothing_is_forked():
    for method, verdict in (("fork", "warning"), ("spawn", "problem")):
        taken = measured(unpicklable="dataset.lock: TypeError", pickled_bytes=None, start_method=method)
        assert verdict_of("picklable", taken).verdict == verdict


def test_slow_samples_are_named():
    check = verdict_of("speed", measured(samples=samples(seconds=lambda i: 2.0 if i == 40 else 0.01)))
    assert check.verdict == "warning" and "index 40: 2 s" in check.seen
    first = measured(samples=samples(seconds=lambda i: 2.0 if i == 0 else 0.01))
    assert verdict_of("speed", first).verdict == "ok"


def test_variable_shapes_are_named_with_their_indices():
    check = verdict_of("shapes", measured(samples=samples(shape=lambda i: f"float32[{3 + i % 2}]")))
    assert check.verdict == "warning" and "float32[4]: 32 samples, index 1, 3, 5, 7, 9, and 27 more" in check.seen


def test_memory_that_grows_with_each_sample():
    taken = measured(samples=samples(resident=lambda i: 200 * MIB + i * MIB))
    assert taken.growth_bytes == pytest.approx(MIB, rel=0.1)
    assert verdict_of("memory-growth", taken).verdict == "warning"
    once = measured(samples=samples(resident=lambda i: (200 if i < 5 else 300) * MIB))
    assert once.growth_bytes == 0


def test_descriptors_that_stay_open():
    taken = measured(samples=samples(descriptors=lambda i: 12 + i))
    assert verdict_of("descriptor-growth", taken).verdict == "warning"
    assert verdict_of("descriptor-growth", measured(length=10**6, samples=taken.samples)).verdict == "problem"
    cache = measured(samples=samples(descriptors=lambda i: 12 + min(i, 8)))
    assert verdict_of("descriptor-growth", cache).verdict == "ok"


@pytest.mark.parametrize(
    ("repeat", "verdict", "words"),
    [
        (Repeat(3, False, False, True), "ok", "augmentation"),
        (Repeat(3, True, True, True), "warning", "no seed reaches"),
        (Repeat(3, True, False, False), "problem", "loaded before it"),
    ],
)
def test_what_differs_the_second_time(repeat, verdict, words):
    check = verdict_of("repeatable", measured(repeats=(repeat,)))
    assert check.verdict == verdict and words in check.says


# The forecast --------------------------------------------------------------------------------------------------------


def test_the_forecast_adds_up():
    expected = forecast(Machine(), measured(), 4, 32)
    assert expected.batch_bytes == 32 * MIB
    assert expected.worker_bytes == (50 + 10 + 32) * MIB
    assert expected.total_bytes == 4 * 3 * 32 * MIB + 4 * 92 * MIB
    assert memory_forecast(expected).verdict == "ok"


def test_too_many_workers_for_the_cgroup_are_a_problem_and_fewer_are_advised():
    machine = Machine(cgroup=ControlGroup(memory_limit=GIB))
    check = memory_forecast(forecast(machine, measured(), 8, 32))
    assert check.verdict == "problem" and "num_workers=4" in check.advice
    setting = recommend(machine, measured(), 32, fork_safe=True, workers=8)
    assert setting.num_workers == 4 and "would not fit" in setting.reasons[0]


CPUS = {"cpus_allowed": 2, "cpus_online": 2}


@pytest.mark.parametrize("asked", [None, 1, 4, 32])
@pytest.mark.parametrize(
    "machine",
    [
        Machine(**CPUS),
        Machine(cgroup=ControlGroup(memory_limit=GIB), overcommit=2, commit_left=0, data=(4 * GIB, None)),
        Machine(memory_available=200 * MIB, **CPUS),
    ],
)
@pytest.mark.parametrize("process", [{}, {"threads": ("a",)}, {"cuda": True}, {"open_files": ("/d/x.h5",)}])
@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("why", ["", "dataset.lock"])
@pytest.mark.parametrize("growing", [0, 1])
def test_no_advice_contradicts_another_or_what_is_pasted(machine, asked, process, start, why, growing):
    """Numbers of workers are bounds that the pasted one keeps; nobody is told forkserver and fork, or two limits."""
    here = Process(start_method=start, picklable=not why, **process)
    fork_safe = not libraries.fork_dangers(here)
    taken = measured(
        samples=samples(resident=lambda i: (200 + growing * i) * MIB),
        unpicklable=why,
        start_method=start,
        fork_safe=fork_safe,
    )
    workers = asked or machine.cpus
    checks = (*check_machine(machine, workers), *check_process(here, workers, machine.cpus))
    checks += (*check_dataset(taken, workers), memory_forecast(forecast(machine, taken, workers, 32)))
    setting = recommend(machine, taken, 32, fork_safe, asked)
    advice = [check.advice for check in checks if check.verdict != "ok"]
    assert all(setting.num_workers <= int(n) for text in advice for n in re.findall(r"num_workers=(\d+)", text))
    told = "\n".join([*(text for text in advice if "picklable" not in text and "pickled" not in text), setting.code])
    assert len(set(re.findall(r"multiprocessing_context=['\"](\w+)", told))) <= 1
    assert len(set(re.findall(r"worker_memory=\"(\w+)\"", "\n".join([*advice, setting.code])))) <= 1
    if why and not fork_safe:
        assert setting.context is None


def test_what_is_pasted_collates_samples_that_differ():
    """The default collate would raise at the first batch."""
    setting = recommend(Machine(), measured(samples=samples(shape=lambda i: f"float32[{i}]")), 32, fork_safe=True)
    assert "collate_fn=YOUR_FUNCTION" in setting.code


def test_growth_over_an_epoch_is_part_of_the_forecast():
    taken = measured(samples=samples(resident=lambda i: 200 * MIB + i * MIB))
    check = memory_forecast(forecast(Machine(memory_available=4 * GIB), taken, 2, 8))
    assert check.verdict == "problem" and any("keep, over an epoch" in fact for fact in check.seen)


def test_the_setting_can_be_pasted():
    taken = measured(bad=(Bad(7, "OSError: gone"),), samples=samples(seconds=lambda i: 0.5 if i % 10 == 9 else 0.01))
    setting = recommend(Machine(), taken, 32, fork_safe=False)
    made = {}

    class Fake:
        Policy = staticmethod(lambda **fields: fields)
        DataLoader = staticmethod(lambda dataset, **fields: made.update(fields))

    exec(setting.code, {"holdfast": Fake, "dataset": None})
    assert made == {
        "batch_size": 32,
        "num_workers": 7,
        "prefetch_factor": 4,
        "multiprocessing_context": "forkserver",
        "policy": {"sample_timeout": 30, "bad_sample": "skip", "retries": 2},
    }
    assert len(setting.reasons) == 6


def test_no_more_workers_than_batches():
    assert recommend(Machine(), measured(length=40), 32, fork_safe=True).num_workers == 2
