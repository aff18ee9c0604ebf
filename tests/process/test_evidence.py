"""Evidence of a death says what the process had and what it was allowed, though it is gone."""

import json
import os
import resource
import signal
import subprocess
import threading
import time

import pytest
from torch.utils.data import Dataset

from holdfast import DataLoader, Policy

from .crowded import Crowd, wait_for_one

KEPT = []


class Owner(Dataset):
    """Opens files, starts a thread and a program, and ends a while later."""

    def __init__(self, path, end):
        self.path, self.end = path, end

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            KEPT.extend(open(self.path) for _ in range(7))
            threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
            KEPT.append(subprocess.Popen(["sleep", "3"]))
            time.sleep(1.2)  # longer than between two looks at a young one
            self.end()
        return index


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def hang():
    time.sleep(60)


def leave():
    os._exit(7)


def few_files(worker):
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))


def boot_killed(worker):
    os.kill(os.getpid(), signal.SIGKILL)


def first_incident(dataset, **given):
    policy = Policy(bad_sample="skip", strikes=1, sample_timeout=given.pop("sample_timeout", None))
    loader = DataLoader(dataset, batch_size=4, num_workers=1, policy=policy, **given)
    assert [index for batch in loader for index in batch.tolist()] == [0, 1, 2, 3, 4, 6, 7]
    return json.loads(loader.report().to_json())["incidents"][0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_a_dead_worker_had(method, tmp_path):
    path = tmp_path / "data"
    path.touch()
    incident = first_incident(Owner(str(path), crash), multiprocessing_context=method)
    assert incident["finding"] == "worker-segfault"
    look, bounds = incident["evidence"]["look"], incident["evidence"]["bounds"]
    assert [str(path), 7] in look["paths"]
    assert 0 < look["age_s"] < 2
    assert look["threads"] == 1 + len(look["others"]) >= 2
    assert [command for _, command in look["children"]] == ["sleep 3"]
    limits = {name: (soft, hard) for name, soft, hard in bounds["limits"]}
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert limits["RLIMIT_NOFILE"][1] == hard and limits["RLIMIT_NPROC"] and "RLIMIT_DATA" in limits
    assert bounds["processors"] == sorted(os.sched_getaffinity(0))
    assert incident["evidence"]["group"]["version"] in (0, 1, 2) and incident["evidence"]["shm_free"] >= -1
    assert not any("descriptors" in fact for fact in incident["seen"]), "it does not help here"


def test_a_hang_is_looked_at_at_once(tmp_path):
    path = tmp_path / "data"
    path.touch()
    incident = first_incident(Owner(str(path), hang), sample_timeout=2.5)
    look = incident["evidence"]["look"]
    assert [str(path), 7] in look["paths"]
    assert look["age_s"] < 1
    assert incident["evidence"]["stack"] == "" and "in hang" in incident["stack"], "the stack is there once"


def test_descriptors_near_the_limit_are_told_of_any_death(tmp_path):
    """Native code that is refused a file may end the process without a word."""
    path = tmp_path / "data"
    path.touch()
    incident = first_incident(Owner(str(path), leave), worker_init_fn=few_files)
    assert incident["finding"] == "worker-exited"
    (fact,) = [fact for fact in incident["seen"] if "descriptors" in fact]
    assert "the limit is 32" in fact and f"7 x {path}" in fact and " s before: " in fact


def test_what_it_was_allowed_is_known_of_a_worker_that_never_was_ready():
    loader = DataLoader(range(8), num_workers=1, worker_init_fn=boot_killed, policy=Policy(restarts=1))
    with pytest.raises(Exception, match="SIGKILL"):
        list(loader)
    evidence = loader.incidents[0].evidence
    assert evidence.bounds.processors == tuple(sorted(os.sched_getaffinity(0)))
    assert evidence.bounds.soft("RLIMIT_NOFILE") > 0


@pytest.mark.parametrize("children", [450, 900])
def test_a_worker_with_hundreds_of_children_is_told_of_like_any_other(children):
    """Evidence of them all would fill more than a message: some are named, and the message arrives."""
    policy = Policy(bad_sample="skip", strikes=1, sample_timeout=2)
    loader = DataLoader(Crowd(children, wait_for_one), batch_size=1, num_workers=1, policy=policy)
    assert [index for batch in loader for index in batch.tolist()] == [0, 2, 3]
    (incident,) = loader.incidents
    assert incident.finding == "hang-child"
    assert "sh -c read line" in str(incident)
    assert len(incident.evidence.view.children) >= 16
    assert "in wait_for_one" in str(incident)
