"""Mapped memory files."""

import errno
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.shm import memory_file
from holdfast.shm.memory_file import SMALLEST_STRIDE, Memory, new_file, sparse_file

from ..interrupt import Alarm, Interrupt, handler_raises

SIZE = 1 << 16


def mapped():
    fd = new_file("ends-here", SIZE)
    try:
        return Memory(fd, SIZE)
    finally:
        os.close(fd)


def how_many():
    return Path("/proc/self/maps").read_text().count("holdfast-ends-here")


def test_a_mapping_ends_with_its_object():
    """And with the last thing that looks into it."""
    one = mapped()
    assert how_many() == 1
    view = one.export()
    del one
    assert how_many() == 1
    view.release()
    del view
    assert how_many() == 0


def test_a_handler_that_raises_at_its_end_leaves_a_mapping_to_the_next_end(monkeypatch):
    """Python only prints what is raised there; nothing stays mapped for good, and nothing is unmapped twice."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    for at in itertools.count(1):
        one = mapped()
        try:
            with handler_raises(Alarm), Interrupt(at, memory_file.__file__) as cut:
                del one
        except Alarm:
            pass
        other = mapped()
        other.view[:3] = b"abc"
        del other
        assert how_many() == 0, f"at bytecode {at}"
        if cut.seen < at:
            break
    assert at > 10


LATE = """
import atexit, ctypes, os
from holdfast.shm.memory_file import SMALLEST_STRIDE, Memory, new_file, sparse_file

class Late:
    def __init__(self, address):
        self.address, self.read = address, ctypes.CDLL(None).strlen
        self.read.argtypes = [ctypes.c_void_p]

    def __del__(self):
        if self.read(self.address) == 3:
            os.write(1, b"read")

memory = Memory(new_file("late", 4096), 4096)
memory.view[:3] = b"abc"
late = Late(memory.address)
atexit.register(id, memory)
del memory
"""


def test_at_exit_a_mapping_stays_to_the_end_of_the_process():
    """A compiled signal handler may write there after all callbacks have run."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"read"), done.stderr


def test_slots_are_as_wide_as_the_limit_on_files_allows(monkeypatch):
    real, most = new_file, 8 * (SMALLEST_STRIDE * 4)

    def limited(name, size):
        if size > most:
            raise OSError(errno.EFBIG, "File too large")
        return real(name, size)

    monkeypatch.setattr(memory_file, "new_file", limited)
    fd, memory, stride = sparse_file(8)
    os.close(fd)
    assert memory.size == 8 * stride and SMALLEST_STRIDE <= stride <= SMALLEST_STRIDE * 4


def test_where_not_even_narrow_slots_are_allowed_that_is_raised(monkeypatch):
    def refuse(name, size):
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(memory_file, "new_file", refuse)
    with pytest.raises(OSError, match="too large"):
        sparse_file(8)
