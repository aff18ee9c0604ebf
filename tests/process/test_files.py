"""FileCache: a bounded number of open files, closed for real, and none shared across a fork."""

import errno
import gc
import io
import multiprocessing
import os
import pickle
import resource
import signal
import threading
import time
import zipfile
from pathlib import Path

import pytest
from torch.utils.data import Dataset

from holdfast import DataLoader, FileCache

from ..conftest import until
from .data import flat


def open_under(folder, pid="self"):
    """Paths in this folder that a process has open."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            path = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        if path.startswith(str(folder)):
            found.append(os.path.basename(path))
    return sorted(found)


@pytest.fixture
def folder(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02}").write_bytes(bytes([i]) * 100)
    return tmp_path


def in_child(work):
    """Its exit status is 0 if nothing was raised there."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def test_the_bound_is_kept_and_the_least_recently_used_goes(folder):
    files = FileCache(4, mode="rb")
    for i in range(20):
        assert files[folder / f"{i:02}"].read(1) == bytes([i])
        files[folder / "00"].seek(0)  # stays in use
        assert len(open_under(folder)) <= 4
    assert open_under(folder) == ["00", "17", "18", "19"]
    assert files.figures() == {"hits": 20, "misses": 20, "evicted": 16, "hit_rate": 0.5, "open": 4}
    files.close()
    assert open_under(folder) == []
    assert files[str(folder / "03")].read(1) == b"\x03"


def test_a_cache_that_goes_closes_its_files(folder):
    files = FileCache(4, "rb")
    files[folder / "00"], files[folder / "01"]
    del files
    gc.collect()
    assert open_under(folder) == []


def test_path_and_arguments_are_the_key(folder):
    files = FileCache(4, opener=open)
    path = folder / "01"
    text, raw = files[path], files.open(path, "rb")
    assert isinstance(text, io.TextIOWrapper) and isinstance(raw, io.BufferedReader)
    assert files[str(path)] is text and files.open(path, "rb") is raw
    assert files.open(path, mode="rb", buffering=0) is files.open(path, buffering=0, mode="rb")
    files.forget(path)
    assert open_under(folder) == []


def test_one_that_its_user_closed_is_opened_anew(folder):
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("inside", "x")
    files = FileCache(4, mode="rb")
    archives = FileCache(4, opener=zipfile.ZipFile)
    for _ in range(2):
        with files[folder / "00"] as file:
            assert file.read(1) == b"\0"
        with archives[folder / "a.zip"] as archive:
            assert archive.read("inside") == b"x"


def test_errors_of_the_opener_are_the_users(folder):
    files = FileCache(2, mode="rb")
    with pytest.raises(FileNotFoundError):
        files[folder / "none"]
    with pytest.raises(IsADirectoryError):
        files[folder]
    with pytest.raises(TypeError):
        files.open(folder / "00", colour="red")
    with pytest.raises(ValueError, match="1 or more"):
        FileCache(0)


def test_zip_archives(folder):
    for i in range(6):
        with zipfile.ZipFile(folder / f"{i}.zip", "w") as archive:
            archive.writestr("inside", f"{i}")
    files = FileCache(3, opener=zipfile.ZipFile)
    for i in [*range(6), *range(6)]:
        assert files[folder / f"{i}.zip"].read("inside") == f"{i}".encode()
        assert len(open_under(folder)) <= 3
    files.close()
    assert open_under(folder) == []


def test_images_of_many_frames(folder):
    """PIL holds their descriptor, loaded or not, until they are closed."""
    image = pytest.importorskip("PIL.Image")
    frames = [image.new("L", (8, 8), shade) for shade in (0, 100, 200)]
    for i in range(6):
        frames[0].save(folder / f"{i}.tiff", save_all=True, append_images=frames[1:])
    files = FileCache(2, opener=image.open)
    for frame in (2, 0, 1):
        for i in range(6):
            opened = files[folder / f"{i}.tiff"]
            opened.seek(frame)
            assert opened.getpixel((0, 0)) == frame * 100
            assert len(set(open_under(folder))) <= 2  # (PIL has two descriptors of each)
    files.close()
    assert open_under(folder) == []


def test_hdf5(folder):
    h5py = pytest.importorskip("h5py")
    for i in range(4):
        with h5py.File(folder / f"{i}.h5", "w") as file:
            file["x"] = list(range(i, i + 10))
    files = FileCache(2, opener=h5py.File, mode="r")

    def read():
        for i in [*range(4), *range(4)]:
            assert files[folder / f"{i}.h5"]["x"][3] == i + 3

    read()
    assert len(open_under(folder)) == 2

    def child():
        read()
        assert len(open_under(folder)) == 2  # its own, and the parent's closed

    assert in_child(child) == 0
    read()
    files[folder / "3.h5"].close()
    read()
    files.close()
    assert open_under(folder) == []


def test_out_of_descriptors_half_is_closed(folder):
    files = FileCache(100, mode="rb")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for i in range(8):
        files[folder / f"{i:02}"]
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    blocked = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            blocked.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(highest + 9))
        assert files[folder / "10"].read(1) == bytes([10])
        assert open_under(folder) == ["04", "05", "06", "07", "10"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in blocked:
            os.close(fd)
    assert files.figures()["evicted"] == 4


def test_no_descriptor_at_all_is_the_users_error():
    def refuse(path):
        raise OSError(errno.EMFILE, "none left", path)

    with pytest.raises(OSError, match="none left"):
        FileCache(4, opener=refuse)["x"]


# Forks and processes ------------------------------------------------------------------------------------------------


def test_a_child_has_its_own_position(folder):
    """And the parent's does not move."""
    files = FileCache(4, "rb", 0)
    path = folder / "numbers"
    path.write_bytes(bytes(range(100)))
    assert files[path].read(10) == bytes(range(10))

    def child():
        assert files[path].read(5) == bytes(range(5))
        assert open_under(folder) == ["numbers"]  # the parent's is closed here

    assert in_child(child) == 0
    assert files[path].tell() == 10
    assert files[path].read(2) == bytes([10, 11])
    assert files.figures()["misses"] == 2


def test_what_the_parent_has_not_written_is_written_once(folder):
    """A child that uses the cache, drops it, collects garbage and leaves in order."""
    files = FileCache(4, mode="wb")
    files[folder / "out"].write(b"once")
    pid = os.fork()
    if pid == 0:
        files[folder / "other"].write(b"child")
        del files
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (folder / "out").read_bytes() == b""
    assert (folder / "other").read_bytes() == b"child"
    files.close()
    assert (folder / "out").read_bytes() == b"once"


def _leave_in_order(files, folder):
    files[folder / "other"].write(b"child")


def test_also_when_the_child_ends_as_an_interpreter_does(folder):
    files = FileCache(4, mode="wb")
    files[folder / "out"].write(b"once")
    for work, arguments in ((_leave_in_order, (files, folder)), (gc.collect, ())):
        process = multiprocessing.get_context("fork").Process(target=work, args=arguments)
        process.start()
        process.join(20)
        assert process.exitcode == 0
        process.close()
    files.close()
    assert (folder / "out").read_bytes() == b"once"


def test_a_fork_while_another_thread_reads(folder):
    """Its handle is locked for ever in the child: to close it there would hang."""
    files = FileCache(4, mode="rb")
    os.mkfifo(folder / "slow")
    thread = threading.Thread(target=lambda: files[folder / "slow"].read(1))
    thread.start()
    slow = open(folder / "slow", "wb", buffering=0)
    call = Path(f"/proc/self/task/{thread.native_id}/syscall")
    # 0: read, with the handle's lock.
    until(lambda: call.read_text().startswith("0 "), "the thread never began to read", 10)

    def child():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # (pytest's own would never be heard)
        signal.alarm(10)
        assert files[folder / "05"].read(1) == b"\x05"
        assert open_under(folder) == ["05", "slow", "slow"]  # parked, and this test's own end
        files.close()

    assert in_child(child) == 0
    slow.write(b"x")
    thread.join(10)
    slow.close()


def test_threads_have_handles_of_their_own(folder):
    files = FileCache(2, mode="rb")
    wrong = []

    def work():
        for _ in range(50):
            for i in range(4):
                file = files[folder / f"{i:02}"]
                time.sleep(0)
                file.seek(i)
                if file.read(1) != bytes([i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    files[folder / "00"]  # a new thread's first use closes what dead threads left
    assert len(open_under(folder)) <= 2 + 1
    assert files.figures()["misses"] + files.figures()["hits"] == 801


class Bytes(Dataset):
    """Reads one byte of one of twenty files."""

    def __init__(self, folder, files):
        self.folder = str(folder)
        self.files = files

    def __len__(self):
        return 200

    def __getitem__(self, index):
        file = self.files[f"{self.folder}/{index % 20:02}"]
        assert len(open_under(self.folder)) <= 5
        file.seek(index // 20)
        return file.read(1)[0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_in_workers_and_the_trainer_knows_the_figures(method, folder):
    files = FileCache(5, mode="rb")
    files[folder / "00"].read()
    loader = DataLoader(Bytes(folder, files), batch_size=10, num_workers=2, multiprocessing_context=method)
    assert flat(loader) == [i % 20 for i in range(200)]
    figures = files.figures()
    assert figures["hits"] + figures["misses"] == 201
    assert figures["open"] == 1  # ours; the workers are gone


def test_pickled_without_handles(folder):
    files = FileCache(3, mode="rb")
    files[folder / "00"]
    again = pickle.loads(pickle.dumps(files))
    assert len(open_under(folder)) == 1
    assert again[folder / "00"].read(1) == b"\0"
    assert files.figures()["misses"] == 2
    assert files.figures()["open"] == 2


def test_open_handles_of_a_killed_process_do_not_count(folder):
    files = FileCache(3, mode="rb")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        files[folder / "00"], files[folder / "01"]
        os.write(write, b"x")
        signal.pause()
    os.read(read, 1)
    assert files.figures()["open"] == 2
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert files.figures()["open"] == 0
    assert files.figures()["misses"] == 2
    os.close(read)
    os.close(write)
