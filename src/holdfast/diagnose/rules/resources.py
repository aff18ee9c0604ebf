"""Something ran out: memory, descriptors, processes, threads, space on a disk."""

import errno
import os
import re
import signal

from holdfast.core.messages import Cause, Leave, Stage, What
from holdfast.diagnose.finding import Case, Finding
from holdfast.system.evidence import Evidence, Sign

# Memory: the kernel killed a worker, Holdfast did, or an allocation was refused.


# Free memory of the machine below this share, or so many per cent of PSI, make a kill for memory likely.
_SHORT, _PRESSED = 0.1, 10.0


def oom_killed(case: Case) -> Finding | None:
    """Known: the counter of its own group rose, or the kernel's log names it. The machine's counter rises for anybody:
    then it is likely at best, if memory was short.
    """
    evidence = case.evidence
    if evidence is None or case.cause is not Cause.SIGNAL or case.code != signal.SIGKILL:
        return None
    of_host = evidence.oom is not None and evidence.oom.scope == "host"
    if not evidence.for_memory and not (of_host and _was_short(evidence)):
        return None
    seen = []
    limited = evidence.group is not None and evidence.group.memory_limit is not None
    scope = "of its cgroup" if limited and not of_host else "of the host"
    if evidence.oom is not None and evidence.oom.scope != "elsewhere":
        seen.append(f"{evidence.oom.scope} oom_kill {evidence.oom.before} -> {evidence.oom.after}")
    if evidence.kernel_log:
        seen.append(f"kernel log: {evidence.kernel_log}")
    if not evidence.for_memory:
        seen += [*machine_memory(evidence), "that counter does not say which process was killed"]
    seen += memory_seen(evidence)
    if evidence.for_memory and case.suspicion.alone > 1:
        return _does_not_fit(case, evidence, seen)
    return Finding(
        "worker-oom-killed",
        f"the kernel killed it, because the memory {scope} was used up",
        tuple(seen),
        (
            "fewer workers (max_workers)"
            if case.of_pool
            else "fewer workers (num_workers), a smaller prefetch_factor or batch"
        )
        + f'; Policy(worker_memory="{_below(evidence)}") names the line that allocates',
        "certain" if evidence.for_memory else "likely",
    )


def _does_not_fit(case: Case, evidence: Evidence, seen: list[str]) -> Finding:
    """It happened again while nobody else was at work."""
    limit = evidence.group.memory_limit if evidence.group is not None else None
    into = f"the limit of {limit >> 20} MiB" if limit is not None else "the memory of this machine"
    what = "sample" if case.stage is Stage.FETCH else "batch"
    return Finding(
        "worker-oom-killed",
        f"this {what} alone does not fit into {into}: the kernel killed its worker for memory {case.suspicion.alone} "
        "times while no other worker was at work",
        tuple(seen),
        f"load less of it at once (a part, a smaller size, a memory map), or ask for more memory; fewer workers do not "
        f'help; Policy(worker_memory="{_below(evidence)}") names the line that allocates, and '
        + ('bad_sample="skip" goes on without it' if case.stage is Stage.FETCH else "a smaller batch_size takes less"),
    )


def _below(evidence: Evidence) -> str:
    """A limit on a worker that is met before the kernel's: less than this one had, and no more than half of all."""
    there = evidence.group.memory_limit if evidence.group is not None else None
    had = max(evidence.peak_bytes, evidence.last_bytes) * 3 // 4
    size = min((size for size in ((there or evidence.total_bytes) // 2, had) if size), default=1 << 30)
    return f"{size >> 30}GiB" if size >> 31 else f"{max(1, size >> 20)}MiB"


def _was_short(evidence: Evidence) -> bool:
    """Whether the machine had little memory left before this death. What the worker had is free again by now."""
    free = evidence.free_bytes - evidence.last_bytes
    return evidence.pressure >= _PRESSED or (evidence.total_bytes > 0 and free < _SHORT * evidence.total_bytes)


def machine_memory(evidence: Evidence) -> tuple[str, ...]:
    """What speaks for the kernel, and against it, in words."""
    if not evidence.total_bytes:
        return ()
    free = max(0, evidence.free_bytes - evidence.last_bytes)
    return (f"{free >> 20} of {evidence.total_bytes >> 20} MiB of this machine were free before",)


def memory_seen(evidence: Evidence) -> tuple[str, ...]:
    """What is known of the worker's memory, in words."""
    seen = []
    readings = [(ago, size) for ago, size in evidence.memory if size]
    if readings:
        ago, size = readings[-1]
        seen.append(f"the worker used {size / 2**20:.0f} MiB {ago:.1f} s before")
    if evidence.peak_bytes:
        seen.append(f"at most {evidence.peak_bytes / 2**20:.0f} MiB")
    group = evidence.group
    if group is not None and group.memory_limit is not None:
        seen.append(f"limit of the cgroup {group.memory_limit / 2**20:.0f} MiB")
    if evidence.pressure >= 1:
        seen.append(f"memory pressure {evidence.pressure:.0f} % of the last 10 s")
    return tuple(seen)


def over_limit(case: Case) -> Finding | None:
    """We killed it for `worker_memory`."""
    if case.cause is not Cause.MEMORY:
        return None
    return Finding(
        "worker-over-memory",
        "it grew past Policy(worker_memory=...), and was killed for it",
        (*case.evidence.facts, *memory_seen(case.evidence)) if case.evidence is not None else (),
        "look at what this sample allocates; raise worker_memory if it is right",
    )


def grown(case: Case) -> Finding | None:
    """The worker made room for a fresh one: it had grown to its threshold, or was refused more memory."""
    evidence = case.evidence
    if evidence is None or case.cause is not Cause.RECYCLED or case.code != Leave.MEMORY:
        return None
    size = f"{evidence.grown_bytes / 2**20:.0f} MiB"
    steady = evidence.samples > 1
    each = evidence.grown_bytes / 2**20 / max(1, evidence.samples)
    average = f", {each:.1f} MiB for each of {evidence.samples} samples" if steady else ""
    return Finding(
        "worker-leak",
        f"it had grown by {size}{average}; with a fresh worker nothing is lost",
        (*evidence.facts, f"lived {evidence.lived_s:.0f} s, did {evidence.tasks} batches"),
        "look for what the dataset keeps: a list, dict or cache that only grows, files never closed; or a larger "
        "worker_memory, if that is what its samples need",
        "likely" if steady else "possible",
    )


def short(case: Case) -> Finding | None:
    """The memory of all, not of one worker."""
    if case.evidence is None or (case.what is not What.ROOM and case.cause is not Cause.PRESSURE):
        return None
    return Finding(
        "memory-short",
        "the memory of this machine or control group does not hold so many workers; fewer work for now",
        case.evidence.facts,
        "num_workers as many as fit, a smaller prefetch_factor or batch, or a higher limit",
    )


def copied(case: Case) -> Finding | None:
    """A fork shares its parent's pages until one of the two writes to them."""
    if case.what is not What.COPIED or case.evidence is None:
        return None
    return Finding(
        "dataset-copied",
        f"it has copied {case.code} MiB of what it shared with the trainer, and so does each worker",
        (f"pages of its own beyond what it allocated: {case.code} MiB", *case.evidence.facts),
        "keep what is large in a numpy array or a tensor: each look at a Python object writes its reference count",
        "likely",
    )


def refused(case: Case) -> Finding | None:
    """An allocation failed, and Python said so."""
    raised = case.raised
    if raised is None:
        return None
    text = f"{raised.type_name}: {raised.text}"
    if raised.type_name != "MemoryError" and raised.errno != errno.ENOMEM and "can't allocate memory" not in text:
        return None
    if Sign.ADDRESSES_LIMITED in raised.signs:
        return Finding(
            "address-space-limited",
            "an allocation was refused: the address space of the process is limited (RLIMIT_AS)",
            raised.facts,
            "raise spark.executor.pyspark.memory, which is this limit, or `ulimit -v unlimited`: torch alone takes "
            "gigabytes of addresses",
            "likely",
        )
    limited = case.worker_memory is not None and Sign.DATA_LIMITED in raised.signs
    limit = "its memory limit" if case.of_pool else "Policy(worker_memory=...)"
    why = f"past {limit}" if limited else "the system had no more, or the size asked for is absurd"
    return Finding(
        "allocation-refused",
        f"an allocation was refused: {why}; {text}",
        raised.facts,
        "the traceback ends on the line that asks for it; "
        + (
            f"raise {'it' if case.of_pool else 'worker_memory'} if it is right"
            if limited
            else "look at the size it asks for"
        ),
        "certain" if limited else "likely",
    )


# Limits: on descriptors, processes, threads, space and locked memory.


def cannot_fork(case: Case) -> Finding | None:
    """The process could not be made: fork() itself failed, for seconds; or its descriptors did not arrive."""
    evidence = case.evidence
    if evidence is None or not evidence.fork_errno:
        return None
    what = f"{errno.errorcode.get(evidence.fork_errno, evidence.fork_errno)} ({os.strerror(evidence.fork_errno)})"
    if evidence.fork_errno in (errno.EMFILE, errno.ENFILE):
        return Finding(
            "descriptors-exhausted",
            f"a worker could not have its descriptors: {what}",
            evidence.limits,
            "a higher limit (`ulimit -n`, docker run --ulimit nofile=65536:65536), or fewer workers and open files",
        )
    return Finding(
        "cannot-start-process",
        f"the system refused a new process: {what}",
        (f"fork failed with {what}", *evidence.limits),
        "fewer workers, or a higher limit: `ulimit -u`, the cgroup's pids.max",
    )


def cannot_start_thread(case: Case) -> Finding | None:
    """EAGAIN: a limit on processes and threads, not on descriptors."""
    raised = case.raised
    if raised is None:
        return None
    starting = raised.errno == errno.EAGAIN and re.search(r"fork|start_new_thread|_execute_child", raised.traceback)
    if not starting and "can't start new thread" not in raised.text:
        return None
    if case.worker_memory is not None and Sign.STACK_REFUSED in raised.signs:
        return Finding(
            "allocation-refused",
            "a thread could not be started: its stack does not fit into Policy(worker_memory=...)",
            raised.facts,
            "raise worker_memory, or start fewer threads in a sample",
        )
    return Finding(
        "cannot-start-process",
        f"the system refused a new process or thread: {raised.type_name}: {raised.text}",
        raised.facts,
        "fewer workers or threads (OMP_NUM_THREADS=1), or a higher limit: `ulimit -u`, the cgroup's pids.max",
        "likely",
    )


def processes_refused(case: Case) -> Finding | None:
    """A sample was refused a thread or a process, and its worker made room."""
    if case.evidence is None or case.cause is not Cause.RECYCLED or case.code != Leave.PROCESSES:
        return None
    return Finding(
        "cannot-start-process",
        "the system refused a new process or thread to a sample",
        case.evidence.facts,
        "fewer workers or threads (OMP_NUM_THREADS=1), or a higher limit: `ulimit -u`, the cgroup's pids.max",
        "likely",
    )


def descriptors_grown(case: Case) -> Finding | None:
    """It made room for a fresh one before the limit, or when it was refused a file."""
    if case.evidence is None or case.cause is not Cause.RECYCLED or case.code != Leave.DESCRIPTORS:
        return None
    return Finding(
        "descriptors-exhausted",
        f"{'a task' if case.of_pool else 'the dataset'} opens more than it closes; with a fresh worker nothing is lost",
        (*case.evidence.facts, f"{case.evidence.samples} samples loaded since the worker was ready"),
        "close them (`with open(...)`; PIL: Image.open(...).load()); holdfast.FileCache keeps a bounded number open",
    )


def descriptors(case: Case) -> Finding | None:
    """EMFILE, ENFILE: too many open files in the worker."""
    raised = case.raised
    if raised is None or raised.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    who = "task" if case.of_pool else "dataset"
    if Sign.OPEN_FILES in raised.signs:
        says = f"the {who} has opened more files than it closed, up to the limit"
        advice = "close them (`with open(...)`; PIL: Image.open(...).load()), or raise `ulimit -n`"
    elif Sign.OPEN_TENSORS in raised.signs:
        says = f"the {who} keeps more tensors in shared memory than it may have descriptors: each takes one"
        advice = "keep fewer of them (tensor.clone() makes an ordinary one), or raise `ulimit -n`"
    else:
        says = f"the {who} has opened more sockets, pipes or the like than it closed, up to the limit"
        advice = "close connections and programs that it starts (`with`), or raise `ulimit -n`"
    return Finding("descriptors-exhausted", says, raised.facts, advice)


def no_space(case: Case) -> Finding | None:
    """ENOSPC: on which file system?"""
    if case.raised is None or case.raised.errno != errno.ENOSPC:
        return None
    full = case.raised.facts
    if Sign.SHM_FULL in case.raised.signs:
        return Finding(
            "shm-too-small",
            f"/dev/shm has no room for what the dataset puts there (Holdfast does not use it): {case.raised.text}",
            full,
            "docker run --shm-size=8g, or a cache elsewhere than in shared memory",
        )
    return Finding(
        "disk-full",
        f"no space left where the dataset writes: {case.raised.text}",
        full,
        "free some space there, or let TMPDIR point elsewhere",
        "certain" if full else "likely",
    )


def over_quota(case: Case) -> Finding | None:
    """EDQUOT: the disk has room, but not for this user, group or project."""
    if case.raised is None or case.raised.errno != errno.EDQUOT:
        return None
    return Finding(
        "quota-exceeded",
        f"the quota of this user, group or project is used up: {case.raised.text}",
        case.raised.facts,
        "`quota -s` (Lustre: lfs quota -u $USER PATH) shows it; remove files, or let TMPDIR point elsewhere",
    )


def memory_not_locked(case: Case) -> Finding | None:
    """CUDA would not register shared memory."""
    raised = case.raised
    if case.what is not What.UNPINNED or raised is None:
        return None
    return Finding(
        "memory-not-locked",
        f"CUDA refused to lock memory: {raised.text}",
        raised.facts,
        "more memory for the job or fewer workers; a higher limit on locked memory (`ulimit -l unlimited`, docker run "
        "--ulimit memlock=-1)",
        "likely",
    )


RULES = (
    oom_killed,
    over_limit,
    grown,
    short,
    copied,
    refused,
    memory_not_locked,
    cannot_fork,
    processes_refused,
    descriptors_grown,
    descriptors,
    no_space,
    over_quota,
    cannot_start_thread,
)
