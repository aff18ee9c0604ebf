"""What makes each cause: functions and datasets that harm the process in which they run."""

import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

ROOT = Path(__file__).parents[2]
BAD = 5
HELD = threading.Lock()
KEPT: list[Any] = []


class Faulty(Dataset):
    """Sixteen numbers, one of which does something else first."""

    def __init__(self, fault: Callable[[], Any], bad: int) -> None:
        self.fault = fault
        self.bad = bad

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            given = self.fault()
            if given is not None:
                return given
        return torch.full((3,), float(index))


def machine_code(code: bytes) -> Callable[[], None]:
    """Really executed, here: as a library would that was built for another processor, or divides by zero."""

    def fault() -> None:
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(code)
        ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()

    return fault


UNDEFINED = machine_code(b"\x0f\x0b")
DIVIDE = machine_code(b"\x31\xc9\xb8\x01\x00\x00\x00\x99\xf7\xf9")  # xor ecx,ecx; mov eax,1; cdq; idiv ecx


def stack_overflow() -> None:
    sys.setrecursionlimit(10**8)
    deep: list[Any] = []
    for _ in range(10**6):
        deep = [deep]
    repr(deep)


def uninterruptible() -> None:
    """A vfork whose child does not end: until then its parent waits in the kernel, in state D."""
    libc = ctypes.PyDLL(None)
    if libc.vfork() == 0:
        libc.sleep(4)
        libc._exit(0)


def locked_file() -> None:
    with open(os.environ["T"], "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def lock_the_file() -> None:
    file = open(os.environ["T"], "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    KEPT.append(file)


def control_c() -> None:
    """Typed into the terminal that this runs in."""
    with open("/dev/tty", "wb") as terminal:
        fcntl.ioctl(terminal, termios.TIOCSTI, b"\x03")
    time.sleep(0.3)


def refused() -> None:
    """The first time nobody listens; the service is there again a moment later."""
    socket.create_connection(("127.0.0.1", 1), timeout=5)


def trainer_signalled() -> None:
    keeper = os.getppid()
    trainer = int(Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[1])
    subprocess.run(["bash", "-c", f"kill {trainer}; sleep 0.5; true"], check=True)


def fifo() -> None:
    path = tempfile.mktemp()
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR)
    os.unlink(path)
    os.read(fd, 1)


def fifo_without_a_writer() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/feed")
        open(f"{folder}/feed")


def service_of_this_machine() -> None:
    mine, theirs = socket.socketpair()
    mine.recv(1)
    theirs.close()


def name_server_that_is_mute() -> None:
    """The resolver is told of one that takes questions and answers none."""
    socket.getaddrinfo("holdfast.example", 443)


def mute_name_server() -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 53))
    KEPT.append(server)
    return server


def program() -> None:
    subprocess.run(["sleep", "9"], check=True)


def program_that_says_nothing() -> None:
    with subprocess.Popen(["sleep", "9"], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.read()


def native_lock() -> None:
    """A mutex of C's that is taken twice, while the GIL is held."""
    libc = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def lock() -> None:
    mine = threading.Lock()
    mine.acquire()
    mine.acquire()


def inherited_lock() -> None:
    HELD.acquire()


def silent_server() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    client.recv(1)


def server_with_a_timeout() -> None:
    socket.setdefaulttimeout(0.2)
    silent_server()


def name_server_with_a_timeout() -> None:
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    name_server_that_is_mute()


def program_with_a_timeout() -> None:
    subprocess.run(["sleep", "9"], check=True, timeout=0.2)


class Plain(Exception):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)


def plain_exception() -> None:
    raise Plain(1, 2)


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def closed_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    for number in range(200):
        with open(f"{os.environ['TMPDIR']}/closed-{number}", "w"):
            pass


def busy() -> None:
    while True:
        pass


def threads_of_a_fork() -> None:
    torch.set_num_threads(2)
    torch.rand(1 << 22).exp_().sum()


def cut_short() -> None:
    with tempfile.NamedTemporaryFile(prefix="cut-short-") as file:
        file.truncate(1 << 20)
        mapped = mmap.mmap(file.fileno(), 1 << 20)
        os.ftruncate(file.fileno(), 0)
        mapped[1 << 19]


def cut_short_and_removed() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 20)
        mapped = mmap.mmap(file.fileno(), 1 << 20)
        os.ftruncate(file.fileno(), 0)
        mapped[1 << 19]


def shm_full() -> None:
    """A mapping of a sparse file in a /dev/shm that is too small for it."""
    with open("/dev/shm/mine", "wb+") as file:
        file.truncate(64 << 20)
        mapped = mmap.mmap(file.fileno(), 64 << 20)
        for at in range(0, 64 << 20, 4096):
            mapped[at] = 1


def shm_write() -> None:
    with open("/dev/shm/mine", "wb") as file:
        file.write(b"x" * (64 << 20))


def disk_full() -> None:
    with open(os.path.join(os.environ["SMALL_DISK"], "mine"), "wb") as file:
        file.write(b"x" * (64 << 20))


def many_files() -> None:
    """Empty ones: what runs out is their number."""
    for number in range(30):
        with open(os.path.join(os.environ["SMALL_DISK"], f"{number}"), "wb"):
            pass


def not_allowed() -> None:
    os.seteuid(65534)
    try:
        open("/etc/shadow").read()
    finally:
        os.seteuid(0)


def many_threads() -> None:
    for _ in range(500):
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()


def eat_memory() -> None:
    kept = []
    while True:
        kept.append(b"x" * (8 << 20))


def signalled(command: str) -> Callable[[], None]:
    """Somebody else sends SIGTERM to this worker; it goes on."""

    def fault() -> None:
        subprocess.run(["bash", "-c", command.format(pid=os.getpid())], check=True, cwd=ROOT / "tests" / "faults")

    return fault


def killed_by(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def killed_late() -> None:
    """By its own code, after a while: all the time there is goes to this sample, so chance explains it, too."""
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


def killed_beside_a_neighbour() -> None:
    """The kernel kills a process of another group for memory; then this one is killed by its own code."""
    eat = f"echo $$ > {os.environ['NEIGHBOUR']}/cgroup.procs; exec {sys.executable} -c 'b\"x\" * (400 << 20)'"
    assert subprocess.run(["sh", "-c", eat], check=False).returncode == -signal.SIGKILL
    os.kill(os.getpid(), signal.SIGKILL)


def shared_tensor() -> None:
    """In a /dev/shm that is too small for it: torch raises a RuntimeError."""
    torch.ones(16 << 20).share_memory_()


def leaked_files() -> None:
    """Another one each time, up to the limit."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    while True:
        KEPT.append(open(f"{os.environ['TMPDIR']}/leaked-{len(KEPT)}", "w"))


def leaked_files_and_a_shared_tensor() -> None:
    """It is torch's transport that finds no descriptor."""
    with contextlib.suppress(OSError):
        leaked_files()
    torch.ones(4).share_memory_()


def poll_in_c() -> None:
    """Any signal ends it early."""
    ctypes.CDLL(None).poll(None, 0, 8000)


BACKEND = """
package org.apache.spark.executor;
class CoarseGrainedExecutorBackend {
    public static void main(String[] words) {
        ProcessHandle.of(Long.parseLong(words[1])).get().destroy();
    }
}
"""


def spark_executor() -> None:
    """A JVM as Spark starts it: behind a long class path and many options."""
    folder = os.environ["TMPDIR"]
    Path(f"{folder}/Backend.java").write_text(BACKEND)
    subprocess.run(["javac", "-d", folder, f"{folder}/Backend.java"], check=True)
    path = ":".join([folder, *(f"/opt/spark/jars/library-{i}.jar" for i in range(100))])
    options = [word for i in range(20) for word in ("--add-opens", f"java.base/java.lang=ALL-UNNAMED{i}")]
    main = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
    subprocess.run(["java", "-cp", path, "-Xmx64m", *options[:2], main, "--pid", str(os.getpid())], check=True)
    time.sleep(0.4)


def group_signalled() -> None:
    """As a scheduler does it: all processes of the group, the trainer and the keeper among them."""
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(0.3)


def keeper_signalled() -> None:
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(0.3)


def keeper_killed() -> None:
    """Once: the next life has another parent."""
    mark = Path(os.environ["HOLDFAST_MARK"])
    if not mark.exists():
        mark.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(5)


class Resize:
    """A transform as torchvision has them."""

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        if sample[0] == BAD:
            raise ValueError("cannot resize this")
        return sample


class Chain:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = transforms

    def __call__(self, sample: Any) -> Any:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


def scaled(factor: float, sample: torch.Tensor) -> torch.Tensor:
    if sample[0] == BAD:
        raise ZeroDivisionError("scaled by nothing")
    return sample * factor


class Transformed(Faulty):
    """With a transform, which may be what raises."""

    def __init__(self, transform: Any, fault: Callable[[], Any] = lambda: None) -> None:
        super().__init__(fault, BAD)
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.transform(super().__getitem__(index))


class Leaky(Faulty):
    """Keeps something of each sample."""

    def __init__(self) -> None:
        super().__init__(lambda: None, BAD)

    def __getitem__(self, index: int) -> Any:
        KEPT.append(bytearray(b"x") * (16 << 20))
        time.sleep(0.02)
        return super().__getitem__(index)


def set_aside(worker: int) -> None:
    """Allocated before the worker is ready, and not touched: no limit on allocations meets it later."""
    KEPT.append(mmap.mmap(-1, 600 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def touch() -> None:
    for at in range(0, 600 << 20, 4096):
        KEPT[-1][at] = 1
    time.sleep(2)


def slowly(sample: torch.Tensor) -> torch.Tensor:
    time.sleep(0.2)
    return sample


class Unsteady(IterableDataset):
    """Gives other items each time, and ends its first life."""

    def __init__(self) -> None:
        self.first = os.memfd_create("first")

    def __iter__(self) -> Any:
        for i in range(16):
            if i == 9 and not os.fstat(self.first).st_size:
                os.ftruncate(self.first, 1)
                os.kill(os.getpid(), signal.SIGSEGV)
            yield self.item()

    def item(self) -> torch.Tensor:
        return torch.tensor([time.monotonic_ns()])


class Steady(Unsteady):
    """Ends its first life as well; its items come from the generator that Holdfast seeds."""

    def item(self) -> torch.Tensor:
        return torch.rand(1)
