"""What a process has, seen from outside while it lives; what it was allowed, also after its end."""

import os
import resource
import subprocess
import sys
import time

from holdfast.system.snapshot import bounds_of, look_at

from ..conftest import until

HAS = """
import subprocess, sys, threading, time
files = [open({path!r}) for _ in range(5)]
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
child = subprocess.Popen(["sleep", "60"])
print("ready", flush=True)
sys.stdin.read()
child.kill()
"""


def test_what_a_process_has(tmp_path):
    path = tmp_path / "data"
    path.touch()
    code = HAS.format(path=str(path))
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"ready\n"
            # (A program that has only just begun has no command line yet.)
            until(lambda: look_at(other.pid).children[0][1] == "sleep 60", "its child has no command line")
            look = look_at(other.pid)
        finally:
            other.stdin.close()
            other.wait()
    assert look.descriptors == sum(count for _, count in look.paths) >= 8
    assert dict(look.paths)[str(path)] == 5
    assert look.paths[0] == (str(path), 5), "the most frequent first"
    assert look.threads == 2 and len(look.others) == 1
    assert look_at(other.pid) is None, "it is gone"


def test_what_it_was_allowed_is_known_until_it_is_reaped():
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (123, 456))
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        os._exit(0)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        bounds = bounds_of(pid)
    finally:
        os.waitpid(pid, 0)
    assert ("RLIMIT_NOFILE", 123, 456) in bounds.limits and bounds.soft("RLIMIT_NOFILE") == 123
    assert bounds.processors == (min(os.sched_getaffinity(0)),)
    assert bounds_of(pid).limits == ()


def test_a_look_at_a_leak_is_bounded():
    """Thousands of descriptors and threads must not hold up the keeper."""
    code = "import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3000, 3000))\n"
    code += "files = [os.open('/dev/null', 0) for _ in range(2900)]; print(flush=True); import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            other.stdout.readline()
            took = []
            for _ in range(5):
                began = time.perf_counter()
                look = look_at(other.pid)
                took.append(time.perf_counter() - began)
        finally:
            other.stdin.close()
            other.wait()
    assert look.descriptors >= 2900
    assert dict(look.paths)["/dev/null"] <= 256
    assert min(took) < 0.02
