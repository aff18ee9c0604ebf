"""What every test is held to: it leaves no process, no descriptor, no mapping and no file behind."""

import ctypes
import faulthandler
import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
import pytest_timeout

from .interrupt import free_locks, taken

ROOT = Path(__file__).parent
METHODS = ["fork", "spawn", "forkserver"]
# Has this process write its stacks; Holdfast's own signal for that is another one.
STACKS_SIGNAL = signal.SIGRTMIN + 16


class Watchdog:
    """A test that has run for twice its timeout ends the run: see watchdog.py."""

    def __init__(self) -> None:
        number, name = tempfile.mkstemp(prefix="holdfast-tests-")
        os.close(number)
        self._file = Path(name)
        self._stderr = os.dup(2)  # pytest puts a file in its place while a test runs
        faulthandler.register(STACKS_SIGNAL, self._stderr, all_threads=True)
        # By way of a shell that ends: it is no child of ours then, which tests would count.
        script = 'exec 0</dev/null 1>&2; "$@" &'
        command = [sys.executable, str(ROOT / "watchdog.py"), str(os.getpid()), name, str(int(STACKS_SIGNAL))]
        subprocess.run(["setsid", "sh", "-c", script, "sh", *command], check=True)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        limit_s = pytest_timeout._get_item_settings(item).timeout
        until = time.monotonic() + 2 * limit_s if limit_s else 0
        self._file.write_text(f"{until} {item.nodeid}")
        try:
            return (yield)
        finally:
            self._file.write_text("0")

    def pytest_unconfigure(self) -> None:
        faulthandler.unregister(STACKS_SIGNAL)
        os.close(self._stderr)
        self._file.unlink(missing_ok=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Watchdog(), "watchdog")


def children() -> set[int]:
    """Living descendants of this process, zombies included."""
    found: set[int] = set()
    todo = [os.getpid()]
    while todo:
        pid = todo.pop()
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                    found.add(int(child))
                    todo.append(int(child))
        except OSError:
            continue
    return {pid for pid in found if not _is_trackers(pid)}


def _is_trackers(pid: int) -> bool:
    """multiprocessing's own resource tracker and fork server live as long as the interpreter."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"resource_tracker" in command or b"forkserver" in command


def descriptors() -> dict[int, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        # (/dev/shm: multiprocessing's heap and torch's shared tensors, both cached by them and never made by us;
        # /dev/nvidia: CUDA's, for the interpreter's life)
        if not target.startswith(("/proc/", "/dev/urandom", "/dev/shm/pym-", "/dev/shm/torch_", "/dev/nvidia")):
            found[int(fd)] = target
    return found


def shm_files() -> set[str]:
    """But for the semaphores of other programs on this machine."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:holdfast")


@contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """This process can open so many more, and no others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    top = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    fillers = [os.open("/dev/null", os.O_RDONLY)]
    while fillers[-1] < top:
        fillers.append(os.open("/dev/null", os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1 + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)


def until(what: Callable[[], object], sentence: str, seconds: float = 20.0) -> None:
    """Wait until it is true. `sentence` says what is wrong if it is not true in time."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, sentence
        time.sleep(0.005)


def lay(root: Path, files: dict[str, str]) -> Path:
    """A machine as a tree of files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run folder of this test: HOLDFAST_RUN_DIR names it, and the first loader makes it."""
    monkeypatch.setenv("HOLDFAST_RUN_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture(autouse=True, scope="session")
def multiprocessings_own() -> None:
    """Its resource tracker and fork server stay for the interpreter's life: start them before anything is counted.

    Whoever starts the tests in the background has Ctrl-C ignored, and children would inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    forkserver.set_forkserver_preload(["__main__", "holdfast.loader.loader_job"])
    resource_tracker.ensure_running()
    forkserver.ensure_running()


@pytest.fixture(autouse=True, scope="session")
def what_is_freed_is_gone() -> None:
    """Memory of 128 KiB or more goes back to the kernel when it is freed, instead of being kept for later.

    Otherwise how much a forked worker grows, and when it meets its limit, would depend on all the tests before.
    """
    mmap_threshold = -3  # M_MMAP_THRESHOLD of glibc; once set, it stays
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(mmap_threshold, 128 << 10)


@pytest.fixture(autouse=True)
def logging_goes_on() -> Iterator[None]:
    """A signal handler of a test that raises inside logging leaves no lock taken, for a later test would hang."""
    before = taken()
    yield
    free_locks(before, True, "in this test")


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compares children, descriptors, mappings and /dev/shm before and after, and names what leaked."""
    if (
        "process" not in request.path.parts
        and "faults" not in request.path.parts
        and "parity" not in request.path.parts
    ):
        yield
        return
    gc.collect()
    before = (children(), descriptors(), mappings(), shm_files())
    yield
    deadline = time.monotonic() + 5
    while True:
        gc.collect()
        left = children() - before[0]
        open_now = descriptors()
        new = {fd: name for fd, name in open_now.items() if before[1].get(fd) != name}
        mapped = mappings() - before[2]
        files = shm_files() - before[3]
        grown = new if len(open_now) > len(before[1]) else {}
        if not (left or grown or mapped > 0 or files) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not left, f"processes left: {left}"
    assert not grown, f"descriptors left: {grown}"
    assert mapped <= 0, f"{mapped} mappings left"
    assert not files, f"files left in /dev/shm: {files}"
