"""The table of causes: what is done, and the finding that must be named for it."""

import functools
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.local.keeper import worker_life
from holdfast.testing.faults import FAULTS

from . import harm, peers

# Not ours, nor in our environment: `make causes` has them in a folder of their own.
LIBRARIES = ("h5py", "cv2", "grpc")
# Words that only the compiled handler lets us say.
BY_THE_HANDLER = ("bash", "java", "Ctrl-C", "holds the GIL", "bytes now")


@dataclass(frozen=True)
class Heeded:
    """What an advice says, done on the cause that it was given for. `advice`: its words. Then no batch is lost; `gone`:
    then the finding is not named any more. The rest stands in the place of the cause's own.
    """

    advice: str
    gone: bool = False
    fault: Callable[[], Any] | None = None
    dataset: Callable[[], Any] | None = None
    policy: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


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
    index: int = harm.BAD
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
    heeded: Heeded | None = None


SKIP = Heeded('Policy(bad_sample="skip") goes on without', policy={"bad_sample": "skip"})
SPAWN = Heeded('multiprocessing_context="spawn"', gone=True, arguments={"multiprocessing_context": "spawn"})
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
NEIGHBOUR = (
    "bash -c 'g=/sys/fs/cgroup/memory/holdfast-$$; mkdir $g; echo 100M > $g/memory.limit_in_bytes; {inner}; s=$?; "
    "for i in 1 2 3 4 5 6 7 8 9; do rmdir $g && break; sleep 0.2; done; exit $s'"
)
NO_COUNTERS = (
    'g=$g unshare -m bash -c "mkdir $T.d && mount --bind $g $T.d && mount -t tmpfs none /sys/fs/cgroup && '
    'NEIGHBOUR=$T.d exec {run}"'
)
JVM = "java Terminate.java {pid} && sleep 0.4"

CAUSES = [
    Cause(
        "kernel, cgroup out of memory",
        "worker-oom-killed",
        harm.eat_memory,
        ("oom_kill", "limit"),
        {"bad_sample": "skip"},
        GROUP.replace("{kind}", "memory").replace("{limit}", "1500M").replace("{file}", "memory.limit_in_bytes"),
        heeded=Heeded('Policy(worker_memory="750MiB") names the line', gone=True, policy={"worker_memory": "750MiB"}),
    ),
    Cause(
        "allocation past worker_memory",
        "allocation-refused",
        harm.eat_memory,
        ("worker_memory",),
        {"worker_memory": "1GiB"},
    ),
    Cause(
        "allocation past RLIMIT_AS",
        "address-space-limited",
        harm.eat_memory,
        ("RLIMIT_AS",),
        before=lambda: resource.setrlimit(resource.RLIMIT_AS, (12 << 30, resource.RLIM_INFINITY)),
    ),
    Cause("absurd allocation", "allocation-refused", FAULTS["out-of-memory"], ("MemoryError",)),
    Cause(
        "sample that alone does not fit into the group",
        "worker-oom-killed",
        harm.eat_memory,
        ("this sample alone does not fit into the limit of 1500 MiB", "2 times", "left the sample out", "750MiB"),
        {"bad_sample": "skip"},
        GROUP.replace("{kind}", "memory").replace("{limit}", "1500M").replace("{file}", "memory.limit_in_bytes"),
        arguments={"num_workers": 2},
        which=-1,
        confidence="certain",
    ),
    Cause("SIGKILL from outside", "worker-killed", harm.signalled("kill -9 {pid}"), ("not the kernel for memory",)),
    Cause(
        "SIGKILL of its own",
        "worker-killed",
        harm.killed_by(signal.SIGKILL),
        ("not the kernel for memory", "who is unknown", "the sample's own code", "strike 1 of 2"),
    ),
    Cause(
        "SIGKILL of its own, again and again",
        "poison-sample",
        harm.killed_late,
        ("17 of 17 such deaths fell on this sample", "its own code", "death 17 at this sample"),
        which=16,
        confidence="likely",
        heeded=SKIP,
    ),
    Cause(
        "SIGKILL of its own, a neighbour out of memory",
        "worker-killed",
        harm.killed_beside_a_neighbour,
        ("not the kernel for memory", "another process", "its own cgroup did not rise"),
        within=NEIGHBOUR.replace("{inner}", "NEIGHBOUR=$g {run}"),
    ),
    Cause(
        "SIGKILL of its own, a neighbour, no counters",
        "worker-killed",
        harm.killed_beside_a_neighbour,
        ("who is unknown", "may have been another process", "MiB of this machine were free before"),
        within=NEIGHBOUR.replace("{inner}", NO_COUNTERS),
        confidence="possible",
    ),
    *(
        Cause(
            f"SIG{name} by a shell",
            "worker-signalled",
            harm.signalled(f"kill -{name} {{pid}}; sleep 0.3; true"),
            (f"SIG{name}", "bash -c kill"),
        )
        for name in ("INT", "HUP", "USR1")
    ),
    Cause(
        "Ctrl-C in the terminal",
        "interrupted",
        harm.control_c,
        ("Ctrl-C",),
        within="script -qec '{run}' /dev/null",
        before=lambda: signal.signal(signal.SIGINT, lambda number, frame: None),
        needs="script",
    ),
    Cause(
        "SIGTERM to the trainer",
        "trainer-signalled",
        harm.trainer_signalled,
        ("bash -c kill", "the trainer was sent SIGTERM"),
        within="bash -c 'HOLDFAST_RUN_DIR=$T exec {under_run}'",
        before=lambda: signal.signal(signal.SIGTERM, lambda number, frame: None),
        which=-1,
    ),
    Cause("SIGTERM by a shell", "worker-signalled", harm.signalled("kill {pid}; sleep 0.3; true"), ("bash -c kill",)),
    Cause(
        "SIGTERM by a Spark executor",
        "terminated-by-scheduler",
        harm.spark_executor,
        ("Spark sent SIGTERM", "(java org.apache.spark.executor.CoarseGrainedExecutorBackend)"),
        {"sample_timeout": 60},
        needs="javac",
    ),
    Cause("SIGTERM by a JVM", "terminated-by-scheduler", harm.signalled(JVM), ("java", "JVM"), {"sample_timeout": 60}),
    Cause("segmentation fault", "worker-segfault", FAULTS["segfault"], ("SIGSEGV",), heeded=SKIP),
    Cause(
        "stack overflow",
        "worker-segfault",
        harm.stack_overflow,
        ("SIGSEGV", "in stack_overflow"),
        needs="python3.11",
    ),
    Cause("abort", "worker-aborted", FAULTS["abort"], ("SIGABRT",)),
    Cause(
        "SIGSEGV by a shell",
        "worker-terminated",
        harm.signalled("kill -SEGV {pid}; sleep 0.3; true"),
        ("from outside", "bash"),
    ),
    Cause(
        "SIGTERM to the group",
        "worker-signalled",
        harm.group_signalled,
        ("SIGTERM",),
        before=lambda: signal.signal(signal.SIGTERM, lambda number, frame: None),
    ),
    Cause("SIGTERM to the keeper", "worker-signalled", harm.keeper_signalled, ("the keeper was sent SIGTERM",)),
    Cause("SIGKILL to the keeper", "keeper-lost", harm.keeper_killed, within=MARK),
    Cause(
        "sample that is killed each time", "poison-sample", harm.killed_by(signal.SIGKILL), ("its own code",), which=-1
    ),
    Cause(
        "mapped file cut short",
        "worker-bus-error",
        harm.cut_short,
        ("SIGBUS", "cut short", "/cut-short-", "0 bytes now"),
        confidence="certain",
    ),
    Cause(
        "mapped file cut short and removed",
        "worker-bus-error",
        harm.cut_short_and_removed,
        ("SIGBUS",),
        confidence="likely",
    ),
    Cause("mapping in a full /dev/shm", "worker-bus-error", harm.shm_full, ("/dev/shm is full",), within=SMALL_SHM),
    Cause("illegal instruction", "worker-illegal-instruction", harm.UNDEFINED, ("SIGILL",), needs="x86_64"),
    Cause("division by zero in C", "worker-arithmetic-fault", harm.DIVIDE, ("SIGFPE",), needs="x86_64"),
    Cause("sys.exit", "sample-raised", FAULTS["sys-exit"], ("SystemExit",)),
    Cause("os._exit", "worker-exited", FAULTS["os-exit"], ("exit code 5",)),
    Cause("another fatal signal", "worker-terminated", harm.killed_by(signal.SIGALRM), ("SIGALRM",)),
    Cause("stopped", "worker-stopped", FAULTS["sigstop"], ("SIGSTOP",), SLOW),
    Cause("sleeps", "sample-hung", FAULTS["hang"], ("time.sleep",), SLOW),
    Cause("reads a FIFO", "hang-io", harm.fifo, ("read", "os.read(fd, 1)"), SLOW),
    Cause(
        "silent, without a deadline",
        "worker-silent",
        lambda: time.sleep(3),
        ("said nothing", "time.sleep(3)"),
        before=lambda: setattr(worker_life, "SILENT_S", 0.8),
        heeded=Heeded("set Policy(sample_timeout=", gone=True, policy={"sample_timeout": 0.5, "bad_sample": "skip"}),
    ),
    Cause(
        "wait in C that our own look ends",
        "worker-silent",
        harm.poll_in_c,
        ("has been silent for", "while loading", "poll(None, 0, 8000)"),
        before=lambda: setattr(worker_life, "SILENT_S", 0.8),
        pause_s=0.3,
    ),
    Cause("in the kernel's own wait", "hang-uninterruptible", harm.uninterruptible, ("state D",), SLOW),
    Cause("waits for a file lock", "hang-io", harm.locked_file, ("flock", "/file"), SLOW, before=harm.lock_the_file),
    Cause("opens a FIFO that nobody writes", "hang-io", harm.fifo_without_a_writer, ("openat", "feed"), SLOW),
    Cause("waits for a service of this machine", "hang-io", harm.service_of_this_machine, ("unix socket",), SLOW),
    Cause(
        "waits for a program's end",
        "hang-child",
        harm.program,
        ("sleep 9",),
        SLOW,
        confidence="certain",
        heeded=Heeded("subprocess.run(..., timeout=", gone=True, fault=harm.program_with_a_timeout),
    ),
    Cause("waits for a program's words", "hang-child", harm.program_that_says_nothing, ("sleep 9", "pipe"), SLOW),
    Cause(
        "waits for a name server",
        "hang-network",
        harm.name_server_that_is_mute,
        ("DNS", "poll"),
        SLOW,
        QUIET_NAMES,
        before=harm.mute_name_server,
        heeded=Heeded(
            '"RES_OPTIONS"] = "timeout:1 attempts:1"',
            gone=True,
            fault=harm.name_server_with_a_timeout,
            policy={"sample_timeout": 8},
        ),
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
        "waits for a lock of C's",
        "hang-native",
        harm.native_lock,
        ("holds the GIL", "futex"),
        SLOW,
        confidence="certain",
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
        harm.threads_of_a_fork,
        ("OpenMP waits", "libgomp"),
        SLOW,
        before=harm.threads_of_a_fork,
        index=0,
        confidence="likely",
        needs="py-spy",
    ),
    Cause("waits for its own lock", "hang-lock", harm.lock, ("futex", "mine.acquire()"), SLOW),
    Cause(
        "waits for a server",
        "hang-network",
        harm.silent_server,
        ("socket", "client.recv"),
        SLOW,
        heeded=Heeded("socket.setdefaulttimeout(", gone=True, fault=harm.server_with_a_timeout),
    ),
    Cause("computes for ever", "hang-native", harm.busy, ("processor",), SLOW),
    Cause(
        "lock held at the fork",
        "hang-inherited-lock",
        harm.inherited_lock,
        ("threads",),
        SLOW,
        before=lambda: (harm.HELD.acquire(), threading.Thread(target=time.sleep, args=(9,), daemon=True).start()),
        index=0,
        heeded=SPAWN,
    ),
    Cause(
        "threads that a fork does not copy",
        "fork-after-threads",
        harm.threads_of_a_fork,
        ("threads", "spawn"),
        SLOW,
        before=harm.threads_of_a_fork,
        index=0,
        heeded=SPAWN,
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
    Cause("exception", "sample-raised", FAULTS["raise"], ("injected",), heeded=SKIP),
    Cause(
        "exception in a transform",
        "transform-raised",
        lambda: None,
        ("Chain > Resize", "cannot resize"),
        dataset=lambda: harm.Transformed(harm.Chain(torch.abs, harm.Resize())),
    ),
    Cause(
        "exception in a transform that is a function",
        "transform-raised",
        lambda: None,
        ("(scaled)", "scaled by nothing"),
        dataset=lambda: harm.Transformed(functools.partial(harm.scaled, 2.0)),
    ),
    Cause(
        "exception before the transform",
        "sample-raised",
        lambda: None,
        ("injected",),
        dataset=lambda: harm.Transformed(harm.Resize(), FAULTS["raise"]),
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
    Cause(
        "exception that cannot be pickled",
        "exception-not-picklable",
        FAULTS["raise-unpicklable"],
        ("injected",),
        heeded=Heeded("plain __init__(self, *args)", gone=True, fault=harm.plain_exception),
    ),
    Cause(
        "value that cannot be pickled",
        "value-not-picklable",
        lambda: {"a": [1, (x for x in ())]},
        ("['a'][1]", "generator"),
        batch_size=None,
        heeded=Heeded("return plain data", gone=True, fault=lambda: {"a": [1, 2]}),
    ),
    Cause(
        "other items when replayed",
        "stream-diverged",
        lambda: None,
        ("not reproducible",),
        dataset=harm.Unsteady,
        which=-1,
        heeded=Heeded("draw from the seeded generators only", gone=True, dataset=harm.Steady),
    ),
    Cause(
        "other shape",
        "samples-differ",
        lambda: torch.ones(4),
        (f"index {harm.BAD}", "(4,)", "(3,)"),
        heeded=Heeded("a collate_fn that does", arguments={"collate_fn": harm.padded}),
    ),
    Cause("no such file", "file-missing", lambda: open("/no/such/file"), ("/no/such/file",)),
    Cause("not allowed", "permission-denied", harm.not_allowed, ("/etc/shadow",)),
    Cause("stale file handle", "stale-file", peers.stale_handle, ("/file",), needs="root"),
    Cause("full disk", "disk-full", harm.disk_full, ("/mnt: 0 of 8",), within=SMALL_DISK),
    Cause(
        "disk without inodes",
        "disk-full",
        harm.many_files,
        ("/mnt: 8 of 8 MiB free, 0 of 20 inodes",),
        within=SMALL_DISK.replace("size=8m", "size=8m,nr_inodes=20"),
    ),
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
        policy={"shared_files": "ignore"},  # it is told by its harm
        heeded=Heeded("open it in the worker, at its first sample", gone=True, dataset=peers.ZippedLater),
    ),
    Cause(
        "zip file that is open at the fork",
        "handle-shared-by-fork",
        lambda: None,
        ("dataset.", ".zip"),
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
    Cause(
        "shared tensor in a full /dev/shm",
        "shm-too-small",
        harm.shared_tensor,
        ("/dev/shm: ", "of 16 MiB free", "shm-size", "No space left on device (28)"),
        within=SMALL_SHM,
    ),
    Cause("full /dev/shm", "shm-too-small", harm.shm_write, ("/dev/shm: 0 of 16",), within=SMALL_SHM),
    Cause(
        "leaked files",
        "descriptors-exhausted",
        harm.leaked_files,
        ("limit is 100", "/* (leaked-"),
        within="bash -c 'exec {run}'",
        heeded=Heeded("close them (`with open(...)`", gone=True, fault=harm.closed_files),
    ),
    Cause(
        "leaked files that torch's transport meets",
        "descriptors-exhausted",
        harm.leaked_files_and_a_shared_tensor,
        ("opened more files than it closed", "limit is 100", "/* (leaked-"),
    ),
    Cause("descriptors", "descriptors-exhausted", FAULTS["out-of-descriptors"], ("/dev/null", "limit is 64")),
    Cause(
        "threads past the limit",
        "cannot-start-process",
        harm.many_threads,
        ("pids.max 60",),
        within=GROUP.replace("{kind}", "pids").replace("{limit}", "60").replace("{file}", "pids.max"),
    ),
    Cause("CUDA in a fork", "cuda-in-forked-worker", peers.cuda, ("re-initialize",), before=peers.cuda, needs="cuda"),
    Cause(
        "service that refuses at first",
        "sample-retried",
        harm.refused,
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
        dataset=harm.Leaky,
        heeded=Heeded("a larger worker_memory", gone=True, policy={"worker_memory": "1GiB"}),
    ),
    Cause(
        "memory that is touched past worker_memory",
        "worker-over-memory",
        harm.touch,
        ("killed", "MiB"),
        {"worker_memory": "128MiB", "bad_sample": "skip"},
        arguments={"worker_init_fn": harm.set_aside},
        heeded=Heeded("raise worker_memory", gone=True, policy={"worker_memory": "1GiB"}),
    ),
    Cause(
        "more workers than processors",
        "too-many-workers",
        lambda: None,
        ("processors",),
        arguments={"num_workers": len(os.sched_getaffinity(0)) + 1},
        which=-1,
        heeded=Heeded(
            f"num_workers={len(os.sched_getaffinity(0))}",
            gone=True,
            arguments={"num_workers": len(os.sched_getaffinity(0))},
        ),
    ),
    Cause(
        "samples that take long",
        "loader-slow",
        lambda: None,
        ("waits for batches",),
        dataset=lambda: harm.Transformed(harm.slowly),
        which=-1,
    ),
    Cause(
        "training that takes long", "trainer-slow", lambda: None, ("fast enough",), pause_s=0.8, batch_size=1, which=-1
    ),
]
