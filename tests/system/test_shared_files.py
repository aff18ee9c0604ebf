"""Files that a process shares with its parent since the fork, and reads by seeking."""

import os

import pytest

from holdfast.system import procfs


def seen_in_a_fork(use):
    """What a fork of ours sees after `use()`."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        use()
        os.write(writer, repr(procfs.shared_files()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(1000))
    return path


def test_one_that_is_read_at_a_shared_position(path):
    with open(path, "rb", buffering=0) as file:
        assert f"('{path}', 10)" in seen_in_a_fork(lambda: file.read(10))


def test_one_that_is_read_by_pread_is_safe(path):
    with open(path, "rb", buffering=0) as file:
        assert str(path) not in seen_in_a_fork(lambda: os.pread(file.fileno(), 10, 0))


def test_one_that_is_only_written_is_a_log(path):
    with open(path, "ab", buffering=0) as file:
        assert str(path) not in seen_in_a_fork(lambda: file.write(b"x"))


def test_one_that_was_opened_after_the_fork_is_its_own(path):
    kept = []
    assert str(path) not in seen_in_a_fork(lambda: (kept.append(open(path, "rb", buffering=0)), kept[0].read(10)))
