"""What the system refuses, cuts short or stops: it ends no run, and is taken for nobody's fault."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys

import pytest
import torch

from holdfast import DataLoader, Policy

from .data import Numbers

# A stopped trainer ---------------------------------------------------------------------------------------------------


class Wide(Numbers):
    """Each too large for a slot of 1 MiB."""

    def __getitem__(self, index):
        return torch.full((5 << 16,), index, dtype=torch.int32)


socketpair = socket.socketpair


def stop_self_for(seconds):
    """Stops this process, and has another one wake it."""
    waker = f"import os, time; time.sleep({seconds}); os.kill({os.getpid()}, {int(signal.SIGCONT)})"
    child = subprocess.Popen([sys.executable, "-c", waker])
    os.kill(os.getpid(), signal.SIGSTOP)
    child.wait()


def with_little_room(family, kind):
    """A socket pair in which a few words are many."""
    ours, theirs = socketpair(family, kind)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return ours, theirs


def paused(face):
    """In a process of its own: a loader whose trainer stands still while its workers have much to say."""
    policy = Policy(sample_timeout=0.3)
    if face == "files":
        socket.socketpair = with_little_room
        resource.setrlimit(resource.RLIMIT_FSIZE, (300 << 20, 300 << 20))
        loader = DataLoader(Wide(80), batch_size=1, num_workers=2, prefetch_factor=30, policy=policy)
    else:
        loader = DataLoader(Numbers(3000), batch_size=1, num_workers=2, prefetch_factor=1200, policy=policy)
    it = iter(loader)
    got = [int(next(it).reshape(-1)[0])]
    stop_self_for(2.5)
    got += [int(batch.reshape(-1)[0]) for batch in it]
    busy = max(worker["busy_s"] for worker in loader.stats()["per_worker"])
    print(json.dumps([got == list(range(len(loader))), [i.headline for i in loader.incidents], busy]))


@pytest.mark.parametrize("face", ["slots", "files"])
def test_workers_of_a_stopped_trainer_are_not_killed_as_hung(face):
    """The pipe on which they answer is full; a debugger or Ctrl-Z in the trainer is nobody's hang."""
    code = f"from tests.process.test_refused import paused; paused({face!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    exact, incidents, busy_s = json.loads(done.stdout)
    assert exact and not incidents
    assert busy_s < 2.5
