"""Every cause that can be made here, on real processes, and the finding that must be named for it.

As a command it prints the table of what was made against what was named: python -m tests.faults.causes
"""

import contextlib
import errno
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from holdfast import DataLoader, Policy
from holdfast.testing.faults import FAULTS

ROOT = Path(__file__).parents[2]
BAD = 5
HELD = threading.Lock()


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


def fifo() -> None:
    path = tempfile.mktemp()
    os.mkfifo(path)
    threading.Timer(20, os.unlink, [path])
    fd = os.open(path, os.O_RDWR)
    os.unlink(path)
    os.read(fd, 1)


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


def raiser(error: BaseException) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


def signalled(command: str) -> Callable[[], None]:
    """Somebody else sends SIGTERM to this worker; it goes on."""

    def fault() -> None:
        subprocess.run(["bash", "-c", command.format(pid=os.getpid())], check=True, cwd=ROOT / "tests" / "faults")

    return fault


def killed_by(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


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


SLOW = {"sample_timeout": 0.6, "bad_sample": "skip"}
SMALL_SHM = "unshare -m bash -c 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec {run}'"
SMALL_DISK = "unshare -m bash -c 'mount -t tmpfs -o size=8m tmpfs /mnt && SMALL_DISK=/mnt exec {run}'"
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
    Cause("SIGKILL from outside", "worker-killed", killed_by(signal.SIGKILL), ("not the kernel for memory",)),
    Cause("SIGTERM by a shell", "worker-signalled", signalled("kill {pid}; sleep 0.3; true"), ("bash -c kill",)),
    Cause("SIGTERM by a JVM", "terminated-by-scheduler", signalled(JVM), ("java", "JVM"), {"sample_timeout": 60}),
    Cause("segmentation fault", "worker-segfault", FAULTS["segfault"], ("SIGSEGV",)),
    Cause("abort", "worker-aborted", FAULTS["abort"], ("SIGABRT",)),
    Cause("mapped file cut short", "worker-bus-error", cut_short, ("SIGBUS", "cut short")),
    Cause("mapping in a full /dev/shm", "worker-bus-error", shm_full, ("/dev/shm is full",), within=SMALL_SHM),
    Cause("illegal instruction", "worker-illegal-instruction", killed_by(signal.SIGILL), ("SIGILL",)),
    Cause("division by zero in C", "worker-arithmetic-fault", killed_by(signal.SIGFPE), ("SIGFPE",)),
    Cause("os._exit", "worker-exited", FAULTS["os-exit"], ("exit code 5",)),
    Cause("another fatal signal", "worker-terminated", killed_by(signal.SIGALRM), ("SIGALRM",)),
    Cause("stopped", "worker-stopped", FAULTS["sigstop"], ("SIGSTOP",), SLOW),
    Cause("sleeps", "sample-hung", FAULTS["hang"], ("time.sleep",), SLOW),
    Cause("reads a FIFO", "hang-io", fifo, ("read", "os.read(fd, 1)"), SLOW),
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
    Cause("exception", "sample-raised", FAULTS["raise"], ("injected",)),
    Cause("exception that cannot be pickled", "exception-not-picklable", FAULTS["raise-unpicklable"], ("injected",)),
    Cause(
        "value that cannot be pickled",
        "value-not-picklable",
        lambda: {"a": [1, (x for x in ())]},
        ("['a'][1]", "generator"),
        batch_size=None,
    ),
    Cause("other items when replayed", "stream-diverged", lambda: None, ("not reproducible",), dataset=Unsteady),
    Cause("other shape", "samples-differ", lambda: torch.ones(4), (f"index {BAD}", "(4,)", "(3,)")),
    Cause("no such file", "file-missing", lambda: open("/no/such/file"), ("/no/such/file",)),
    Cause("not allowed", "permission-denied", not_allowed, ("/etc/shadow",)),
    Cause(
        "stale file handle", "stale-file", raiser(OSError(errno.ESTALE, "Stale file handle", "/data/x")), ("/data/x",)
    ),
    Cause("full disk", "disk-full", disk_full, ("/mnt: 0 of 8",), within=SMALL_DISK),
    Cause("full /dev/shm", "shm-too-small", shm_write, ("/dev/shm: 0 of 16",), within=SMALL_SHM),
    Cause("descriptors", "descriptors-exhausted", FAULTS["out-of-descriptors"], ("/dev/null", "limit is 64")),
    Cause(
        "threads past the limit",
        "cannot-start-process",
        many_threads,
        ("pids.max 60",),
        within=GROUP.replace("{kind}", "pids").replace("{limit}", "60").replace("{file}", "pids.max"),
    ),
    Cause(
        "CUDA in a fork",
        "cuda-in-forked-worker",
        raiser(RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ...")),
    ),
    Cause(
        "flaky service", "sample-retried", FAULTS["raise-os-error"], ("attempt 2",), {"retries": 3, "retry_delay": 0.01}
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
    loader = DataLoader(dataset, batch_size=cause.batch_size, num_workers=1, policy=Policy(**cause.policy))
    iterator = iter(loader)
    for _ in range(20):
        with contextlib.suppress(Exception):
            if next(iterator, None) is None:
                break
    iterator._shutdown_workers()
    return json.loads(loader.report().to_json())["incidents"]


def named(cause: Cause) -> tuple[str, str]:
    """(finding, all that was said) of the first incident; in an interpreter of its own.

    A stream that is replayed dies first: there it is the last one.
    """
    run = f"{sys.executable} -m tests.faults.causes --one {CAUSES.index(cause)}"
    command = cause.within.replace("{run}", run) if cause.within else run
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        start_new_session=True,
        check=False,
    )
    line = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    if not line.startswith("["):
        return f"no report (status {done.returncode})", done.stdout + done.stderr
    incidents = json.loads(line)
    told = incidents[-1] if cause.dataset is not None else incidents[0] if incidents else {"finding": "nothing"}
    return told["finding"], json.dumps(told, indent=1, ensure_ascii=False)


def main(wanted: list[str]) -> int:
    made = wrong = 0
    for cause in CAUSES:
        if wanted and not any(word in cause.name for word in wanted):
            continue
        made += 1
        finding, said = named(cause)
        right = finding == cause.finding and all(word in said for word in cause.words)
        wrong += not right
        print(f"{cause.name:36s} {finding:28s} {'' if right else 'WRONG, should be ' + cause.finding}", flush=True)
        if not right:
            print(said)
    print(f"{made} causes, {wrong} named wrongly")
    return int(wrong > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print("\n" + json.dumps(observe(CAUSES[int(sys.argv[2])])))
        sys.stdout.flush()
        os._exit(0)
    sys.exit(main(sys.argv[1:]))
