"""What the system refuses, cuts short or stops: it ends no run, and is taken for nobody's fault."""

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import socket
import struct
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
    policy = Policy(sample_timeout=1.0)
    if face == "files":
        socket.socketpair = with_little_room
        resource.setrlimit(resource.RLIMIT_FSIZE, (300 << 20, 300 << 20))
        loader = DataLoader(Wide(80), batch_size=1, num_workers=2, prefetch_factor=30, policy=policy)
    else:
        loader = DataLoader(Numbers(3000), batch_size=1, num_workers=2, prefetch_factor=1200, policy=policy)
    it = iter(loader)
    got = [int(next(it).reshape(-1)[0])]
    stop_self_for(4.0)
    got += [int(batch.reshape(-1)[0]) for batch in it]
    busy = max(worker["busy_s"] for worker in loader.stats()["per_worker"])
    print(json.dumps([got == list(range(len(loader))), [i.headline for i in loader.incidents], busy]))


@pytest.mark.parametrize("face", ["slots", "files"])
def test_workers_of_a_stopped_trainer_are_not_killed_as_hung(face):
    """The pipe on which they answer is full; a debugger or Ctrl-Z in the trainer is nobody's hang."""
    code = f"from tests.process.test_refused import paused; paused({face!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    exact, incidents, busy_s = json.loads(done.stdout)
    assert exact and not incidents
    assert busy_s < 4.0


# A system that refuses -----------------------------------------------------------------------------------------------

# What Holdfast asks for and can do without; number of the call on this kind of machine.
CALLS = {
    "x86_64": {"sched_setscheduler": 144, "sched_getscheduler": 145, "sched_setaffinity": 203, "setpriority": 141}
    | {"sched_yield": 24},
    "aarch64": {"sched_setscheduler": 119, "sched_getscheduler": 120, "sched_setaffinity": 122, "setpriority": 140}
    | {"sched_yield": 124},
}.get(platform.machine(), {})
CALLS |= {"prlimit64": {"x86_64": 302, "aarch64": 261}.get(platform.machine(), -1), "pidfd_open": 434}


def refuse(number, errno):
    """From now on the kernel refuses this call to this process and all that come of it, as containers do (seccomp).

    Of prlimit64 only what sets a limit: its third argument is where the new one stands.
    """
    load, equals, give = 0x20, 0x15, 0x06
    allow = (give, 0, 0, 0x7FFF0000)
    reads = [(load, 0, 0, 32), (equals, 0, 1, 0), allow] if number == CALLS["prlimit64"] else []
    rules = [(load, 0, 0, 0), (equals, 1, 0, number), allow, *reads, (give, 0, 0, 0x50000 | errno)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(rules), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    if libc.prctl(22, 2, program, 0, 0) != 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise SystemExit(77)


def without(number, errno, method):
    """In a process of its own: an epoch on a system that refuses that call."""
    refuse(number, errno)
    loader = DataLoader(Numbers(40), batch_size=4, num_workers=2, multiprocessing_context=method)
    got = [int(i) for batch in loader for i in batch]
    print(json.dumps([got == list(range(40)), [i.headline for i in loader.incidents]]))


# A spawned keeper asks for more.
REFUSED = [(call, error, "fork") for call in CALLS for error in ("EPERM", "ENOSYS")]
REFUSED += [(call, "EPERM", "spawn") for call in CALLS if call in ("sched_setaffinity", "setpriority")]


@pytest.mark.parametrize(("call", "error", "method"), REFUSED)
def test_a_call_that_is_only_a_help_may_be_refused(call, error, method):
    """A sandbox that does not let a process set its scheduling, say, costs speed and not the run."""
    code = (
        f"from tests.process.test_refused import without; without({CALLS[call]}, {getattr(errno, error)}, {method!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 77 or CALLS[call] < 0:
        pytest.skip("nothing can be refused here")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, []]
