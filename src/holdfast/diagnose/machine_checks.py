"""Checks before the run: what of this machine will end, slow or starve the workers, and what to type against it.

A check is a pure function of a `Machine` and the number of workers wanted. Libraries are judged in libraries.py, the
dataset in fitness.py; all give the same record, `Check`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from holdfast.diagnose.machine import Limit, Machine

Verdict = Literal["ok", "warning", "problem"]

_GIB = 1 << 30
_MIB = 1 << 20
# Descriptors of an ordinary training run: files, sockets, the GPU's; below, libraries fail in odd places.
_FEW_FILES = 1024
# torch alone reserves about 3 GiB of addresses at import, and CUDA tens of them.
_SMALL_ADDRESS_SPACE = 16 * _GIB
# What docker gives when it is not asked.
_SMALL_SHM = 256 * _MIB
# Beyond this share of a memory limit the next epoch decides.
_NEARLY_FULL = 0.8
_FULL = 0.95
# Processes besides the workers: keeper, fork server, resource tracker, a few of the user's.
_OTHER_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `advice` ends with the exact command or setting to type; empty when all is well."""

    name: str
    verdict: Verdict
    says: str
    seen: tuple[str, ...] = ()
    advice: str = ""


MachineCheck = Callable[[Machine, int], Check]


def check_machine(machine: Machine, workers: int) -> tuple[Check, ...]:
    """All of them, in the order in which people read them. If one breaks, it says so, and the others still run."""
    return tuple(_asked(check, machine, workers) for check in ALL)


def _asked(check: MachineCheck, machine: Machine, workers: int) -> Check:
    try:
        return check(machine, workers)
    except Exception as error:
        name = check.__name__.replace("_", "-")
        return Check(name, "warning", f"this check broke: {error!r}", (repr(machine),), "please report this")


def size(count: float | None) -> str:
    """Bytes as people read them: "11.2 GiB"; "unlimited" for None."""
    if count is None:
        return "unlimited"
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def pair(limit: Limit) -> str:
    soft, hard = ("unlimited" if value is None else str(value) for value in limit)
    return f"soft {soft}, hard {hard}"


# The checks ----------------------------------------------------------------------------------------------------------


def processors(machine: Machine, workers: int) -> Check:
    """More workers than processors take turns; `os.cpu_count()` knows nothing of affinity and quota."""
    quota = machine.cgroup.cpus
    seen = [f"{machine.cpus_online} online, {machine.cpus_allowed} allowed by affinity"]
    seen += [f"cgroup quota {quota:g}"] if quota is not None else []
    if workers > machine.cpus:
        return Check(
            "processors",
            "warning",
            f"{workers} workers on {machine.cpus} usable processors take turns",
            tuple(seen),
            f"give the job more processors, or set num_workers={machine.cpus} at most",
        )
    if machine.cpus < machine.cpus_online:
        says = f"{machine.cpus} usable, though os.cpu_count() may say {machine.cpus_online}"
        return Check("processors", "ok", says, tuple(seen))
    return Check("processors", "ok", f"{machine.cpus} usable", tuple(seen))


def memory(machine: Machine, workers: int) -> Check:
    """The host's memory and swap."""
    free, total = machine.memory_available, machine.memory_total
    swapped = machine.swap_total - machine.swap_free
    seen = (f"{size(free)} available of {size(total)}", f"swap {size(swapped)} used of {size(machine.swap_total)}")
    look = "see who holds it: ps aux --sort=-rss | head"
    if total and free < total * 0.05:
        return Check("memory", "problem", "the host has almost no memory left", seen, look)
    if total and free < total * 0.1:
        return Check("memory", "warning", "the host has little memory left", seen, look)
    if machine.swap_total and swapped > machine.swap_total / 2:
        return Check("memory", "warning", "the host is swapping: workers will seem to hang", seen, look)
    return Check("memory", "ok", f"{size(free)} available", seen)


def memory_limit(machine: Machine, workers: int) -> Check:
    """The cgroup's limit: beyond it the kernel kills a process by SIGKILL, without a message."""
    limit, used = machine.cgroup.memory_limit, machine.cgroup.memory_used
    if limit is None or (machine.memory_total and limit >= machine.memory_total):
        found = "no cgroup limit below the host's memory" if machine.cgroup.version else "no cgroup can be read"
        return Check("memory-limit", "ok", found)
    seen = (f"{size(used)} used of {size(limit)} (cgroup v{machine.cgroup.version}, file cache not counted)",)
    if used > limit * _NEARLY_FULL:
        return Check(
            "memory-limit",
            "problem" if used > limit * _FULL else "warning",
            f"only {size(limit - used)} are left before the kernel kills for memory",
            seen,
            f"ask for more: docker run --memory={_next_gib(limit)}g, sbatch --mem={_next_gib(limit)}G, "
            f"or resources.limits.memory: {_next_gib(limit)}Gi",
        )
    return Check("memory-limit", "ok", f"{size(limit - used)} left of {size(limit)}", seen)


def _next_gib(limit: int) -> int:
    return max(2, -(-2 * limit // _GIB))


def descriptors(machine: Machine, workers: int) -> Check:
    """Open files. Holdfast's workers raise their own soft limit; the trainer keeps the one it was given."""
    soft, hard = machine.nofile
    seen = (pair(machine.nofile),)
    if soft is None or soft >= _FEW_FILES:
        return Check("descriptors", "ok", f"{'unlimited' if soft is None else soft} open files", seen)
    command = f"in the shell that starts the training: ulimit -n {min(65_536, hard) if hard is not None else 65_536}"
    if hard is not None and hard < _FEW_FILES:
        command = "docker run --ulimit nofile=65536:65536, or as root: prlimit --pid $$ --nofile=65536:65536"
    return Check(
        "descriptors",
        "problem" if soft < _FEW_FILES / 4 else "warning",
        f"only {soft} open files: expect 'Too many open files'",
        seen,
        command,
    )


def processes(machine: Machine, workers: int) -> Check:
    """Processes and threads: past the limit fork fails with EAGAIN, "Resource temporarily unavailable"."""
    cgroup, soft = machine.cgroup, machine.nproc[0]
    room: list[tuple[int, str, str]] = []
    if soft is not None and not machine.root:
        seen = f"ulimit -u {soft}, {machine.tasks_of_user} in use"
        room.append((soft - machine.tasks_of_user, seen, "ulimit -u unlimited"))
    if cgroup.pids_max is not None:
        seen = f"pids.max {cgroup.pids_max}, {cgroup.pids_now} in use"
        room.append((cgroup.pids_max - cgroup.pids_now, seen, "docker run --pids-limit=-1, or TasksMax=infinity"))
    if not room:
        return Check("processes", "ok", "no limit that concerns us")
    left, _, command = min(room)
    needed = workers + _OTHER_PROCESSES
    seen_all = tuple(fact for _, fact, _ in room)
    if left < needed:
        says = f"room for {max(0, left)} more, {workers} workers need {needed}: fork will fail with EAGAIN"
        return Check("processes", "problem", says, seen_all, f"raise it: {command}")
    if left < needed + workers * machine.cpus_online:
        says = f"room for {left} more: libraries that start a thread per processor in each worker may not fit"
        return Check(
            "processes",
            "warning",
            says,
            seen_all,
            f"raise it ({command}), or let libraries start fewer threads (OMP_NUM_THREADS)",
        )
    return Check("processes", "ok", f"room for {left} more", seen_all)


def address_space(machine: Machine, workers: int) -> Check:
    """`ulimit -v` and `ulimit -d`. PySpark's spark.executor.pyspark.memory sets the first."""
    space, data = machine.address_space[0], machine.data[0]
    seen = (f"ulimit -v: {size(space)}", f"ulimit -d: {size(data)}")
    if space is not None:
        return Check(
            "address-space",
            "problem" if space < _SMALL_ADDRESS_SPACE else "warning",
            f"addresses are limited to {size(space)}; torch reserves far more than it uses",
            seen,
            "on Spark leave spark.executor.pyspark.memory unset; elsewhere: ulimit -v unlimited",
        )
    if data is not None:
        says = f"memory that is allocated is limited to {size(data)}, and a forked worker counts what it inherited"
        advice = "limit workers by Policy(worker_memory=...) instead, and type: ulimit -d unlimited"
        return Check("address-space", "warning", says, seen, advice)
    return Check("address-space", "ok", "not limited", seen)


def overcommit(machine: Machine, workers: int) -> Check:
    """Mode 2 counts every page that a fork might write."""
    if machine.overcommit != 2:
        return Check("overcommit", "ok", f"mode {machine.overcommit}: a fork costs what it writes")
    wanted = machine.own_data * workers
    short = wanted > machine.commit_left
    return Check(
        "overcommit",
        "problem" if short else "warning",
        "strict accounting: each forked worker is charged all of the trainer's memory",
        (f"{size(machine.commit_left)} may still be promised", f"{workers} forks of this process: {size(wanted)}"),
        "as root: sysctl vm.overcommit_memory=0; or, if the dataset can be pickled, "
        "multiprocessing_context='forkserver'",
    )


def shared_memory(machine: Machine, workers: int) -> Check:
    """/dev/shm. Holdfast does not use it; torch's own loader and NCCL do."""
    total, free = machine.shm_total, machine.shm_free
    seen = (f"/dev/shm: {size(free)} free of {size(total)}",) if total is not None else ()
    if total is None or free is None or free < _SMALL_SHM:
        return Check(
            "shared-memory",
            "warning",
            "/dev/shm is small: Holdfast does not use it, but torch's own loader and NCCL end there in a bus error",
            seen or ("there is no /dev/shm",),
            "docker run --shm-size=8g (or --ipc=host); on Kubernetes an emptyDir with medium: Memory at /dev/shm",
        )
    return Check("shared-memory", "ok", f"{size(free)} free in /dev/shm", seen)


def hugepages(machine: Machine, workers: int) -> Check:
    """With "always", a forked worker that touches one byte copies two megabytes."""
    seen = (f"transparent_hugepage: {machine.hugepages}",)
    if machine.hugepages == "always" and machine.memory_free < 4 * _GIB:
        return Check(
            "hugepages",
            "warning",
            "huge pages are always on while memory is short: a forked worker that writes one byte copies 2 MiB",
            seen,
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    return Check("hugepages", "ok", machine.hugepages, seen)


def locked_memory(machine: Machine, workers: int) -> Check:
    """InfiniBand registers memory by locking it."""
    soft = machine.memlock[0]
    seen = (f"ulimit -l: {size(soft)}",)
    if machine.infiniband and soft is not None:
        says = "there is InfiniBand, and locked memory is limited: NCCL cannot register its buffers"
        advice = "docker run --ulimit memlock=-1, or in the shell: ulimit -l unlimited"
        return Check("locked-memory", "warning", says, seen, advice)
    return Check("locked-memory", "ok", size(soft), seen)


def tracing(machine: Machine, workers: int) -> Check:
    """py-spy and gdb attach by ptrace. Holdfast's own stack dumps do not need it."""
    scope = machine.ptrace_scope
    seen = (f"kernel.yama.ptrace_scope: {'absent' if scope is None else scope}",)
    if scope in (None, 0) or (machine.root and scope != 3):
        return Check("tracing", "ok", "ptrace_scope lets py-spy attach", seen)
    if scope == 3:
        says = "nothing can attach to a running worker until the next boot; Holdfast's own stack dumps still work"
        advice = "to allow py-spy, set kernel.yama.ptrace_scope=1 in /etc/sysctl.d and type: reboot"
        return Check("tracing", "warning", says, seen, advice)
    return Check("tracing", "ok", "py-spy needs sudo: sudo py-spy dump --pid PID", seen)


ALL: tuple[MachineCheck, ...] = (
    processors,
    memory,
    memory_limit,
    overcommit,
    address_space,
    descriptors,
    processes,
    shared_memory,
    locked_memory,
    hugepages,
    tracing,
)
