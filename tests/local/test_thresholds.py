"""When a worker is asked to make room, and when it has to."""

import errno
import mmap
import os
import resource

import pytest

from holdfast.core.messages import Leave
from holdfast.local.worker.thresholds import COPY_LEAST, Copies, Thresholds
from holdfast.shm.memory_file import Memory, new_file
from holdfast.system import linux
from holdfast.system.linux import refused

MIB = 1 << 20


def test_memory():
    marks = Thresholds(1000 * MIB)
    assert marks.judge(os.getpid(), 700 * MIB, 10) == (None, False, ())
    assert marks.judge(os.getpid(), 850 * MIB, 10).leave is Leave.MEMORY
    assert marks.judge(os.getpid(), 1300 * MIB, 10).kill


def test_without_a_limit_memory_is_nobodys_business():
    assert Thresholds(None).judge(os.getpid(), 1 << 50, 10) == (None, False, ())


def test_descriptors():
    """The paths are named, while they are there to be named."""
    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 65_536)
    with open(__file__):
        verdict = Thresholds(None).judge(os.getpid(), 0, int(limit * 0.81))
    assert verdict.leave is Leave.DESCRIPTORS
    assert any("open: " in fact for fact in verdict.facts)


@pytest.mark.parametrize(
    ("error", "leave"),
    [
        (OSError(errno.EMFILE, "Too many open files"), Leave.DESCRIPTORS),
        (OSError(errno.ENFILE, "File table overflow"), Leave.DESCRIPTORS),
        (MemoryError(), Leave.MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), Leave.MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), Leave.MEMORY),
        (RuntimeError("can't start new thread"), Leave.PROCESSES),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), None),  # a socket that does not block
        (OSError(errno.ENOENT, "No such file"), None),
        (ValueError("x"), None),
    ],
)
def test_what_a_fresh_worker_may_get(error, leave):
    assert refused(error, None, 0) is leave


def test_only_memory_of_its_own_counts_as_copied(tmp_path):
    """A batch in its slot, and a file that only one worker has mapped, are private pages, and no copies of anything."""
    size = 400 * MIB
    path = tmp_path / "data"
    with open(path, "wb") as file:
        for _ in range(size // MIB):
            file.write(b"x" * MIB)
    before = linux.own_bytes(os.getpid())
    fd = new_file("slot", size)
    slot = Memory(fd, size)
    os.close(fd)
    for at in range(0, size, 4096):
        slot.view[at] = 1
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[at] for at in range(0, size, 4096)) == size // 4096 * ord("x")
        copies = Copies(os.getpid(), COPY_LEAST, before, now=0.0)
        assert copies.look(now=3.0, grown=0) == 0
        assert linux.own_bytes(os.getpid()) < before + 50 * MIB
    own = bytearray(size)
    assert linux.own_bytes(os.getpid()) > before + len(own) - 50 * MIB
