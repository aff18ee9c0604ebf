"""What /proc tells of a process: what it waits for, what it has open, who it is. Nothing raises when it is gone."""

import errno
import fcntl
import linecache
import os
import platform
import re
import resource
import select
import stat
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from holdfast.system import linux
from holdfast.system.redact import MOST, mask

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
        247: "waitid",
        257: "openat",
        262: "newfstatat",
        270: "pselect6",
        271: "ppoll",
        281: "epoll_pwait",
        288: "accept4",
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
        242: "accept4",
        207: "recvfrom",
        211: "sendmsg",
        212: "recvmsg",
        95: "waitid",
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
    (
        "read",
        "write",
        "pread64",
        "connect",
        "accept",
        "accept4",
        "recvfrom",
        "sendmsg",
        "recvmsg",
        "fcntl",
        "flock",
        "fsync",
    )
)
_ON_SEVERAL = frozenset(("poll", "ppoll"))
# A poll over more descriptors than this is a server's, and no single one of them is waited for.
_MOST_POLLED = 8
_MOST_PATHS = 3
# Descriptors of our own that are looked through.
_MOST_READ = 256
# Letters of a command line that are kept; some hold whole scripts, and a JVM's main class stands behind its options. It
# goes over a socket with the rest.
_COMMAND = 2000
# Bytes of it that are read: what is hidden becomes shorter.
_COMMAND_READ = 4096
# Letters of a name.
_NAME = 100
_SHELLS = frozenset(("sh", "bash", "dash", "ash", "zsh", "ksh"))
# Options whose value is the next word.
_WITH_VALUE = frozenset(
    (
        "-cp",
        "-classpath",
        "--class-path",
        "-p",
        "--module-path",
        "--add-opens",
        "--add-exports",
        "--add-modules",
        "-W",
        "-X",
    )
)
_CLASS = re.compile(r"[A-Za-z_$][\w$]*([./][\w$]+)*")
# Threads and children that are named one by one.
_MOST_THREADS = 64
_MOST_CHILDREN = 32
# The first pid namespace has this fixed number (PROC_PID_INIT_INO).
_HOST_PIDS = "pid:[4026531836]"


class On(StrEnum):
    """What a system call is made on."""

    FILE = "file"
    PIPE = "pipe"
    SOCKET = "socket"  # to the network, as far as we can tell
    UNIX_SOCKET = "unix socket"  # to another process of this machine
    OTHER = "other"


class SystemCall(NamedTuple):
    """The system call that a process is in. `on`: what it is made on, for people; `kinds`: the same for the rules."""

    name: str = ""
    on: str = ""
    kinds: tuple[On, ...] = ()


def system_call(pid: int) -> SystemCall:
    """Its name is "running" if the process is in none, and "" if we may not see it."""
    try:
        words = Path(f"/proc/{pid}/syscall").read_text().split()
    except OSError:
        return SystemCall()  # gone, or not ours to look at
    if not words or words[0] in ("running", "-1"):
        return SystemCall("running")
    name = _CALLS.get(platform.machine(), {}).get(int(words[0]), f"number {words[0]}")
    numbers: list[int] = []
    if name in _ON_DESCRIPTOR and len(words) > 1:
        numbers = [int(words[1], 16) & 0xFFFFFFFF]
    elif name in _ON_SEVERAL and len(words) > 2:
        numbers = _polled(pid, int(words[1], 16), int(words[2], 16))
    found = dict.fromkeys(waited_for(pid, fd) for fd in numbers)
    kinds = dict.fromkeys(kind for text, kind in found if text)
    return SystemCall(name, ", ".join(text for text, _ in found), tuple(kinds))


def _polled(pid: int, address: int, count: int) -> list[int]:
    """The descriptors that a poll waits for: read from the process's memory, as its parent may."""
    if not 0 < count <= _MOST_POLLED:
        return []
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return [fd for fd, _ in struct.iter_unpack("ii", memory.read(8 * count)) if fd >= 0]
    except (OSError, OverflowError, struct.error):
        return []  # gone, or not ours to look at


def waited_for(pid: int, fd: int) -> tuple[str, On]:
    """As `descriptor`, and of which kind it is; ("", OTHER) if that cannot be seen."""
    try:
        target = os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return "", On.OTHER
    found = re.fullmatch(r"socket:\[(\d+)\]", target)
    if found is None:
        kind = On.FILE if target.startswith("/") else On.PIPE if target.startswith("pipe:") else On.OTHER
        return descriptor(pid, fd), kind
    try:
        lines = Path(f"/proc/{pid}/net/unix").read_text(errors="replace").splitlines()
    except OSError:
        return "socket", On.SOCKET
    for line in lines[1:]:
        words = line.split(None, 7)  # address, references, protocol, flags, type, state, inode, path
        if len(words) > 6 and words[6] == found[1]:
            return f"unix socket {words[7]}" if len(words) > 7 else "unix socket", On.UNIX_SOCKET
    return "socket", On.SOCKET


def descriptor(pid: int | str, fd: int) -> str:
    """What a descriptor stands for: a path, "socket", "pipe", ..."""
    try:
        target = os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return ""
    return target.partition(":")[0] if target.startswith(("socket:", "pipe:", "anon_inode:")) else target


def open_files(pid: int | str = "self") -> tuple[int, tuple[tuple[str, int], ...]]:
    """How many descriptors, and what most of them stand for."""
    try:
        fds = [int(fd) for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError as error:
        if error.errno != errno.EMFILE:
            return 0, ()
        # To list them takes one descriptor more. They are the lowest there are.
        fds = list(range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    names = [name for fd in fds if (name := descriptor(pid, fd))]
    return len(names), most_open(names)


def most_open(names: Sequence[str], most: int = _MOST_PATHS) -> tuple[tuple[str, int], ...]:
    """What most of them stand for, and how many. A leak opens another file each time: files that are open once count by
    their folder, or by one further up if no folder has most of them.
    """
    counts = Counter(names)
    folders: dict[str, list[str]] = {}
    for name in [name for name, count in counts.items() if count == 1 and name.startswith("/")]:
        folders.setdefault(os.path.dirname(name), []).append(name)
    once = [name for inside in folders.values() for name in inside]
    if 2 * max(map(len, folders.values()), default=0) < len(once):
        folders = {os.path.commonpath(once): once}
    for folder, inside in folders.items():
        if len(inside) > 1 and folder != "/":
            for name in inside:
                del counts[name]
            counts[f"{folder}/* ({os.path.relpath(inside[-1], folder)}, ...)"] = len(inside)
    return tuple(counts.most_common(most))


def in_words(paths: Iterable[tuple[str, int]]) -> str:
    """ "90 x /data/* (a.png, ...), 3 x pipe"."""
    return ", ".join(f"{count} x {path}" for path, count in paths)


def shared_files() -> list[tuple[str, int]]:
    """(path, position) of files that this process has from its parent, and that somebody reads at the position which
    both share. Which process: the worker; its parent is the keeper, which reads none of them itself.
    """
    mine, theirs = "/proc/self", f"/proc/{os.getppid()}"
    found = []
    try:
        numbers = [fd for fd in os.listdir(f"{mine}/fd")[:_MOST_READ] if int(fd) > 2]
    except OSError:
        return []  # it takes a descriptor to list them
    for fd in numbers:
        try:
            here, there = os.stat(f"{mine}/fd/{fd}"), os.stat(f"{theirs}/fd/{fd}")
            if not stat.S_ISREG(here.st_mode) or not os.path.samestat(here, there):
                continue
            position, flags = _position(f"{mine}/fdinfo/{fd}")
            path = os.readlink(f"{mine}/fd/{fd}")
            other, _ = _position(f"{theirs}/fdinfo/{fd}")
        except (OSError, ValueError):
            continue  # not in both, or not ours to look at
        if position and other == position and flags & os.O_ACCMODE != os.O_WRONLY and not path.startswith("/memfd:"):
            found.append((path, position))
    return found


def _position(path: str) -> tuple[int, int]:
    """(position, flags) of a descriptor."""
    fields = dict(line.split(":", 1) for line in Path(path).read_text().splitlines()[:2])
    return int(fields["pos"]), int(fields["flags"], 8)


def threads(pid: int | str = "self") -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def other_threads(pid: int) -> tuple[str, ...]:
    """Name and state of each thread but the main one: "grpc_poller S"."""
    found = []
    try:
        numbers = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return ()
    for number in [number for number in numbers if number != str(pid)][:_MOST_THREADS]:
        try:
            head, _, tail = Path(f"/proc/{pid}/task/{number}/stat").read_text().rpartition(")")
        except OSError:
            continue  # it has ended
        found.append(f"{head.partition('(')[2]} {tail.split()[0]}")
    return tuple(found)


def children(pid: int, most_threads: int | None = None) -> tuple[tuple[int, str], ...]:
    """The processes that it has started and that live: pid, command line. The first `most_threads` are asked; of many
    children, a part.
    """
    found: list[tuple[int, str]] = []
    try:
        for number in os.listdir(f"/proc/{pid}/task")[:most_threads]:
            words = Path(f"/proc/{pid}/task/{number}/children").read_text().split()
            found += [(int(word), command(int(word))) for word in words[: _MOST_CHILDREN - len(found)]]
    except OSError:
        return tuple(found)  # gone, or a kernel without it
    return tuple(found)


def command(pid: int) -> str:
    """Its command line, without secrets; "" for one that has ended."""
    return mask(whole_command(pid, _COMMAND_READ))[:_COMMAND]


def whole_command(pid: int, most: int = MOST) -> str:
    """With its secrets, and its words apart by NUL; "" for one that has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(most).decode(errors="replace").strip("\0 ")
    except OSError:
        return ""


def name_of(command: str) -> str:
    """What a process is, by its command line: a JVM's main class or jar, Python's module or script, a shell's order."""
    words = command.split()
    program = os.path.basename(words[0]) if words else ""
    if program == "java":
        name = _named(words, _CLASS, ("-jar", "-m", "--module"))
    elif re.fullmatch(r"python[\d.]*", program):
        name = _named(words, re.compile(r"[^-].*"), ("-m", "-c"))
    elif program in _SHELLS and "-c" in words:
        name = f"{program} -c {command.partition(' -c ')[2]}"
    else:
        name = ""
    name = name or command
    return name if len(name) <= _NAME else name[: _NAME - 3] + "..."


def _named(words: Sequence[str], main: re.Pattern[str], options: tuple[str, ...]) -> str:
    """The program, and the word that says what it runs: the first that is no option, or the value of one of these."""
    program, skipped = os.path.basename(words[0]), False
    for number, word in enumerate(words[1:], 1):
        if skipped:
            skipped = False
        elif word in options and number + 1 < len(words):
            value = " ".join(words[number + 1 :]) if word == "-c" else words[number + 1]
            return f"{program} {word} {value}"
        elif word in _WITH_VALUE:
            skipped = True
        elif not word.startswith("-") and word != "..." and main.fullmatch(word):
            return f"{program} {word}"
    return ""


def wait_channel(pid: int) -> str:
    """Where in the kernel it waits; "" when that is not told."""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return ""
    return "" if name == "0" else name


def processor_s(pid: int) -> float:
    """Processor time that it has used."""
    fields = linux.stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def exit_status(pid: int) -> int | None:
    """The exit code of a process that has ended and was not reaped yet, as in multiprocessing; None if unknown."""
    fields = linux.stat_fields(pid)
    return os.waitstatus_to_exitcode(int(fields[49])) if fields and fields[0] == "Z" else None


# Linux 6.15 tells the exit code of a process that is reaped already, through a pidfd that was open before: the request
# PIDFD_GET_INFO, what is asked for, and where the answer lies (linux/pidfd.h).
_GET_INFO, _INFO_EXIT, _INFO_BYTES, _CODE_AT = 0xC040FF0B, 1 << 3, 64, 60


def end_of(pid: int, pidfd: int | None, patience_s: float) -> tuple[bool, int | None]:
    """Whether a process that is no child of ours ends within that time; its exit code as in multiprocessing, or None
    if the kernel does not tell.
    """
    ended = False
    if pidfd is not None:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        ended = bool(poll.poll(patience_s * 1000))
    code = exit_status(pid)
    if pidfd is None:
        return linux.process_state(pid) in ("", "Z"), code
    if not ended or code is not None:
        return ended, code
    told = bytearray(struct.pack("<Q", _INFO_EXIT).ljust(_INFO_BYTES, b"\0"))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, told)
    except OSError:
        return True, None  # an older kernel
    if not struct.unpack_from("<Q", told)[0] & _INFO_EXIT:
        return True, exit_status(pid)  # not reaped yet
    return True, os.waitstatus_to_exitcode(struct.unpack_from("<i", told, _CODE_AT)[0])


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


def free_memory() -> tuple[int, int]:
    """(bytes that can still be had, bytes that there are) of this machine; zeros where that is not told."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return 0, 0
    found = {name: int(size) << 10 for name, size in re.findall(r"^(MemTotal|MemAvailable):\s*(\d+)", text, re.M)}
    return found.get("MemAvailable", 0), found.get("MemTotal", 0)


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
