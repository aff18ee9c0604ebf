"""Checks of this process: libraries that do not go together, and what a fork of it would carry into the workers.

`read_process` looks at the interpreter after the dataset has been made; the checks are pure functions of what it saw.
Only conflicts with a reason that can be named are here.
"""

import importlib
import multiprocessing
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from holdfast.diagnose.machine import Machine
from holdfast.diagnose.machine_checks import Check, pair, size
from holdfast.system.cgroups import text_of

# Wheels that all install the one package cv2: the last one wins, and uninstalling one breaks the others.
_OPENCV = ("opencv-python", "opencv-python-headless", "opencv-contrib-python", "opencv-contrib-python-headless")
# The first release of each that was built for numpy 2. Earlier ones fail at import, or lose their numpy bridge.
_NUMPY_2_SINCE = {
    "torch": (2, 3),
    "scipy": (1, 13),
    "pandas": (2, 2, 2),
    "h5py": (3, 11),
    "numba": (0, 60),
    "opencv-python": (4, 10),
    "opencv-python-headless": (4, 10),
}
_OPENMP = re.compile(r"/(libgomp|libiomp5|libomp)\b[^/]*\.so")
_FORK_SHY = {
    "grpc": "gRPC's threads do not survive a fork; its channels hang in the child",
    "tensorflow": "TensorFlow's thread pools do not survive a fork",
    "pyspark": "the gateway to the JVM is one socket; a forked worker must not use it",
}
# SQLite and LMDB forbid the use of a connection in a forked process, however they read.
_DATABASES = (".mdb", ".db", ".sqlite", ".sqlite3", ".lmdb")
# What is built where there is a compiler, and what it is for.
_PARTS = {
    "system._sender": "who sends a signal",
    "shm._stream": "fast copies of large batches",
    "local.protocol._pulse": "fast notes of the sample at hand",
}
_SPAWNED = "multiprocessing_context='forkserver'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """This interpreter, once the dataset is there."""

    start_method: str = "fork"
    threads: tuple[str, ...] = ()
    """Names of Python threads besides the main one."""
    native_threads: int = 0
    """Threads that appeared while the dataset was imported and made, Python's not counted."""
    cuda: bool = False
    modules: frozenset[str] = frozenset()
    open_files: tuple[str, ...] = ()
    """Regular files that were opened while the dataset was imported and made."""
    moved: tuple[str, ...] | None = None
    """Of these, the files whose position moved here while a worker loaded samples; None if none was loaded."""
    picklable: bool = True
    """The dataset. If not, workers can only be forked."""
    openmp: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def compiled_parts() -> dict[str, bool]:
    """What each compiled part of Holdfast gives, and whether it is here. All are optional."""
    return {gives: _importable(f"holdfast.{module}") for module, gives in _PARTS.items()}


def without_parts() -> str:
    """ " (built without a compiler: ... missing)" for a headline; empty if nothing is missing."""
    missing = [gives for gives, here in compiled_parts().items() if not here]
    return f" (compiled parts that are missing: {'; '.join(missing)})" if missing else ""


def _importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def native_threads() -> int:
    """Threads of this process that Python does not know."""
    try:
        return max(0, len(os.listdir("/proc/self/task")) - threading.active_count())
    except OSError:
        return 0


def file_positions() -> dict[str, tuple[int, ...]]:
    """The regular files that this process has open, and the position of each of their descriptors."""
    found: dict[str, tuple[int, ...]] = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
            position = int(text_of(Path(f"/proc/self/fdinfo/{fd}")).split()[1])
        except (OSError, IndexError, ValueError):
            continue  # it is closed already
        if os.path.isfile(path) and not path.startswith(("/proc/", "/dev/")):
            found[path] = (*found.get(path, ()), position)
    return found


def read_process(*, cuda: bool, threads_before: int = 0, files_before: Iterable[str] = ()) -> Process:
    """Now. What was there before the dataset is not held against it."""
    main = threading.main_thread()
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        maps = ""
    wanted = {"numpy", *_NUMPY_2_SINCE, *_OPENCV}
    return Process(
        start_method=multiprocessing.get_start_method(),
        threads=tuple(thread.name for thread in threading.enumerate() if thread is not main),
        native_threads=max(0, native_threads() - threads_before),
        cuda=cuda,
        modules=frozenset(name for name in sys.modules if "." not in name),
        open_files=tuple(sorted(set(file_positions()) - set(files_before))),
        openmp=openmp_runtimes(maps),
        versions={name: version for name in wanted if (version := _version(name)) is not None},
        environment={name: os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ},
    )


def openmp_runtimes(maps: str) -> tuple[str, ...]:
    """Which OpenMP runtimes /proc/self/maps shows as loaded."""
    return tuple(sorted({found.group(1) for found in _OPENMP.finditer(maps)}))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# The checks ----------------------------------------------------------------------------------------------------------


def check_process(process: Process, workers: int, cpus: int, dataset: bool = True) -> tuple[Check, ...]:
    """All of them; without a dataset, those that need none: what this process loads is not what the training loads. If
    a check breaks, the answer says so, and the other checks still run.
    """
    found = []
    for check in ALL if dataset else INSTALLED:
        try:
            found.append(check(process, workers, cpus))
        except Exception as error:
            name = check.__name__.replace("_", "-")
            found.append(Check(name, "warning", f"this check broke: {error!r}", (), "please report this"))
    return tuple(found)


def library_versions(process: Process, workers: int, cpus: int) -> Check:
    """numpy 2 changed its binary interface: what was built for numpy 1 does not load, or loses its arrays."""
    numpy = process.versions.get("numpy", "")
    if _numbers(numpy)[:1] < (2,):
        return Check("library-versions", "ok", f"numpy {numpy}" if numpy else "numpy is not installed")
    old = [
        (name, version)
        for name, version in sorted(process.versions.items())
        if name in _NUMPY_2_SINCE and _numbers(version) < _NUMPY_2_SINCE[name]
    ]
    if old:
        return Check(
            "library-versions",
            "problem",
            f"{', '.join(name for name, _ in old)} was built for numpy 1, and numpy {numpy} is installed",
            tuple(f"{name} {version}" for name, version in old),
            f"pip install --upgrade {' '.join(name for name, _ in old)}, or: pip install 'numpy<2'",
        )
    seen = ", ".join(f"{name} {version}" for name, version in sorted(process.versions.items()))
    return Check("library-versions", "ok", f"{seen}: no conflict that is known")


def opencv(process: Process, workers: int, cpus: int) -> Check:
    """Two wheels of OpenCV overwrite each other's cv2."""
    found = [name for name in _OPENCV if name in process.versions]
    if len(found) > 1:
        keep = next((name for name in found if name.endswith("headless")), found[0])
        return Check(
            "opencv",
            "problem",
            "several wheels of OpenCV are installed, and all of them write the same cv2 folder",
            tuple(f"{name} {process.versions[name]}" for name in found),
            f"pip uninstall -y {' '.join(found)} && pip install {keep}",
        )
    return Check("opencv", "ok", f"{found[0]} {process.versions[found[0]]}" if found else "not installed")


def openmp(process: Process, workers: int, cpus: int) -> Check:
    """Two OpenMP runtimes have two thread pools and may wait for each other."""
    if len(process.openmp) > 1:
        return Check(
            "openmp",
            "warning",
            "several OpenMP runtimes are loaded: they over-subscribe the processors, and may deadlock or crash",
            process.openmp,
            "let MKL use the one of GCC: export MKL_THREADING_LAYER=GNU",
        )
    return Check("openmp", "ok", process.openmp[0] if process.openmp else "none loaded")


def thread_settings(process: Process, workers: int, cpus: int) -> Check:
    """Threads of native libraries, in each worker. torch's own are set to one there."""
    settings = process.environment
    seen = tuple(f"{name}={value}" for name, value in sorted(settings.items()))
    most = max((int(value) for value in settings.values() if value.isdigit()), default=1)
    if most > 1 and most * max(1, workers) > 2 * cpus:
        each = max(1, cpus // max(1, workers))
        says = f"{workers} workers with {most} threads each on {cpus} processors"
        return Check("threads", "warning", says, seen, f"export OMP_NUM_THREADS={each} MKL_NUM_THREADS={each}")
    return Check(
        "threads", "ok", ", ".join(seen) or "OMP_NUM_THREADS is not set; torch has one thread per worker", seen
    )


def fork_dangers(process: Process) -> list[str]:
    """What a fork would carry over: CUDA cannot be used in it, and a lock that a thread held stays locked."""
    seen = ["CUDA is initialised: torch.cuda.is_initialized()"] if process.cuda else []
    seen += [f"thread {name!r} is running" for name in process.threads]
    seen += [f"{name} is imported: {why}" for name, why in _FORK_SHY.items() if name in process.modules]
    if process.native_threads:
        libraries = ", ".join(sorted({"cv2", "h5py", "grpc"} & process.modules)) or "a native library"
        seen.append(f"{process.native_threads} native threads came with the dataset ({libraries})")
    return seen


def fork_safety(process: Process, workers: int, cpus: int) -> Check:
    """Only where workers are forked."""
    if process.start_method != "fork":
        return Check("fork-safety", "ok", f"workers start by {process.start_method}: nothing is inherited")
    seen = fork_dangers(process)
    if not seen:
        return Check("fork-safety", "ok", "no threads and no CUDA before the fork")
    afresh = f"start workers afresh: DataLoader(..., {_SPAWNED})"
    if not process.picklable:
        afresh = f"make the dataset picklable (see picklable), then {afresh}"
    if process.cuda:
        says = "CUDA is initialised before the workers fork: it cannot be used in them"
        return Check(
            "fork-safety", "problem", says, tuple(seen), f"touch CUDA only after the loader has started, or {afresh}"
        )
    says = "what the dataset started does not survive a fork: a lock held at that moment stays locked"
    quiet = "call cv2.setNumThreads(0) before the loader, or " if "cv2" in process.modules else ""
    return Check("fork-safety", "warning", says, tuple(seen), quiet + afresh)


def shared_files(process: Process, workers: int, cpus: int) -> Check:
    """A file opened before the fork has one position for all workers. Who reads by pread, as HDF5 does, moves none."""
    if process.start_method != "fork":
        return Check("open-files", "ok", f"workers start by {process.start_method}: no file is inherited")
    files = process.open_files
    if not files:
        return Check("open-files", "ok", "the dataset opened no file that is still open")
    advice = "open them at the first __getitem__ instead; holdfast.FileCache does"
    if process.moved is None:
        says = "files are open before the workers fork: if they are read by seek and read, workers share one position"
        return Check("open-files", "warning", says, _some(files), advice)
    if process.moved:
        says = "a forked worker moved the position of files that were open before: with more workers, each moves it "
        return Check("open-files", "problem", says + "for all, and samples are wrong", _some(process.moved), advice)
    databases = tuple(path for path in files if path.lower().endswith(_DATABASES))
    if databases:
        says = "databases are open before the workers fork: SQLite and LMDB forbid to use a connection in a fork"
        return Check("open-files", "warning", says, _some(databases), advice)
    count = "1 file is" if len(files) == 1 else f"{len(files)} files are"
    return Check("open-files", "ok", f"{count} open before the fork; loading samples moved no position", _some(files))


def _some(paths: tuple[str, ...]) -> tuple[str, ...]:
    return (*paths[:5], f"and {len(paths) - 5} more") if len(paths) > 5 else paths


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 3, 1) of "2.3.1+cpu"; a release candidate counts as its release."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


ProcessCheck = Callable[[Process, int, int], Check]
INSTALLED: tuple[ProcessCheck, ...] = (library_versions, opencv, thread_settings)
ALL: tuple[ProcessCheck, ...] = (*INSTALLED, openmp, fork_safety, shared_files)


# For a bug report ----------------------------------------------------------------------------------------------------


def bug_report(machine: Machine, process: Process, version: str) -> dict[str, str]:
    """What whoever reads a bug report asks first, one line for each."""
    group, missing = machine.cgroup, [gives for gives, here in compiled_parts().items() if not here]
    versions = [
        f"{name} {number}" for name, number in sorted(process.versions.items(), key=lambda one: one[0] != "torch")
    ]
    system = f"{platform.system()} {platform.release()} {platform.machine()}, {' '.join(platform.libc_ver())}"
    limits = {
        "open files": pair(machine.nofile),
        "processes": pair(machine.nproc),
        "address space": size(machine.address_space[0]),
        "data": size(machine.data[0]),
        "locked memory": size(machine.memlock[0]),
    }
    pids = "unlimited" if group.pids_max is None else f"{group.pids_now} of {group.pids_max}"
    cpus = "unlimited" if group.cpus is None else f"{group.cpus:g}"
    cgroup = f"version {group.version}, memory {size(group.memory_used)} of {size(group.memory_limit)}, "
    shm = "none" if machine.shm_total is None else f"{size(machine.shm_free)} free of {size(machine.shm_total)}"
    return {
        "versions": ", ".join([f"holdfast {version}", *versions, f"Python {platform.python_version()}"]),
        "system": system,
        "compiled parts": f"missing: {'; '.join(missing)}" if missing else "all here",
        "processors": f"{machine.cpus} usable, {machine.cpus_allowed} allowed, {machine.cpus_online} online",
        "memory": f"{size(machine.memory_available)} available of {size(machine.memory_total)}",
        "limits": ", ".join(f"{name} {value}" for name, value in limits.items()),
        "cgroup": f"{cgroup}processors {cpus}, processes {pids}" if group.version else "none can be read",
        "/dev/shm": shm,
        "start method": process.start_method,
    }
