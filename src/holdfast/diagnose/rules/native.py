"""Native frames tell which library a worker hangs in: who is known by which file, and what helps there."""

import re
from typing import NamedTuple

from holdfast.local.evidence import View


class Library(NamedTuple):
    """`threads`: it has threads of its own, which a fork does not copy."""

    name: str
    pattern: re.Pattern[str]
    threads: bool
    advice: str


GRPC = Library(
    "gRPC",
    re.compile(r"\((cygrpc|libgrpc)|^grpc_"),
    True,
    "GRPC_ENABLE_FORK_SUPPORT=1; or make the channel in the worker, at its first sample",
)
_KNOWN = (
    Library(
        "OpenMP",
        re.compile(r"\(lib(gomp|iomp5|omp)\b"),
        True,
        "one thread in workers: OMP_NUM_THREADS=1, torch.set_num_threads(1)",
    ),
    Library("OpenCV", re.compile(r"\((cv2|libopencv)"), True, "cv2.setNumThreads(0) before the loader"),
    Library(
        "HDF5", re.compile(r"\((libhdf5|h5py|_?h5)|^H5"), False, "open the file in the worker, at its first sample"
    ),
    GRPC,
    Library("MKL", re.compile(r"\(libmkl"), True, "MKL_NUM_THREADS=1"),
    Library("NCCL", re.compile(r"\(libnccl"), True, "no collective calls in the dataset"),
    Library("CUDA", re.compile(r"\(libcu(da|dart)?\b"), True, "keep samples on the CPU"),
    Library("SQLite", re.compile(r"\((libsqlite3|_sqlite3)"), False, "open the database in the worker"),
    Library("Arrow", re.compile(r"\((libarrow|libparquet)"), True, "pyarrow.set_cpu_count(1) in workers"),
    Library("torch", re.compile(r"\(lib(torch|c10)"), False, "torch.set_num_threads(1) in workers"),
)
# The call itself, and Python on the way to it: they say nothing of who waits.
_PLUMBING = re.compile(
    r"\((libc|libm|libpthread|ld-linux[^)]*|libffi|libpython[^)]*|linux-vdso|python[\d.]*|_ctypes)\b|\.c\)$"
)


def library_of(view: View) -> tuple[str, Library | None]:
    """(its name or file, what is known of it) of the native code that a worker is in; ("", None) when not seen."""
    for frame in view.native:
        if _PLUMBING.search(frame):
            continue
        known = next((library for library in _KNOWN if library.pattern.search(frame)), None)
        return (known.name if known is not None else frame.rpartition("(")[2].rstrip(")")), known
    return "", None


def tells(view: View) -> bool:
    """True when the native frames say more than the Python line that they lie in."""
    return bool(view.native) and (bool(view.gil) or bool(library_of(view)[0]))
