"""What a process waits for, seen from outside."""

import subprocess
import sys

import pytest

from holdfast.system import procfs
from tests.conftest import until

WAITS = {
    "poll of a unix socket": (
        "import socket; a, b = socket.socketpair(); a.settimeout(60); a.recv(1)",
        "poll",
        "unix socket",
    ),
    "recv of a unix socket": ("import socket; a, b = socket.socketpair(); a.recv(1)", "recvfrom", "unix socket"),
    "poll of a network socket": (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); s.settimeout(60); s.accept()",
        "poll",
        "socket",
    ),
    "read of a pipe": ("import os; r, w = os.pipe(); os.read(r, 1)", "read", "pipe"),
}


@pytest.mark.parametrize("wait", WAITS)
def test_what_a_call_is_made_on(wait):
    code, *expected = WAITS[wait]
    with subprocess.Popen([sys.executable, "-c", code]) as other:
        try:
            until(
                lambda: list(procfs.system_call(other.pid)) == [*expected, (expected[-1],)], "it did not come to wait"
            )
        finally:
            other.kill()


def test_a_unix_socket_with_a_name(tmp_path):
    path = str(tmp_path / "cache.sock")
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({path!r}); s.listen(); s.accept()"
    with subprocess.Popen([sys.executable, "-c", code]) as other:
        try:
            until(
                lambda: procfs.system_call(other.pid) == ("accept4", f"unix socket {path}", (procfs.On.UNIX_SOCKET,)),
                "it did not come to wait",
            )
        finally:
            other.kill()


def test_children_and_threads():
    code = (
        "import subprocess, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "p = subprocess.Popen(['sleep', '60'])\n"
        "print(p.pid, flush=True)\n"
        "p.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        child = int(other.stdout.readline())
        try:
            until(lambda: procfs.system_call(other.pid)[0] in ("wait4", "waitid"), "it did not come to wait")
            until(lambda: procfs.children(other.pid) == ((child, "sleep 60"),), "it did not come to wait")
            until(
                lambda: [thread[-2:] for thread in procfs.other_threads(other.pid)] == [" S"], "it did not come to wait"
            )
        finally:
            subprocess.run(["kill", str(child)], check=True)
            other.wait()
    assert procfs.children(other.pid) == () == procfs.other_threads(other.pid)
