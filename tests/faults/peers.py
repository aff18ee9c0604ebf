"""Faults that need something of others: a library, a device, the kernel's own bookkeeping.

The libraries are imported when a fault is made, not before; `missing` in causes.py asks whether they are there.
"""

import ctypes
import io
import os
import platform
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from typing import Any

import torch
from torch.utils.data import Dataset

KEPT: dict[str, Any] = {}
NOBODY = 65534


def check(result: int, path: str | None = None) -> int:
    """What libc returned; its error as Python would raise it."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return result


# The kernel -----------------------------------------------------------------------------------------------------------


def stale_handle() -> None:
    """As a server of NFS does for its clients: a file is opened by its handle, after somebody has removed it."""
    libc = ctypes.CDLL(None, use_errno=True)
    path = os.environ["T"]
    with open(path, "w") as file:
        file.write("x")
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    check(libc.name_to_handle_at(-100, path.encode(), handle, ctypes.byref(ctypes.c_int()), 0))
    os.unlink(path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        check(libc.open_by_handle_at(folder, handle, os.O_RDONLY), path)
    finally:
        os.close(folder)


def quota_of_a_disk() -> None:
    with open(os.path.join(os.environ["SMALL_DISK"], "mine"), "wb") as file:
        file.write(random.randbytes(4 << 20))


def quota_of_keys() -> None:
    """Quotas of disks are not in every kernel, nor the programs that set them; that of keys is, 20 kB for each user."""
    libc = ctypes.CDLL(None, use_errno=True)
    add_key = {"x86_64": 248, "aarch64": 217}[platform.machine()]
    os.seteuid(NOBODY)
    try:
        for number in range(100):
            # Into the keys of this thread: they go with it.
            check(libc.syscall(add_key, b"user", b"holdfast-%d" % number, bytes(1000), 1000, ctypes.c_int(-1)))
    finally:
        os.seteuid(0)


def cuda() -> None:
    torch.ones(1, device="cuda").cpu()


# Files that are open before the fork ----------------------------------------------------------------------------------


class Slow(io.FileIO):
    """On a disk that takes its time between the place that is asked for and what is read there. (On a quick one, two
    workers may miss each other for a whole epoch.)"""

    def read(self, size: int | None = -1) -> bytes:
        time.sleep(0.002)
        return super().read(size)


class Zipped(Dataset):
    """The archive is opened here, and read in the workers."""

    def __init__(self) -> None:
        path = tempfile.mktemp(suffix=".zip")
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for index in range(len(self)):
                file.writestr(str(index), random.Random(index).randbytes(20_000))
        self.file = zipfile.ZipFile(Slow(path))

    def __len__(self) -> int:
        return 1280

    def __getitem__(self, index: int) -> Any:
        return torch.frombuffer(bytearray(self.file.read(str(index))), dtype=torch.uint8)[:8]


class ZippedLater(Zipped):
    """The path is kept; each worker opens the archive at its first sample."""

    def __init__(self) -> None:
        super().__init__()
        self.path, self.file = str(self.file.filename), None  # type: ignore[assignment]

    def __getitem__(self, index: int) -> Any:
        if self.file is None:
            self.file = zipfile.ZipFile(Slow(self.path))
        return super().__getitem__(index)


class Hdf5(Dataset):
    """With HDF5's driver that seeks and reads. (Its usual one has taken to pread: that shares no position.)"""

    def __init__(self) -> None:
        import h5py

        path = tempfile.mktemp(suffix=".h5")
        with h5py.File(path, "w") as file:
            rows = torch.randint(0, 100, (1280, 256)).float().numpy()
            file.create_dataset("rows", data=rows, chunks=(1, 256), compression="gzip")
        self.file = h5py.File(path, "r", driver="stdio")

    def __len__(self) -> int:
        return 1280

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.file["rows"][index])


# Threads that a fork does not copy ------------------------------------------------------------------------------------


def opencv_in_the_trainer() -> None:
    import cv2
    import numpy as np

    cv2.setNumThreads(2)
    cv2.GaussianBlur(np.zeros((1000, 1000, 3), np.uint8), (31, 31), 5)
    time.sleep(0.3)  # its threads spin for a while before they wait


def opencv_told_to_have_one_thread() -> None:
    import cv2

    cv2.setNumThreads(1)  # as worker_init_fn often does: it waits for the threads to end


SERVER = """
import grpc, sys
from concurrent import futures

class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)

server = grpc.server(futures.ThreadPoolExecutor(2))
server.add_generic_rpc_handlers((Echo(),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(port, flush=True)
sys.stdin.read()
"""


def grpc_call() -> None:
    """On one channel, made by whoever calls first."""
    import grpc

    if "call" not in KEPT:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        KEPT["server"] = server
        KEPT["call"] = grpc.insecure_channel(f"127.0.0.1:{int(server.stdout.readline())}").unary_unary("/echo/echo")
    assert KEPT["call"](b"x") == b"x"


def grpc_of_a_mute_server() -> None:
    """The channel is this worker's own; the other end takes what it is sent, and that is all."""
    import grpc

    server = socket.create_server(("127.0.0.1", 0))
    grpc.insecure_channel(f"127.0.0.1:{server.getsockname()[1]}").unary_unary("/echo/echo")(b"x", wait_for_ready=True)
