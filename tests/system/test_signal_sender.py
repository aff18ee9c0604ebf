"""Who sent a signal is noted the moment it arrives, and what was to happen happens all the same."""

import os
import pty
import shutil
import signal
import subprocess
import sys

import pytest

from holdfast.shm.memory_file import Memory, new_file
from holdfast.system import signal_origin
from holdfast.system.signal_origin import Sender, SenderNote

from ..conftest import until

pytestmark = pytest.mark.skipif(signal_origin.install is None, reason="without system/_sender.c: senders stay unknown")

CHILD = """
import os, signal, sys, time
from holdfast.system.signal_origin import SenderNote
from holdfast.shm.memory_file import Memory, new_file
memory = Memory(new_file("note", 4096), 4096)
note = SenderNote(memory, 0, 4096)
got = []
signal.signal(signal.SIGINT, lambda number, frame: got.append(number))
note.install((signal.SIGINT,))
print("ready", flush=True)
deadline = time.monotonic() + 20
while not got and time.monotonic() < deadline:
    time.sleep(0.01)
print(got, note.last(signal.SIGINT), flush=True)
"""


def test_the_sender_its_parents_and_pythons_own_handler():
    fd = new_file("note", 4096)
    memory = Memory(fd, 4096)
    os.close(fd)
    note = SenderNote(memory, 0, 4096)
    got = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: got.append(number))
    try:
        note.install((signal.SIGUSR2,))
        command = f"import os, time; os.kill({os.getpid()}, {int(signal.SIGUSR2)}); time.sleep(0.5)"
        with subprocess.Popen([sys.executable, "-c", command, "--token", "hunter2"]) as other:
            until(lambda: got, "the signal did not come")
        assert got == [signal.SIGUSR2]
        found = note.last(signal.SIGUSR2)
        assert found.pid == other.pid
        assert found.uid == os.getuid()
        (first, text), (second, mine), *_ = found.commands
        assert (first, second) == (other.pid, os.getpid())
        assert "os.kill" in text and "pytest" in mine
        assert text.endswith("--token ***")
        assert not found.from_kernel
        assert note.last(signal.SIGUSR2) is None, "told once"
    finally:
        signal.signal(signal.SIGUSR2, before)


BACKEND = """
package org.apache.spark.executor;
class CoarseGrainedExecutorBackend {
    public static void main(String[] words) throws Exception {
        ProcessHandle.of(Long.parseLong(words[words.length - 1])).get().destroy();
        if (words[0].equals("--stay")) Thread.sleep(60000);
    }
}
"""


@pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK here")
@pytest.mark.parametrize("stay", [True, False])
def test_a_jvm_is_named_by_its_main_class(tmp_path, stay):
    """Behind a class path of thousands of letters, and options. While it is there, the whole line is kept; if not, its
    beginning and its end. No secret is shown, with its option or without."""
    (tmp_path / "Backend.java").write_text(BACKEND)
    subprocess.run(["javac", "-d", tmp_path, tmp_path / "Backend.java"], check=True)
    path = ":".join([str(tmp_path), *(f"/opt/spark/jars/library-{i}.jar" for i in range(100))])
    options = [f"-Dspark.option.{i}={'v' * 20}" for i in range(30)]
    main = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
    rest = [
        "--stay" if stay else "--leave",
        "--token",
        "hunter2",
        *(f"--padding-{i}" for i in range(20)),
        str(os.getpid()),
    ]
    fd = new_file("note", 4096)
    memory = Memory(fd, 4096)
    os.close(fd)
    note = SenderNote(memory, 0, 3072)
    got = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        note.install((signal.SIGTERM,))
        with subprocess.Popen(["java", "-cp", path, *options, main, *rest]) as jvm:
            until(lambda: got, "the signal did not come")
            if not stay:
                jvm.wait()
            found = note.last(signal.SIGTERM)
            jvm.kill()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert str(found).startswith(f"pid {jvm.pid} (java {main}) < {os.getpid()} (")
    line = found.commands[0][1]
    assert "hunter2" not in line and "--padding-19" in line
    assert ("library-99.jar" in line) is stay


@pytest.mark.parametrize("cut", ["--password\x1ehunter2 a --more", "--passw\x1ed hunter2 --more"])
def test_a_value_whose_option_was_left_out_is_left_out(cut):
    """The middle of a long command line is not noted: the cut may part an option from its secret."""
    with subprocess.Popen(["true"]) as gone:
        pass
    assert "hunter2" not in signal_origin._whole(gone.pid, f"java -cp x {cut}")
    assert signal_origin._whole(gone.pid, f"java -cp x {cut}").endswith("--more")


def test_a_ctrl_c_comes_from_the_terminal():
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", CHILD])
    said = b""
    try:
        while b"ready" not in said:
            said += os.read(terminal, 1000)
        os.write(terminal, b"\x03")
        while b"]" not in said.partition(b"ready")[2] or b"\n" not in said.partition(b"]")[2]:
            said += os.read(terminal, 1000)
    except OSError:
        pass  # the end of it
    finally:
        os.waitpid(pid, 0)
        os.close(terminal)
    assert b"[2]" in said
    assert b"Ctrl-C" in said


def test_in_words():
    assert "Ctrl-C" in str(Sender(0, 0, 0x80, ()))
    assert "outside this container" in str(Sender(0, 0, 0, ()))
    assert str(Sender(5, 0, 0, ((5, "kill 7"), (4, "")))) == "pid 5 (kill 7) < 4 (gone already), uid 0"
