"""Running out: of memory, descriptors, processes. Nothing is lost, and the report says what ran out."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast import DataLoader, Policy

from .data import Noise, Numbers, flat
from .limits import MIB, Greedy, Leaks, Threads

SCRIPT = str(Path(__file__).with_name("limits.py"))


def findings(loader):
    return [incident.finding for incident in loader.incidents]


@pytest.mark.parametrize("batch_size", [4, 64])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_leak_is_survived_by_fresh_workers(method, batch_size):
    """Between batches where they are small; in the middle of one that alone is more than a worker may have."""
    loader = DataLoader(
        Leaks(128, 4 * MIB),
        batch_size=batch_size,
        num_workers=2,
        multiprocessing_context=method,
        policy=Policy(worker_memory="120MiB"),
    )
    assert flat(loader) == list(range(128))
    assert set(findings(loader)) == {"worker-leak"}
    assert loader.stats()["restarts"] >= 2
    assert "MiB for each of" in str(loader.report())
    assert max(w["peak_bytes"] for w in loader.stats()["per_worker"]) < 300 * MIB


def test_the_same_random_numbers_from_fresh_workers(tmp_path):
    """A batch that is begun again in a fresh worker has the bytes of a run without."""

    class Both(Noise):
        def __getitem__(self, index):
            np.ones(4 * MIB, np.uint8)
            kept.append(np.ones(4 * MIB, np.uint8))
            return super().__getitem__(index)

    kept = []
    torch.manual_seed(0)
    plain = [b.clone() for b in DataLoader(Noise(96), batch_size=32, num_workers=2)]
    torch.manual_seed(0)
    loader = DataLoader(Both(96), batch_size=32, num_workers=2, policy=Policy(worker_memory="80MiB"))
    assert all(torch.equal(a, b) for a, b in zip(plain, loader, strict=True))
    assert "worker-leak" in findings(loader)


def test_a_sample_that_asks_for_too_much_is_lost_alone():
    loader = DataLoader(
        Greedy(40, 17, 3 << 30), batch_size=4, num_workers=2, policy=Policy(worker_memory="1GiB", bad_sample="skip")
    )
    assert flat(loader) == [i for i in range(40) if i != 17]
    (incident,) = loader.incidents
    assert incident.finding == "allocation-refused"
    assert incident.index == 17
    text = str(incident)
    assert "3.00 GiB" in text
    assert "np.ones(self.size, np.uint8)" in text  # the line


def test_a_thread_that_does_not_fit_into_worker_memory_is_named_as_ours():
    """EAGAIN from pthread_create under our own RLIMIT_DATA is no limit on processes."""
    loader = DataLoader(
        Threads(), batch_size=2, num_workers=1, policy=Policy(worker_memory="200MiB", bad_sample="skip")
    )
    assert flat(loader) == [0, 1, 2, 3, 4, 6, 7]
    assert findings(loader)[-1] == "allocation-refused"
    assert "its stack does not fit into Policy(worker_memory=...)" in str(loader.incidents[-1])


def test_auto_is_a_share_of_what_is_free():
    loader = DataLoader(Numbers(8), batch_size=2, num_workers=2, policy=Policy(worker_memory="auto"))
    assert flat(loader) == list(range(8))


def alone(name, workers, *, within=()):
    """An epoch in a process of its own, possibly in a control group: (controller, file, limit)."""
    command = [sys.executable, "-W", "ignore", SCRIPT, name, str(workers)]
    if within:
        controller, file, limit = within
        if os.getuid() != 0 or not os.path.isdir(f"/sys/fs/cgroup/{controller}"):
            pytest.skip("needs root and control groups of version 1")
        group = Path(f"/sys/fs/cgroup/{controller}/holdfast-test-{os.getpid()}")
        group.mkdir()
        (group / file).write_text(str(limit))
        command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    finally:
        if within:
            remove(group)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def remove(group):
    give_up = time.monotonic() + 5
    while True:
        try:
            group.rmdir()
            return
        except OSError:
            assert time.monotonic() < give_up, "processes are left in the group"
            time.sleep(0.05)


def test_what_the_trainer_had_freed_before_the_fork_hides_no_leak():
    """Its allocator keeps it; a forked worker would use it up before its resident memory grows."""
    told = alone("freed", 1)
    assert told["exact"]
    assert set(told["findings"]) == {"worker-leak"}
    assert "0.5 MiB for each of" in told["text"]


def test_leaked_descriptors_are_survived_and_their_paths_named():
    run = alone("files", 2)
    assert run["exact"]
    assert set(run["findings"]) == {"descriptors-exhausted"}
    assert "limits.py" in run["text"]
    assert "the limit is 256" in run["text"]


@pytest.mark.parametrize("workers", [4, "auto"])
def test_more_workers_than_fit_into_a_control_group(workers):
    """Four would need 4 x 150 MiB besides the 300 or so that are there; the limit holds two or three."""
    run = alone("heavy", workers, within=("memory", "memory.limit_in_bytes", 750 * MIB))
    assert run["exact"]
    assert run["oom_kills"] == 0 or "worker-oom-killed" in run["findings"]
    if workers == 4:
        assert "memory-short" in run["findings"]


def test_fewer_processes_than_workers():
    run = alone("slow", 4, within=("pids", "pids.max", 4))
    assert run["exact"]
    assert set(run["findings"]) == {"cannot-start-process"}
    assert "cgroup pids.max 4" in run["text"]
    assert "went on with 2 workers" in run["text"]  # and with 3 before that: the last one stands for both


def test_a_service_that_is_down_for_a_while_costs_that_while_and_no_sample():
    began = time.time()

    class Service(Numbers):
        def __getitem__(self, index):
            time.sleep(0.01)
            if 0.3 < time.time() - began < 2.3:
                raise ConnectionRefusedError("down")
            return index

    policy = Policy(retries=12, retry_delay=0.05, retry_delay_max=0.5, sample_timeout=0.4)
    loader = DataLoader(Service(80), batch_size=4, num_workers=2, policy=policy)
    assert flat(loader) == list(range(80))
    assert time.time() - began < 8
    assert set(findings(loader)) == {"sample-retried"}


def test_a_service_that_stays_down_ends_with_one_error_soon():
    """The first sample waits as long as it may; the others need not find out for themselves."""

    class Service(Numbers):
        def __getitem__(self, index):
            if index >= 40:
                raise ConnectionRefusedError(111, "Connection refused")
            return index

    began = time.monotonic()
    policy = Policy(retries=3, retry_delay=0.2, bad_sample="skip")
    loader = DataLoader(Service(400), batch_size=4, num_workers=2, policy=policy)
    with pytest.raises(holdfast.TooManyBad) as caught:
        flat(loader)
    assert "x ConnectionRefusedError: [Errno 111] Connection refused" in str(caught.value)
    assert time.monotonic() - began < 10


def test_auto_finds_more_workers_for_samples_that_wait():
    """Two processors, and samples of 20 ms sleep: two workers give 100 samples a second."""
    loader = DataLoader(Numbers(1200, 0.02), batch_size=4, num_workers="auto", policy=Policy())
    began = time.monotonic()
    assert flat(loader) == list(range(1200))
    assert sum(w["batches"] > 3 for w in loader.stats()["per_worker"]) > loader.stats()["cpus"]
    assert time.monotonic() - began < 1200 * 0.02 / loader.stats()["cpus"]


def test_figures_of_each_worker():
    loader = DataLoader(Numbers(40, 0.002), batch_size=4, num_workers=2)
    flat(loader)
    flat(loader)
    rows = loader.stats()["per_worker"]
    assert [row["worker"] for row in rows] == [0, 1]
    assert sum(row["samples"] for row in rows) == 80
    assert sum(row["batches"] for row in rows) == 20
    assert all(row["busy_s"] > 0.02 and row["bytes_sent"] > 0 for row in rows)


def test_a_dataset_of_many_objects_is_found_copied():
    """Each look at a Python object writes its reference count, and so copies its page."""
    run = alone("names", 1)
    assert run["exact"]
    assert run["findings"] == ["dataset-copied"]
    assert "Names.names is a list of 2,000,000 str" in run["text"]
