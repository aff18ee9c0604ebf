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


LONG_PATH = ":".join(f"/opt/jars/{i}.jar" for i in range(100))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (
            f"/usr/bin/java -cp {LONG_PATH} -Xmx1g -Da=b org.apache.spark.executor.X --id 1",
            "java org.apache.spark.executor.X",
        ),
        ("java --add-opens java.base/java.lang=ALL-UNNAMED -jar /srv/app.jar x", "java -jar /srv/app.jar"),
        ("java Terminate.java 7", "java Terminate.java"),
        ("java -cp x ... -Dspark.a=b org.me.Main a", "java org.me.Main"),
        ("/opt/venv/bin/python3.11 -u -X dev -m torch.distributed.run train.py", "python3.11 -m torch.distributed.run"),
        ("/opt/venv/bin/python -W ignore /home/me/train.py --lr 1", "python /home/me/train.py"),
        ("python -c import os; os.kill(7, 9)", "python -c import os; os.kill(7, 9)"),
        ("/bin/bash -c kill 7; sleep 1", "bash -c kill 7; sleep 1"),
        ("-bash", "-bash"),
        ("bash /home/me/stop.sh", "bash /home/me/stop.sh"),
        ("kill -9 7", "kill -9 7"),
        ("java", "java"),
        ("", ""),
    ],
)
def test_a_process_is_named_by_what_it_is(command, name):
    assert procfs.name_of(command) == name


def test_a_name_is_short():
    assert len(procfs.name_of("ffmpeg " + "x" * 500)) == 100


def test_leaked_files_are_named_by_their_folder():
    """Each leak opens another file; what is open often, or once among others, is named as it is."""
    leaked = [f"/data/train/{i}.png" for i in range(90)]
    names = ["pipe"] * 4 + ["/dev/null"] * 3 + leaked
    assert procfs.most_open(names) == (("/data/train/* (89.png, ...)", 90), ("pipe", 4), ("/dev/null", 3))
    apart = [f"/data/n{i:04}/{i}.png" for i in range(50)]
    assert procfs.most_open([*apart, "pipe"])[0] == ("/data/* (n0049/49.png, ...)", 50)
    assert procfs.most_open(["/a/b", "/c/d", "/c/d"]) == (("/c/d", 2), ("/a/b", 1))
    assert procfs.most_open([]) == ()
