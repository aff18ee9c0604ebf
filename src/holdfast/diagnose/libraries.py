"""Checks of this process: libraries that do not go together, and what a fork of it would carry into the workers.

`read_process` looks at the interpreter after the dataset has been made; the checks are pure functions of what it saw.
Only conflicts with a reason that can be named are here.
"""

import importlib
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from holdfast.diagnose.machine_checks import Check

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
# Files with a library's own position, cache or lock behind them: sharing one across a fork corrupts reads.
_STORES = (".h5", ".hdf5", ".he5", ".nc", ".mdb", ".db", ".sqlite", ".tar", ".zip", ".lmdb")
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


def open_files() -> frozenset[str]:
    """Paths of the regular files that this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if os.path.isfile(path) and not path.startswith(("/proc/", "/dev/")):
            found.add(path)
    return frozenset(found)


def read_process(*, cuda: bool, threads_before: int = 0, files_before: frozenset[str] = frozenset()) -> Process:
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
        open_files=tuple(sorted(open_files() - files_before)),
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


def check_process(process: Process, workers: int, cpus: int) -> tuple[Check, ...]:
    """All of them. If a check breaks, the answer says so, and the other checks still run."""
    found = []
    for check in ALL:
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
    return Check("library-versions", "ok", f"no known conflict with numpy {numpy}")


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


def fork_safety(process: Process, workers: int, cpus: int) -> Check:
    """What a fork would carry over: CUDA cannot be used in it, and a lock that a thread held stays locked."""
    if process.start_method != "fork":
        return Check("fork-safety", "ok", f"workers start by {process.start_method}: nothing is inherited")
    if process.cuda:
        return Check(
            "fork-safety",
            "problem",
            "CUDA is initialised before the workers fork: it cannot be used in them",
            ("torch.cuda.is_initialized()",),
            f"touch CUDA only after the loader has started, or pass {_SPAWNED}",
        )
    seen = [f"thread {name!r} is running" for name in process.threads]
    seen += [f"{name} is imported: {why}" for name, why in _FORK_SHY.items() if name in process.modules]
    if process.native_threads:
        libraries = ", ".join(sorted({"cv2", "h5py", "grpc"} & process.modules)) or "a native library"
        seen.append(f"{process.native_threads} native threads came with the dataset ({libraries})")
    if seen:
        quiet = "call cv2.setNumThreads(0) before the loader, or " if "cv2" in process.modules else ""
        says = "what the dataset started does not survive a fork: a lock held at that moment stays locked"
        advice = f"{quiet}start workers afresh: DataLoader(..., {_SPAWNED})"
        return Check("fork-safety", "warning", says, tuple(seen), advice)
    return Check("fork-safety", "ok", "no threads and no CUDA before the fork")


def shared_files(process: Process, workers: int, cpus: int) -> Check:
    """A file opened before the fork has one position for all workers."""
    if process.start_method != "fork" or not process.open_files:
        return Check("open-files", "ok", "the dataset holds no file open before the workers start")
    stores = [path for path in process.open_files if path.lower().endswith(_STORES)]
    shown = stores or list(process.open_files)
    more = [f"and {len(shown) - 5} more"] if len(shown) > 5 else []
    what = "HDF5, database or archive files" if stores else "files"
    return Check(
        "open-files",
        "warning",
        f"{what} are open before the workers fork: all of them read at one shared position",
        (*shown[:5], *more),
        f"open them at the first __getitem__ instead, or pass {_SPAWNED} and open in __setstate__",
    )


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 3, 1) of "2.3.1+cpu"; a release candidate counts as its release."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


ProcessCheck = Callable[[Process, int, int], Check]
ALL: tuple[ProcessCheck, ...] = (library_versions, opencv, openmp, thread_settings, fork_safety, shared_files)
