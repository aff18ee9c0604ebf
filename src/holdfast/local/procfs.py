"""What /proc tells of a process: what it waits for, what it has open, who it is. Nothing raises when it is gone."""

import errno
import linecache
import os
import platform
import re
import resource
from collections import Counter
from pathlib import Path

# The calls in which programs wait, by number; those of other machines are shown as numbers.
_CALLS = {
    "x86_64": {
        0: "read",
        1: "write",
        2: "open",
        7: "poll",
        17: "pread64",
        23: "select",
        35: "nanosleep",
        42: "connect",
        43: "accept",
        45: "recvfrom",
        46: "sendmsg",
        47: "recvmsg",
        61: "wait4",
        72: "fcntl",
        73: "flock",
        74: "fsync",
        202: "futex",
        230: "clock_nanosleep",
        232: "epoll_wait",
        257: "openat",
        262: "newfstatat",
        270: "pselect6",
        271: "ppoll",
        281: "epoll_pwait",
        332: "statx",
    },
    "aarch64": {
        63: "read",
        64: "write",
        73: "ppoll",
        67: "pread64",
        72: "pselect6",
        101: "nanosleep",
        203: "connect",
        202: "accept",
        207: "recvfrom",
        211: "sendmsg",
        212: "recvmsg",
        260: "wait4",
        25: "fcntl",
        32: "flock",
        82: "fsync",
        98: "futex",
        115: "clock_nanosleep",
        22: "epoll_pwait",
        56: "openat",
        79: "newfstatat",
        291: "statx",
    },
}
_FRAME = re.compile(r'File "(.+)", line (\d+) in ')
_ON_DESCRIPTOR = frozenset(
    ("read", "write", "pread64", "connect", "accept", "recvfrom", "sendmsg", "recvmsg", "fcntl", "flock", "fsync")
)
_MOST_PATHS = 3
# The first pid namespace has this fixed number (PROC_PID_INIT_INO).
_HOST_PIDS = "pid:[4026531836]"


def system_call(pid: int) -> tuple[str, str]:
    """(name, what it is called on) of the call that the process is in; ("running", "") if in none."""
    try:
        words = Path(f"/proc/{pid}/syscall").read_text().split()
    except OSError:
        return "", ""  # gone, or not ours to look at
    if not words or words[0] in ("running", "-1"):
        return "running", ""
    name = _CALLS.get(platform.machine(), {}).get(int(words[0]), f"system call {words[0]}")
    on = ""
    if name in _ON_DESCRIPTOR and len(words) > 1:
        on = descriptor(pid, int(words[1], 16) & 0xFFFFFFFF)
    return name, on


def descriptor(pid: int | str, fd: int) -> str:
    """What a descriptor stands for: a path, "socket", "pipe", ..."""
    try:
        target = os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return ""
    return target.partition(":")[0] if target.startswith(("socket:", "pipe:", "anon_inode:")) else target


def open_files(pid: int | str = "self") -> tuple[int, str]:
    """How many descriptors, and the paths that most of them stand for."""
    try:
        fds = [int(fd) for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError as error:
        if error.errno != errno.EMFILE:
            return 0, ""
        # To list them takes one descriptor more. They are the lowest there are.
        fds = list(range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    names = [name for fd in fds if (name := descriptor(pid, fd))]
    most = ", ".join(f"{count} x {path}" for path, count in Counter(names).most_common(_MOST_PATHS))
    return len(names), most


def threads(pid: int | str = "self") -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def wait_channel(pid: int) -> str:
    """Where in the kernel it waits; "" when that is not told."""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return ""
    return "" if name == "0" else name


def processor_s(pid: int) -> float:
    """Processor time that it has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def mounts() -> dict[str, str]:
    """Where file systems are mounted, and their types."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {at.replace("\\040", " "): kind for _, at, kind, *_ in fields}


def file_system(path: str) -> str:
    """The type of the file system that a path lies on: ext4, nfs4, fuse.s3fs, ..."""
    best, kind = "", ""
    for at, what in mounts().items():
        inside = path == at or path.startswith(at.rstrip("/") + "/")
        if inside and len(at) >= len(best):
            best, kind = at, what
    return kind


def source_line(stack: str) -> str:
    """The text of the innermost Python line of a faulthandler dump."""
    found = _FRAME.search(stack.rpartition("Current thread")[2])
    return linecache.getline(found[1], int(found[2])).strip() if found else ""


def memory_pressure() -> float:
    """Per cent of the last ten seconds in which some process waited for memory; 0 where that is not told."""
    try:
        found = re.search(r"some avg10=([\d.]+)", Path("/proc/pressure/memory").read_text())
    except OSError:
        return 0.0
    return float(found[1]) if found else 0.0


def kernel_says(pid: int, since: float) -> str:
    """The kernel's own line about killing this process for memory after `since` (monotonic), if its log may be read.

    The log speaks of the host's pids: inside another pid namespace it says nothing about ours.
    """
    if os.readlink("/proc/self/ns/pid") != _HOST_PIDS:
        return ""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    found = ""
    try:
        while True:
            try:
                record = os.read(log, 8192).decode(errors="replace")
            except BrokenPipeError:
                continue  # overwritten while we read
            head, _, text = record.partition(";")
            at = int(head.split(",")[2]) / 1e6
            if at >= since - 1 and re.search(rf"[Kk]illed process {pid} ", text):
                found = text.splitlines()[0]
    except OSError:
        return found  # the end of it
    finally:
        os.close(log)
