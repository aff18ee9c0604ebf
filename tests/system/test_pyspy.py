"""py-spy as a second opinion: what it says is understood, and what it does not say holds nobody up."""

import os
import stat
import subprocess
import sys
import time

import pytest

from holdfast.system import snapshot
from holdfast.system.snapshot import Native, PySpy, read_dump

HANGS = "import ctypes; print(1, flush=True); ctypes.PyDLL(None).sleep(60)"


def wait_for(look, pid, key):
    """As the keeper does it: at each tick, and all children are reaped in one place."""
    deadline = time.monotonic() + 30
    while look.awaited(pid, key):
        assert time.monotonic() < deadline, "it was never given up"
        if look._pid:
            look.reaped(os.waitpid(look._pid, os.WNOHANG)[0])
        time.sleep(0.02)
    if look._pid:
        look.reaped(os.waitpid(look._pid, 0)[0])


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A program that stands in for py-spy."""

    def make(script):
        program = tmp_path / "py-spy"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        return PySpy()

    return make


@pytest.mark.skipif(snapshot.find() is None, reason="py-spy is not installed")
def test_the_native_frames_and_the_gil_of_a_process_that_hangs():
    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE) as other:
        try:
            other.stdout.readline()
            look = PySpy()
            wait_for(look, other.pid, "hang")
            seen = look.answer("hang")
            assert seen.gil is True
            assert "nanosleep" in seen.frames[0] and any("ffi_call" in frame for frame in seen.frames)
            assert look.answer("another hang") == Native()
        finally:
            other.kill()


def test_it_is_found_beside_the_interpreter_or_on_the_path(tmp_path, monkeypatch, fake):
    assert fake("true").path == str(tmp_path / "py-spy")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    assert PySpy().path is None
    assert not PySpy().awaited(os.getpid(), "hang")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert PySpy().path == str(tmp_path / "py-spy")


def test_one_that_takes_too_long_is_given_up(monkeypatch, fake):
    monkeypatch.setattr(snapshot, "LOOK_S", 0.2)
    look = fake("exec sleep 60")
    began = time.monotonic()
    wait_for(look, os.getpid(), "hang")
    assert time.monotonic() - began < 10
    assert look.answer("hang") == Native()


def test_one_that_fails_says_nothing(fake):
    look = fake("echo not allowed; exit 1")
    wait_for(look, os.getpid(), "hang")
    assert look.answer("hang") == Native()
    assert not look.awaited(os.getpid(), "hang"), "asked once"


def test_one_process_is_looked_at_at_a_time(fake):
    look = fake("exec sleep 60")
    assert look.awaited(os.getpid(), "first")
    assert not look.awaited(os.getpid(), "second"), "it goes on without"
    look.stop()
    look.reaped(os.waitpid(look._pid, 0)[0])


def test_only_what_lies_inside_the_python_line():
    frames = [{"name": "wait", "filename": "/lib/libc.so.6", "module": "/lib/libc.so.6"}]
    frames += [{"name": "f", "filename": "/home/me/data.py", "module": None}]
    frames += [{"name": "main", "filename": "/lib/libc.so.6", "module": "/lib/libc.so.6"}]
    thread = {"pid": 5, "os_thread_id": 5, "owns_gil": False, "frames": frames}
    other = {"pid": 5, "os_thread_id": 6, "owns_gil": True, "frames": []}
    assert read_dump(__import__("json").dumps([other, thread])) == Native(("wait (libc.so.6)",), False)
    assert read_dump("[]") == Native()
