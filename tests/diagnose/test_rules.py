"""Findings are pure functions of evidence: what cannot be made on every machine is asked of made-up evidence."""

import errno
import os
import signal
from dataclasses import replace

import pytest

from holdfast.core.messages import Cause, Did, Stage, Suspicion, What
from holdfast.diagnose.finding import TRAINER, Case, find
from holdfast.diagnose.report import speed_of
from holdfast.diagnose.rules import ALL
from holdfast.diagnose.stats import LoaderStats
from holdfast.remote_exception import Raised, capture
from holdfast.system.cgroups import ControlGroup, Oom
from holdfast.system.evidence import Evidence, Sign, View
from holdfast.system.procfs import On
from holdfast.system.signal_origin import Fault, Sender

DEAD = Case(what=What.EXITED, worker=1, stage=Stage.FETCH, cause=Cause.SIGNAL, code=signal.SIGKILL, task=3, index=9)
HUNG = Case(what=What.EXITED, worker=1, stage=Stage.FETCH, cause=Cause.DEADLINE, seconds=2.0, sample_timeout=2.0)
SENT = Case(what=What.SIGNALLED, worker=1, code=signal.SIGTERM)


def seen(**facts):
    return Evidence(pid=77, **facts)


def named(case):
    return find(case, ALL)


def test_the_kernels_counters_decide_whether_a_kill_was_for_memory():
    group = ControlGroup(memory_limit=64 << 30)
    cgroup = named(replace(DEAD, evidence=seen(counters=True, oom=Oom("cgroup", 3, 4), group=group)))
    assert (cgroup.name, cgroup.confidence) == ("worker-oom-killed", "certain")
    assert "cgroup oom_kill 3 -> 4" in cgroup.seen
    log = named(replace(DEAD, evidence=seen(kernel_log="Out of memory: Killed process 77 (python)")))
    assert (log.name, log.confidence) == ("worker-oom-killed", "certain")
    outside = named(replace(DEAD, evidence=seen(counters=True)))
    assert (outside.name, outside.confidence) == ("worker-killed", "likely")
    unreadable = named(replace(DEAD, evidence=seen()))
    assert (unreadable.name, unreadable.confidence) == ("worker-killed", "possible")


GIB = 1 << 30


def test_the_counter_of_the_machine_rises_for_anybody():
    """Likely, if memory was short; who knows, if it was not; not ours, if the counter of our own group did not rise."""
    host = seen(counters=True, oom=Oom("host", 10, 11), total_bytes=64 * GIB, memory=((0.1, 30 * GIB),))
    short = named(replace(DEAD, evidence=replace(host, free_bytes=33 * GIB)))
    assert (short.name, short.confidence) == ("worker-oom-killed", "likely")
    assert "3072 of 65536 MiB of this machine were free before" in short.seen
    assert "that counter does not say which process was killed" in short.seen
    plenty = named(replace(DEAD, evidence=replace(host, free_bytes=60 * GIB)))
    assert (plenty.name, plenty.confidence) == ("worker-killed", "possible")
    assert "unknown" in plenty.says and "host oom_kill 10 -> 11, which may have been another process" in plenty.seen
    pressed = named(replace(DEAD, evidence=replace(host, free_bytes=60 * GIB, pressure=35.0)))
    assert pressed.name == "worker-oom-killed"
    neighbour = named(replace(DEAD, evidence=replace(host, oom=Oom("elsewhere", 10, 11), free_bytes=33 * GIB)))
    assert neighbour.name == "worker-killed" and "not the kernel for memory" in neighbour.says
    assert any("another process" in fact for fact in neighbour.seen)


def test_a_sample_that_is_killed_too_often_for_chance():
    case = replace(DEAD, evidence=seen(counters=True), strike=2, needed=2, done=Did.LEFT_OUT)
    assert named(case).name == "poison-sample"
    assert named(replace(case, done=Did.SENT_AGAIN)).name == "worker-killed", "chance explains it still"


@pytest.mark.parametrize(
    ("suspicion", "name"),
    [
        (Suspicion(1, 1, 0.5), "worker-killed"),
        (Suspicion(2, 2, 0.5), "worker-killed"),
        (Suspicion(3, 3, 0.9), "poison-sample"),  # all of them
        (Suspicion(3, 4, 0.9), "worker-killed"),
        (Suspicion(2, 4, 0.001), "poison-sample"),
    ],
)
def test_the_count_says_who_sends_sigkill(suspicion, name):
    case = replace(DEAD, evidence=seen(counters=True), strike=suspicion.here, needed=2, done=Did.SENT_AGAIN)
    finding = named(replace(case, suspicion=suspicion))
    assert finding.name == name
    if name == "poison-sample":
        assert f"{suspicion.here} of {suspicion.in_all} such deaths fell on this sample" in finding.seen
        assert "its own code" in finding.says and finding.confidence == "likely"
    else:
        assert "who is unknown" in finding.says


def test_a_sample_that_alone_does_not_fit_into_the_limit():
    """The second kill while no other worker was at work; the advice stays below the limit."""
    group = ControlGroup(memory_limit=2 * GIB, oom_kills=4)
    ours = seen(counters=True, oom=Oom("cgroup", 3, 4), group=group)
    case = replace(DEAD, evidence=ours, strike=3, needed=2, suspicion=Suspicion(3, 3, 1.0, 1))
    first = named(case)
    assert "alone" not in first.says and 'worker_memory="1024MiB"' in first.advice
    proof = named(replace(case, suspicion=Suspicion(4, 4, 1.0, 2)))
    assert proof.name == "worker-oom-killed" and proof.confidence == "certain"
    assert proof.says.startswith("this sample alone does not fit into the limit of 2048 MiB")
    assert "fewer workers do not help" in proof.advice and 'worker_memory="1024MiB"' in proof.advice
    batch = named(replace(case, suspicion=Suspicion(4, 4, 1.0, 2), stage=Stage.COLLATE))
    assert batch.says.startswith("this batch alone") and "skip" not in batch.advice


@pytest.mark.parametrize(
    ("command", "who"),
    [
        ("/usr/sbin/slurmstepd: [1234.0]", "Slurm"),
        ("/usr/lib/jvm/bin/java -cp x org.apache.spark.executor.CoarseGrainedExecutorBackend --id 1", "Spark"),
        ("/usr/bin/java -Dproc_nodemanager org.apache.hadoop.yarn.server.nodemanager.NodeManager", "YARN"),
        ("/usr/bin/containerd-shim-runc-v2 -namespace k8s.io", "the container runtime"),
        ("/opt/ray/raylet/raylet --raylet_socket_name=x", "Ray"),
        ("/opt/venv/bin/python3.11 /opt/venv/bin/torchrun --nproc-per-node 2 train.py", "torchrun"),
        ("/usr/bin/java -jar other.jar", "a JVM"),
    ],
)
def test_schedulers_are_known_by_their_command_lines(command, who):
    finding = named(replace(SENT, evidence=seen(sender=Sender(9, 0, 0, ((9, command), (1, "init"))))))
    assert finding.name == "terminated-by-scheduler"
    assert finding.says.startswith(f"{who} sent SIGTERM")


def test_other_senders():
    shell = Sender(9, 0, 0, ((9, "bash"), (8, "/usr/sbin/slurmstepd: [1234.0]")))
    assert named(replace(SENT, evidence=seen(sender=shell))).name == "worker-signalled", "srun --pty bash, then kill"
    for command in (
        "bash /home/me/yarn-spinner/stop.sh",
        "ray::Trainer.fit",
        "/opt/venv/bin/python train.py --torchrun",
    ):
        mine = Sender(9, 0, 0, ((9, command),))
        assert named(replace(SENT, evidence=seen(sender=mine))).name == "worker-signalled"
    person = named(replace(SENT, evidence=seen(sender=Sender(9, 0, 0, ((9, "-bash"), (8, "sshd: me"))))))
    assert person.name == "worker-signalled"
    assert "-bash" in person.seen[0]
    assert "sender unknown" in named(replace(SENT, evidence=seen())).seen[0]
    terminal = replace(SENT, code=signal.SIGINT, evidence=seen(sender=Sender(0, 0, 0x80, ())))
    assert named(terminal).name == "interrupted"


def test_who_signals_the_trainer():
    mine = replace(SENT, worker=TRAINER)
    yarn = "/usr/bin/java -Dproc_nodemanager org.apache.hadoop.yarn.server.nodemanager.NodeManager"
    told = named(replace(mine, evidence=seen(sender=Sender(9, 0, 0, ((9, yarn),)))))
    assert told.name == "trainer-signalled"
    assert told.says.startswith("YARN sent SIGTERM") and "250 ms" in told.says
    shell = named(replace(mine, evidence=seen(sender=Sender(9, 0, 0, ((9, "bash stop.sh"),)))))
    assert shell.name == "trainer-signalled" and "bash stop.sh" in shell.seen[0]
    terminal = replace(mine, code=signal.SIGINT, evidence=seen(sender=Sender(0, 0, 0x80, ())))
    assert named(terminal).says == "Ctrl-C was pressed"


@pytest.mark.parametrize(
    ("view", "name"),
    [
        (View(state="D", call="read", on="/data/x.tar", kinds=(On.FILE,), file_system="nfs4"), "hang-uninterruptible"),
        (View(state="T"), "worker-stopped"),
        (View(state="S", call="read", on="/data/x.tar", kinds=(On.FILE,), file_system="nfs4"), "hang-io"),
        (View(state="S", call="openat"), "hang-io"),
        (View(state="S", call="poll", line="socket.getaddrinfo(host, 443)"), "hang-network"),
        (View(state="S", call="recvfrom", on="socket", kinds=(On.SOCKET,)), "hang-network"),
        (View(state="S", call="futex", line="with self.lock:"), "hang-lock"),
        (View(state="R", call="running", busy=0.2), "hang-native"),
        (View(state="S", call="recvfrom", on="unix socket /run/cache.sock", kinds=(On.UNIX_SOCKET,)), "hang-io"),
        (View(state="S", call="poll", on="unix socket", kinds=(On.UNIX_SOCKET,)), "hang-io"),
        (View(state="S", call="poll", on="unix socket, socket", kinds=(On.UNIX_SOCKET, On.SOCKET)), "hang-network"),
        (View(state="S", call="wait4", children=((9, "ffmpeg -i x.mp4"),)), "hang-child"),
        (View(state="S", call="read", on="pipe", kinds=(On.PIPE,), children=((9, "ffmpeg -i x.mp4"),)), "hang-child"),
        (
            View(state="S", call="read", on="/data/x.tar", kinds=(On.FILE,), children=((9, "ffmpeg -i x.mp4"),)),
            "hang-io",
        ),
        (View(state="S", call="wait4"), "sample-hung"),
        (View(state="S", call="clock_nanosleep", gil=True), "hang-native"),
        (View(state="S", call="futex", line="with self.lock:", gil=True), "hang-native"),
        (View(state="S", call="futex", line="with self.lock:", gil=False), "hang-lock"),
        (View(state="S", call="read", on="/data/x.tar", kinds=(On.FILE,), gil=True), "hang-io"),
        (View(state="S", call="clock_nanosleep", gil=False), "sample-hung"),
        (View(state="S", call="clock_nanosleep"), "sample-hung"),
        (View(), "sample-hung"),
    ],
)
def test_what_a_hung_worker_waits_for(view, name):
    assert named(replace(HUNG, evidence=seen(view=view))).name == name
    silent = replace(HUNG, what=What.SILENT, cause=None, code=60, evidence=seen(view=view))
    assert named(silent).name == ("worker-silent" if name == "sample-hung" else name)


def test_who_waits_with_the_gil_is_native_code():
    finding = named(replace(HUNG, evidence=seen(view=View(state="S", call="clock_nanosleep", gil=True))))
    assert finding.confidence == "certain"
    assert "holds the GIL" in finding.says
    assert "its main thread has the GIL" in finding.seen


@pytest.mark.parametrize(
    ("frame", "library"),
    [
        ("gomp_team_barrier_wait_end (libgomp.so.1)", "OpenMP"),
        ("__kmp_fork_barrier (libiomp5.so)", "OpenMP"),
        ("0x7f00 (cv2.abi3.so)", "OpenCV"),
        ("H5FD_sec2_read (libhdf5-1a2b.so.310)", "HDF5"),
        ("grpc_completion_queue_next (cygrpc.cpython-311-x86_64-linux-gnu.so)", "gRPC"),
        ("decode (libmine.so.2)", "libmine.so.2"),
    ],
)
def test_native_frames_name_the_library(frame, library):
    frames = ("futex_wait (libc.so.6)", frame, "ffi_call (libffi.so.8)")
    view = View(state="S", call="futex", gil=True, native=frames)
    finding = named(replace(HUNG, evidence=seen(view=view)))
    assert finding.name == "hang-native"
    assert f"({library})" in finding.says
    assert any(fact.startswith("py-spy: in futex_wait") and library in fact for fact in finding.seen)


def test_threads_of_a_library_are_lost_in_a_fork():
    view = View(state="S", call="futex", native=("do_wait (libgomp.so.1)",))
    forked = named(replace(HUNG, evidence=seen(view=view, trainer_threads=8)))
    assert (forked.name, forked.confidence) == ("fork-after-threads", "likely")
    assert forked.says.startswith("OpenMP waits") and "OMP_NUM_THREADS=1" in forked.advice
    spawned = replace(HUNG, start_method="spawn", evidence=seen(view=view, trainer_threads=8))
    assert named(spawned).name == "hang-lock"


def test_who_else_could_hold_the_lock_is_listed():
    others = tuple(f"loader-{i} S" for i in range(6))
    lock = named(replace(HUNG, evidence=seen(view=View(state="S", call="futex", line="lock.acquire()", others=others))))
    assert "its other threads: loader-0 S, loader-1 S, loader-2 S, loader-3 S, ..." in lock.seen
    sleeps = named(replace(HUNG, evidence=seen(view=View(state="S", call="clock_nanosleep", others=others))))
    assert not any("other threads" in fact for fact in sleeps.seen)


def test_frames_of_python_itself_add_nothing():
    view = View(state="S", call="wait4", native=("wait4 (libc.so.6)", "os_waitpid (libpython3.11.so.1.0)"))
    assert not any("py-spy" in fact for fact in named(replace(HUNG, evidence=seen(view=view))).seen)


def test_a_bus_error_is_certain_only_when_the_file_is_shorter_than_its_mapping():
    bus = replace(DEAD, code=signal.SIGBUS)
    cut = named(replace(bus, evidence=seen(fault=Fault("/data/x.bin", 1 << 20, 4096))))
    assert (cut.confidence, cut.says) == ("certain", "SIGBUS: the mapped file was cut short: /data/x.bin")
    whole = named(replace(bus, evidence=seen(fault=Fault("/data/x.bin", 1 << 20, 2 << 20))))
    gone = named(replace(bus, evidence=seen(fault=Fault("/data/x.bin (deleted)", 1 << 20))))
    nothing = named(replace(bus, evidence=seen()))
    assert {f.confidence for f in (whole, gone, nothing)} == {"likely"}
    shm = named(replace(bus, evidence=seen(fault=Fault("/dev/shm/mine", 1 << 20, 64 << 20), shm_free=0)))
    assert shm.confidence == "certain" and "/dev/shm is full" in shm.says
    elsewhere = named(replace(bus, evidence=seen(fault=Fault("/data/x.bin", 9, 64 << 20), shm_free=0)))
    assert "/dev/shm" not in elsewhere.says


def test_a_crash_signal_from_outside_is_no_crash():
    crash = replace(DEAD, code=signal.SIGSEGV, pid=77)
    outside = named(replace(crash, evidence=seen(sender=Sender(9, 0, 0, ((9, "gdb"),)))))
    assert outside.name == "worker-terminated" and "gdb" in outside.seen[0]
    own = named(replace(crash, evidence=seen(sender=Sender(77, 0, -6, ((77, "python"),)))))
    assert own.name == "worker-segfault"


def test_the_file_system_is_named():
    view = View(state="D", call="read", on="/data/x.tar", kinds=(On.FILE,), file_system="nfs4")
    assert "/data/x.tar (nfs4)" in named(replace(HUNG, evidence=seen(view=view))).says


def test_a_quota_is_no_full_disk():
    try:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/home/me/cache")
    except OSError as error:
        case = Case(what=What.RAISED, worker=0, stage=Stage.FETCH, raised=capture(error))
    finding = named(case)
    assert finding.name == "quota-exceeded"
    assert any("/home/me/cache on " in fact for fact in finding.seen)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)",
            "shm-too-small",
        ),
        ("unable to open shared memory object </torch_1_2_0>: Too many open files (24)", "descriptors-exhausted"),
        ("unable to mmap 4096 bytes from file </torch_1_2_0>: Cannot allocate memory (12)", "allocation-refused"),
        ("layer: No space left on device (24)", "sample-raised"),  # the number and its meaning differ
        ("shape mismatch: (28)", "sample-raised"),
    ],
)
def test_torchs_texts_have_an_errno(text, name):
    try:
        raise RuntimeError(text)
    except RuntimeError as error:
        case = Case(what=What.RAISED, worker=0, stage=Stage.FETCH, raised=capture(error))
    assert named(case).name == name


@pytest.mark.parametrize(
    ("signs", "who"),
    [({Sign.OPEN_FILES}, "more files than it closed"), ({Sign.OPEN_TENSORS}, "tensors"), (set(), "sockets, pipes")],
)
def test_what_the_descriptors_are_says_who_took_them(signs, who):
    raised = Raised("OSError", "Too many open files", "", b"x", None, errno=errno.EMFILE, signs=frozenset(signs))
    assert who in named(Case(what=What.RAISED, worker=0, stage=Stage.FETCH, raised=raised)).says


def test_samples_that_differ_are_blamed_only_where_they_broke_the_batch():
    """Torch's words alone say nothing: a collate_fn of the user's may raise the same."""
    facts = ("index 1: ['a'] is (4,); the other 3 are (3,)", "and 2 more")
    raised = Raised("RuntimeError", "stack expects each tensor to be equal size", "", b"x", None, facts=facts)
    case = Case(what=What.RAISED, worker=0, stage=Stage.COLLATE, raised=raised)
    assert named(case).name == "collate-raised" and named(case).seen == facts and "skip" not in named(case).advice
    found = named(replace(case, raised=replace(raised, signs=frozenset({Sign.UNLIKE}))))
    assert found.name == "samples-differ" and facts[0] in found.says
    assert found.seen == (facts[1], "RuntimeError: stack expects each tensor to be equal size")


def test_a_file_that_is_open_at_the_fork():
    case = Case(what=What.SHARED, worker=-2, evidence=Evidence(pid=1, facts=("dataset.file is open: /a",)))
    assert (named(case).name, named(case).seen) == ("handle-shared-by-fork", ("dataset.file is open: /a",))


def test_a_transform_is_told_apart_from_the_dataset():
    raised = Raised("ValueError", "too small", "", b"x", None, transform="Compose > Resize")
    case = Case(what=What.RAISED, worker=0, stage=Stage.FETCH, raised=raised)
    assert named(case).name == "transform-raised" and "(Compose > Resize)" in named(case).says
    assert named(replace(case, stage=Stage.COLLATE)).name == "collate-raised"
    assert named(replace(case, raised=replace(raised, errno=2))).name == "file-missing"


def test_eagain_of_a_read_is_no_process_limit():
    """The number alone does not decide."""
    try:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    except BlockingIOError as error:
        case = Case(what=What.RAISED, worker=0, stage=Stage.FETCH, raised=capture(error))
    assert named(case).name == "sample-raised"


def test_memory_that_cuda_would_not_lock():
    raised = replace(capture(RuntimeError("CUDA_ERROR_OUT_OF_MEMORY (2)")), facts=("RLIMIT_MEMLOCK 64 KiB",))
    finding = named(Case(what=What.UNPINNED, worker=-1, raised=raised))
    assert finding.name == "memory-not-locked"
    assert "CUDA_ERROR_OUT_OF_MEMORY" in finding.says and finding.seen == raised.facts


def test_the_device_knows_best_whether_it_waits():
    """next() may wait while the device is busy."""
    busy = LoaderStats(workers=2, cpus=4, ran_s=10.0, waited_s=9.0)
    assert [f.name for f in speed_of(busy)] == ["loader-slow"]
    fine = replace(busy, device_ran_s=10.0, device_waited_s=0.01)
    assert [f.name for f in speed_of(fine)] == ["trainer-slow"]
    assert speed_of(fine)[0].seen == ("the device waited 0.0 of 10.0 s (0%)",)


def test_a_rule_that_breaks_hides_nothing():
    def broken(case):
        raise ZeroDivisionError

    assert "broken" in find(DEAD, (broken,)).says


GRPC_STACK = 'Current thread:\n  File "/site/grpc/_channel.py", line 1152 in _blocking\n  File "data.py", line 3 in f\n'


@pytest.mark.parametrize(
    ("others", "threads", "finding"),
    [
        ((), 9, "fork-after-threads"),
        (("event_engine S", "grpc_global_tim S"), 9, "hang-network"),  # its own: the server does not answer
        ((), 1, "hang-network"),
    ],
)
def test_a_grpc_channel_without_its_threads_came_by_the_fork(others, threads, finding):
    view = View(state="S", call="epoll_wait", others=others)
    found = named(replace(HUNG, evidence=seen(view=view, stack=GRPC_STACK, trainer_threads=threads)))
    assert found.name == finding
    assert ("gRPC" in found.says) == (finding == "fork-after-threads")


def test_cuda_in_a_fork_is_known_by_torchs_words():
    error = RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, ...")
    case = Case(what=What.RAISED, worker=0, stage=Stage.FETCH, raised=capture(error))
    assert named(case).name == "cuda-in-forked-worker"


@pytest.mark.parametrize(
    ("type_name", "traceback", "signs", "finding"),
    [
        ("BadZipFile", "", {Sign.SHARED_FILE}, "handle-shared-by-fork"),
        ("OSError", 'File "h5py/_selector.pyx"', {Sign.SHARED_FILE}, "handle-shared-by-fork"),
        ("BadZipFile", "", (), "sample-raised"),
        ("KeyError", 'File "mine.py"', {Sign.SHARED_FILE}, "sample-raised"),
    ],
)
def test_a_shared_position_is_blamed_for_nonsense_only(type_name, traceback, signs, finding):
    raised = Raised(type_name, "what it says", traceback, b"", None, signs=signs)
    assert named(Case(what=What.RAISED, worker=0, stage=Stage.FETCH, raised=raised)).name == finding
