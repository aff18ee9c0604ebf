"""Every cause that can be made here, on real processes, and the finding that must be named for it.

As a command it prints what was made against what was named, as a list and as a confusion matrix, and exits with 1 when
anything lies off its diagonal: python -m tests.faults.causes [words of a cause's name ...]
"""

import contextlib
import ctypes
import fcntl
import functools
import importlib.util
import json
import mmap
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from holdfast import DataLoader, Policy
from holdfast.diagnose.finding import TRAINER
from holdfast.local.keeper import worker_life
from holdfast.system import snapshot
from holdfast.system.signals import can_note
from holdfast.testing.faults import FAULTS

from . import peers

ROOT = Path(__file__).parents[2]
BAD = 5
HELD = threading.Lock()
KEPT: list[Any] = []
# Not ours, nor in our environment: `make causes` has them in a folder of their own.
LIBRARIES = ("h5py", "cv2", "grpc")
# Words that only the compiled handler lets us say.
BY_THE_HANDLER = ("bash", "java", "Ctrl-C", "holds the GIL", "bytes now")


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


# Faults ---------------------------------------------------------------------------------------------------------------


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
            yield torch.tensor([time.monotonic_ns()])


# The table ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cause:
    """`within`: commands that make the surroundings, around the interpreter that runs it."""

    name: str
    finding: str
    fault: Callable[[], Any]
    words: tuple[str, ...] = ()
    policy: dict[str, Any] = field(default_factory=dict)
    within: str = ""
    before: Callable[[], Any] | None = None
    index: int = BAD
    batch_size: int | None = 4
    dataset: Callable[[], Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    which: int = 0
    """The how-maniest incident it is."""
    pause_s: float = 0.0
    """What the trainer does with a batch takes that long."""
    confidence: str = ""
    needs: str = ""
    """A program, a library (see LIBRARIES), "py-spy", "cuda" or "root"."""


SPEED = ("too-many-workers", "loader-slow", "trainer-slow")
SLOW = {"sample_timeout": 0.6, "bad_sample": "skip"}
SMALL_SHM = "unshare -m bash -c 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec {run}'"
SMALL_DISK = "unshare -m bash -c 'mount -t tmpfs -o size=8m tmpfs /mnt && SMALL_DISK=/mnt exec {run}'"
QUIET_NAMES = (
    "unshare -mn bash -c 'ip link set lo up; echo nameserver 127.0.0.1 > $T; mount --bind $T /etc/resolv.conf && exec "
    "{run}'"
)
QUOTA = (
    "unshare -m bash -c 'truncate -s 128M $T && mkfs.btrfs -q --mixed $T && mount -o loop $T /mnt && "
    "btrfs quota enable /mnt && btrfs subvolume create /mnt/mine && btrfs quota rescan -w /mnt && sync && "
    "btrfs qgroup limit 1M /mnt/mine && SMALL_DISK=/mnt/mine exec {run}'"
)
MARK = "bash -c 'HOLDFAST_MARK=$T exec {run}'"
GROUP = (
    "bash -c 'g=/sys/fs/cgroup/{kind}/holdfast-$$; mkdir $g; echo {limit} > $g/{file}; "
    "(echo $BASHPID > $g/cgroup.procs; exec {run}); s=$?; for i in 1 2 3 4 5 6 7 8 9; do rmdir $g && break; sleep 0.2; "
    "done; exit $s'"
)
JVM = "java Terminate.java {pid} && sleep 0.4"

CAUSES = [
    Cause(
        "kernel, cgroup out of memory",
        "worker-oom-killed",
        eat_memory,
        ("oom_kill", "limit"),
        {"bad_sample": "skip"},
        GROUP.replace("{kind}", "memory").replace("{limit}", "1500M").replace("{file}", "memory.limit_in_bytes"),
    ),
    Cause(
        "allocation past worker_memory", "allocation-refused", eat_memory, ("worker_memory",), {"worker_memory": "1GiB"}
    ),
    Cause(
        "allocation past RLIMIT_AS",
        "address-space-limited",
        eat_memory,
        ("RLIMIT_AS",),
        before=lambda: resource.setrlimit(resource.RLIMIT_AS, (12 << 30, resource.RLIM_INFINITY)),
    ),
    Cause("absurd allocation", "allocation-refused", FAULTS["out-of-memory"], ("MemoryError",)),
    Cause("SIGKILL from outside", "worker-killed", signalled("kill -9 {pid}"), ("not the kernel for memory",)),
    Cause("SIGKILL of its own", "worker-killed", killed_by(signal.SIGKILL), ("not the kernel for memory",)),
    *(
        Cause(
            f"SIG{name} by a shell",
            "worker-signalled",
            signalled(f"kill -{name} {{pid}}; sleep 0.3; true"),
            (f"SIG{name}", "bash -c kill"),
        )
        for name in ("INT", "HUP", "USR1")
    ),
    Cause(
        "Ctrl-C in the terminal",
        "interrupted",
        control_c,
        ("Ctrl-C",),
        within="script -qec '{run}' /dev/null",
        before=lambda: signal.signal(signal.SIGINT, lambda number, frame: None),
        needs="script",
    ),
    Cause(
        "SIGTERM to the trainer",
        "trainer-signalled",
        trainer_signalled,
        ("bash -c kill", "the trainer was sent SIGTERM"),
        within="bash -c 'HOLDFAST_RUN_DIR=$T exec {under_run}'",
        before=lambda: signal.signal(signal.SIGTERM, lambda number, frame: None),
        which=-1,
    ),
    Cause("SIGTERM by a shell", "worker-signalled", signalled("kill {pid}; sleep 0.3; true"), ("bash -c kill",)),
    Cause("SIGTERM by a JVM", "terminated-by-scheduler", signalled(JVM), ("java", "JVM"), {"sample_timeout": 60}),
    Cause("segmentation fault", "worker-segfault", FAULTS["segfault"], ("SIGSEGV",)),
    Cause("stack overflow", "worker-segfault", stack_overflow, ("SIGSEGV", "in stack_overflow"), needs="python3.11"),
    Cause("abort", "worker-aborted", FAULTS["abort"], ("SIGABRT",)),
    Cause(
        "SIGSEGV by a shell",
        "worker-terminated",
        signalled("kill -SEGV {pid}; sleep 0.3; true"),
        ("from outside", "bash"),
    ),
    Cause(
        "SIGTERM to the group",
        "worker-signalled",
        group_signalled,
        ("SIGTERM",),
        before=lambda: signal.signal(signal.SIGTERM, lambda number, frame: None),
    ),
    Cause("SIGTERM to the keeper", "worker-signalled", keeper_signalled, ("the keeper was sent SIGTERM",)),
    Cause("SIGKILL to the keeper", "keeper-lost", keeper_killed, within=MARK),
    Cause("sample that is killed each time", "poison-sample", killed_by(signal.SIGKILL), ("for chance",), which=-1),
    Cause(
        "mapped file cut short",
        "worker-bus-error",
        cut_short,
        ("SIGBUS", "cut short", "/cut-short-", "0 bytes now"),
        confidence="certain",
    ),
    Cause(
        "mapped file cut short and removed", "worker-bus-error", cut_short_and_removed, ("SIGBUS",), confidence="likely"
    ),
    Cause("mapping in a full /dev/shm", "worker-bus-error", shm_full, ("/dev/shm is full",), within=SMALL_SHM),
    Cause("illegal instruction", "worker-illegal-instruction", UNDEFINED, ("SIGILL",), needs="x86_64"),
    Cause("division by zero in C", "worker-arithmetic-fault", DIVIDE, ("SIGFPE",), needs="x86_64"),
    Cause("sys.exit", "sample-raised", FAULTS["sys-exit"], ("SystemExit",)),
    Cause("os._exit", "worker-exited", FAULTS["os-exit"], ("exit code 5",)),
    Cause("another fatal signal", "worker-terminated", killed_by(signal.SIGALRM), ("SIGALRM",)),
    Cause("stopped", "worker-stopped", FAULTS["sigstop"], ("SIGSTOP",), SLOW),
    Cause("sleeps", "sample-hung", FAULTS["hang"], ("time.sleep",), SLOW),
    Cause("reads a FIFO", "hang-io", fifo, ("read", "os.read(fd, 1)"), SLOW),
    Cause(
        "silent, without a deadline",
        "worker-silent",
        lambda: time.sleep(3),
        ("said nothing", "time.sleep(3)"),
        before=lambda: setattr(worker_life, "SILENT_S", 0.8),
    ),
    Cause("in the kernel's own wait", "hang-uninterruptible", uninterruptible, ("state D",), SLOW),
    Cause("waits for a file lock", "hang-io", locked_file, ("flock", "/file"), SLOW, before=lock_the_file),
    Cause("opens a FIFO that nobody writes", "hang-io", fifo_without_a_writer, ("openat", "feed"), SLOW),
    Cause("waits for a service of this machine", "hang-io", service_of_this_machine, ("unix socket",), SLOW),
    Cause("waits for a program's end", "hang-child", program, ("sleep 9",), SLOW, confidence="certain"),
    Cause("waits for a program's words", "hang-child", program_that_says_nothing, ("sleep 9", "pipe"), SLOW),
    Cause(
        "waits for a name server",
        "hang-network",
        name_server_that_is_mute,
        ("DNS", "poll"),
        SLOW,
        QUIET_NAMES,
        before=mute_name_server,
    ),
    Cause(
        "sleeps in C with the GIL",
        "hang-native",
        FAULTS["hang-holding-gil"],
        ("holds the GIL", "libc.sleep"),
        SLOW,
        confidence="certain",
    ),
    Cause(
        "waits for a lock of C's", "hang-native", native_lock, ("holds the GIL", "futex"), SLOW, confidence="certain"
    ),
    Cause(
        "sleeps in C, seen by py-spy",
        "hang-native",
        FAULTS["hang-holding-gil"],
        ("py-spy", "ffi_call"),
        SLOW,
        needs="py-spy",
    ),
    Cause(
        "OpenMP of a fork, seen by py-spy",
        "fork-after-threads",
        threads_of_a_fork,
        ("OpenMP waits", "libgomp"),
        SLOW,
        before=threads_of_a_fork,
        index=0,
        confidence="likely",
        needs="py-spy",
    ),
    Cause("waits for its own lock", "hang-lock", lock, ("futex", "mine.acquire()"), SLOW),
    Cause("waits for a server", "hang-network", silent_server, ("socket", "client.recv"), SLOW),
    Cause("computes for ever", "hang-native", busy, ("processor",), SLOW),
    Cause(
        "lock held at the fork",
        "hang-inherited-lock",
        inherited_lock,
        ("threads",),
        SLOW,
        before=lambda: (HELD.acquire(), threading.Thread(target=time.sleep, args=(9,), daemon=True).start()),
        index=0,
    ),
    Cause(
        "threads that a fork does not copy",
        "fork-after-threads",
        threads_of_a_fork,
        ("threads", "spawn"),
        SLOW,
        before=threads_of_a_fork,
        index=0,
    ),
    Cause(
        "OpenCV that ends threads which a fork did not copy",
        "fork-after-threads",
        peers.opencv_told_to_have_one_thread,
        ("threads", "spawn"),
        SLOW,
        before=peers.opencv_in_the_trainer,
        index=0,
        needs="cv2",
    ),
    Cause(
        "gRPC channel made before the fork",
        "fork-after-threads",
        peers.grpc_call,
        ("gRPC waits", "make the channel in the worker"),
        SLOW,
        "GRPC_ENABLE_FORK_SUPPORT=0 exec {run}",
        before=peers.grpc_call,
        index=0,
        confidence="likely",
        needs="grpc",
    ),
    Cause(
        "gRPC server that does not answer",
        "hang-network",
        peers.grpc_of_a_mute_server,
        ("socket", "grpc"),
        SLOW,
        "GRPC_ENABLE_FORK_SUPPORT=0 exec {run}",
        needs="grpc",
    ),
    Cause("exception", "sample-raised", FAULTS["raise"], ("injected",)),
    Cause(
        "exception in a transform",
        "transform-raised",
        lambda: None,
        ("Chain > Resize", "cannot resize"),
        dataset=lambda: Transformed(Chain(torch.abs, Resize())),
    ),
    Cause(
        "exception in a transform that is a function",
        "transform-raised",
        lambda: None,
        ("(scaled)", "scaled by nothing"),
        dataset=lambda: Transformed(functools.partial(scaled, 2.0)),
    ),
    Cause(
        "exception before the transform",
        "sample-raised",
        lambda: None,
        ("injected",),
        dataset=lambda: Transformed(Resize(), FAULTS["raise"]),
    ),
    Cause(
        "exception in collate_fn",
        "collate-raised",
        lambda: None,
        ("injected",),
        arguments={"collate_fn": lambda samples: FAULTS["raise"]()},
    ),
    Cause(
        "exception in worker_init_fn",
        "worker-init-raised",
        lambda: None,
        ("injected",),
        arguments={"worker_init_fn": lambda worker: FAULTS["raise"]()},
    ),
    Cause("StopIteration in __getitem__", "sample-raised", FAULTS["stop-iteration"], ("StopIteration",)),
    Cause("KeyboardInterrupt in __getitem__", "sample-raised", FAULTS["keyboard-interrupt"], ("KeyboardInterrupt",)),
    Cause("exception that cannot be pickled", "exception-not-picklable", FAULTS["raise-unpicklable"], ("injected",)),
    Cause(
        "value that cannot be pickled",
        "value-not-picklable",
        lambda: {"a": [1, (x for x in ())]},
        ("['a'][1]", "generator"),
        batch_size=None,
    ),
    Cause(
        "other items when replayed", "stream-diverged", lambda: None, ("not reproducible",), dataset=Unsteady, which=-1
    ),
    Cause("other shape", "samples-differ", lambda: torch.ones(4), (f"index {BAD}", "(4,)", "(3,)")),
    Cause("no such file", "file-missing", lambda: open("/no/such/file"), ("/no/such/file",)),
    Cause("not allowed", "permission-denied", not_allowed, ("/etc/shadow",)),
    Cause("stale file handle", "stale-file", peers.stale_handle, ("/file",), needs="root"),
    Cause("full disk", "disk-full", disk_full, ("/mnt: 0 of 8",), within=SMALL_DISK),
    Cause("quota of keys used up", "quota-exceeded", peers.quota_of_keys, ("uid",), needs="root"),
    Cause(
        "quota of a disk used up",
        "quota-exceeded",
        peers.quota_of_a_disk,
        ("uid",),
        within=QUOTA,
        needs="mkfs.btrfs",
    ),
    Cause(
        "zip file opened before the fork",
        "handle-shared-by-fork",
        lambda: None,
        (".zip", "at byte"),
        dataset=peers.Zipped,
        batch_size=64,
        arguments={"num_workers": 2},
    ),
    Cause(
        "HDF5 file opened before the fork",
        "handle-shared-by-fork",
        lambda: None,
        (".h5", "at byte"),
        dataset=peers.Hdf5,
        batch_size=64,
        arguments={"num_workers": 2},
        needs="h5py",
    ),
    Cause("full /dev/shm", "shm-too-small", shm_write, ("/dev/shm: 0 of 16",), within=SMALL_SHM),
    Cause("descriptors", "descriptors-exhausted", FAULTS["out-of-descriptors"], ("/dev/null", "limit is 64")),
    Cause(
        "threads past the limit",
        "cannot-start-process",
        many_threads,
        ("pids.max 60",),
        within=GROUP.replace("{kind}", "pids").replace("{limit}", "60").replace("{file}", "pids.max"),
    ),
    Cause("CUDA in a fork", "cuda-in-forked-worker", peers.cuda, ("re-initialize",), before=peers.cuda, needs="cuda"),
    Cause(
        "service that refuses at first",
        "sample-retried",
        refused,
        ("ConnectionRefused",),
        {"retries": 2, "retry_delay": 0.01},
    ),
    Cause(
        "flaky service", "sample-retried", FAULTS["raise-os-error"], ("attempt 2",), {"retries": 3, "retry_delay": 0.01}
    ),
    Cause(
        "leak",
        "worker-leak",
        lambda: None,
        ("MiB", "samples"),
        {"worker_memory": "200MiB"},
        dataset=Leaky,
    ),
    Cause(
        "memory that is touched past worker_memory",
        "worker-over-memory",
        touch,
        ("killed", "MiB"),
        {"worker_memory": "128MiB", "bad_sample": "skip"},
        arguments={"worker_init_fn": set_aside},
    ),
    Cause(
        "more workers than processors",
        "too-many-workers",
        lambda: None,
        ("processors",),
        arguments={"num_workers": len(os.sched_getaffinity(0)) + 1},
        which=-1,
    ),
    Cause(
        "samples that take long",
        "loader-slow",
        lambda: None,
        ("waits for batches",),
        dataset=lambda: Transformed(slowly),
        which=-1,
    ),
    Cause(
        "training that takes long", "trainer-slow", lambda: None, ("fast enough",), pause_s=0.8, batch_size=1, which=-1
    ),
]


def observe(cause: Cause) -> list[dict[str, Any]]:
    """Make it, in this process: the incidents of an epoch, in their order."""
    if cause.before is not None:
        cause.before()
    fault = cause.fault
    if cause.finding == "sample-retried":
        calls: list[int] = []

        def fault() -> Any:
            calls.append(1)
            return cause.fault() if len(calls) == 1 else None

    dataset = Faulty(fault, cause.index) if cause.dataset is None else cause.dataset()
    policy = Policy(**cause.policy)
    arguments = {"num_workers": 1, "batch_size": cause.batch_size, **cause.arguments}
    loader = DataLoader(dataset, policy=policy, **arguments)
    iterator = iter(loader)
    for _ in range(20):
        with contextlib.suppress(Exception):
            if next(iterator, None) is None:
                break
            time.sleep(cause.pause_s)
    iterator._shutdown_workers()
    report = json.loads(loader.report().to_json())
    incidents = report["incidents"]
    if cause.finding in SPEED:
        return [{"finding": one["name"], **one} for one in report["speed"]]
    return incidents + told_by_the_witness() if cause.finding == "trainer-signalled" else incidents


def told_by_the_witness() -> list[dict[str, Any]]:
    """What `holdfast run` keeps of the trainer itself."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        kept = [json.loads(line) for path in Path(os.environ["T"]).glob("*.jsonl") for line in open(path)]
        if mine := [incident for incident in kept if incident["worker"] == TRAINER]:
            return mine
        time.sleep(0.05)
    return []


def missing(cause: Cause) -> str:
    """Why it cannot be made here; "" when it can."""
    if "java" in repr(cause.words) and shutil.which("java") is None:
        return "no JVM here"
    if cause.needs == "py-spy":
        return "" if snapshot.find() is not None else "py-spy is not installed"
    if cause.needs == "python3.11":
        return "" if sys.version_info[:2] == (3, 11) else "this Python guards its C stack"
    if cause.needs == "x86_64":
        return "" if platform.machine() == cause.needs else "machine code of another processor"
    if cause.needs in LIBRARIES:
        return "" if importlib.util.find_spec(cause.needs) is not None else f"{cause.needs} is not installed"
    if cause.needs == "cuda":
        return "" if torch.cuda.is_available() else "no CUDA device"
    if cause.needs == "root":
        return "" if os.getuid() == 0 else "needs root"
    if cause.needs and shutil.which(cause.needs) is None:
        return f"there is no program {cause.needs}"
    if not can_note() and any(noted in " ".join(cause.words) for noted in BY_THE_HANDLER):
        return "built without a compiler"
    rooted = any(word in cause.within for word in ("unshare", "cgroup", "script"))
    if (rooted or cause.finding == "permission-denied") and os.getuid() != 0:
        return "needs root"
    if "/sys/fs/cgroup/" in cause.within and not os.path.isdir("/sys/fs/cgroup/memory"):
        return "no cgroup version 1 here"
    return ""


def named(cause: Cause) -> tuple[str, str]:
    """(finding, all that was said) of the incident it is about; made in an interpreter of its own."""
    run = f"{sys.executable} -m tests.faults.causes --one {CAUSES.index(cause)}"
    under_run = run.replace(" -m ", " -m holdfast run -m ", 1)
    command = cause.within.replace("{run}", run).replace("{under_run}", under_run) if cause.within else run
    # Into files: a program that a hung worker had started would keep a pipe open.
    with (
        tempfile.TemporaryDirectory() as folder,
        open(f"{folder}/out", "w+") as out,
        open(f"{folder}/err", "w+") as err,
    ):
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            stdout=out,
            stderr=err,
            start_new_session=True,
            # What a worker that dies here had made in its temporary folder goes with ours.
            env={**os.environ, "T": f"{folder}/file", "TMPDIR": folder},
        )
        try:
            process.wait(timeout=90)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said, complaints = (Path(file.name).read_text(errors="replace") for file in (out, err))
    line = said.strip().splitlines()[-1] if said.strip() else ""
    if not line.startswith("["):
        return f"no report (status {process.returncode})", said + complaints
    incidents = json.loads(line)
    try:
        told = incidents[cause.which]
    except IndexError:
        return "nothing", f"{len(incidents)} incidents"
    told.pop("evidence", None)  # what was said counts, not what was seen
    return told["finding"], json.dumps(told, indent=1, ensure_ascii=False)


def alone(cause: Cause) -> bool:
    """Others must not run meanwhile: it is about the machine's counters, its limits, or who waits for whom."""
    about_time = cause.finding in (*SPEED, "hang-native")
    return about_time or "cgroup" in cause.within


def all_named(causes: list[Cause]) -> Iterator[tuple[Cause, str, str]]:
    """(cause, finding, all that was said) of each, in their order. Most of the time they wait: so two at once."""
    with ThreadPoolExecutor(2) as two:
        running = {cause.name: two.submit(named, cause) for cause in causes if not alone(cause)}
        for cause in causes:
            if cause.name in running:
                yield cause, *running[cause.name].result()
    for cause in causes:
        if alone(cause):
            yield cause, *named(cause)


def wrong_about(cause: Cause, finding: str, said: str) -> str:
    """What is not as it should be; "" when all is."""
    if finding != cause.finding:
        return f"should be {cause.finding}"
    absent = [word for word in cause.words if word not in said]
    if absent:
        return f"does not say {', '.join(absent)}"
    if cause.confidence and json.loads(said)["confidence"] != cause.confidence:
        return f"is {json.loads(said)['confidence']}, should be {cause.confidence}"
    return ""


def matrix(pairs: list[tuple[str, str]]) -> list[str]:
    """Rows: what was made; columns, numbered as the rows: what was named. A dot is none; only the diagonal is right."""
    names = sorted({name for pair in pairs for name in pair})
    counts = Counter(pairs)
    width = max(map(len, names), default=0)
    lines = [f"{'':{width + 4}}" + "".join(f"{number:3d}" for number in range(1, len(names) + 1))]
    for number, made in enumerate(names, 1):
        cells = "".join(f"{counts[made, told] or '.':>3}" for told in names)
        lines.append(f"{number:3d} {made:{width}}{cells}")
    return lines


def main(wanted: list[str]) -> int:
    pairs: list[tuple[str, str]] = []
    wrong = skipped = 0
    chosen = [cause for cause in CAUSES if not wanted or any(word in cause.name for word in wanted)]
    for cause in chosen:
        if why := missing(cause):
            skipped += 1
            print(f"{cause.name:44s} not made: {why}", flush=True)
    for cause, finding, said in all_named([cause for cause in chosen if not missing(cause)]):
        trouble = wrong_about(cause, finding, said)
        pairs.append((cause.finding, finding))
        wrong += bool(trouble)
        print(f"{cause.name:44s} {finding:28s} {trouble and 'WRONG: ' + trouble}".rstrip(), flush=True)
        if trouble:
            print(said)
    off = sum(made != told for made, told in pairs)
    print("\nMade (rows) against named (columns)\n" + "\n".join(matrix(pairs)))
    print(f"\n{len(pairs)} causes: {off} off the diagonal, {wrong - off} with the wrong words, {skipped} not made here")
    return int(wrong > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print("\n" + json.dumps(observe(CAUSES[int(sys.argv[2])])))
        sys.stdout.flush()
        os._exit(0)
    sys.exit(main(sys.argv[1:]))
