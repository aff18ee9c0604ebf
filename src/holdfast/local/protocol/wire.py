"""What trainer, keeper and workers say to each other.

trainer -> worker   a pipe per life: TASK records. The task itself lies in a letter box.
worker -> trainer   one pipe for all workers: RECORDs. The kernel writes up to PIPE_BUF bytes whole or not at all. So
                    workers need no lock, and a killed worker leaves no half record. When the keeper reports a death,
                    all that the worker wrote is in the pipe already; the trainer reads the pipe first.
worker -> trainer   one socket for all workers: descriptors of files, for batches that fit no slot. A descriptor is sent
                    before its RECORD.
trainer <-> keeper  a sequenced-packet socket: the tuples below, Exited and Silence, pickled. Descriptors travel with
                    them.
"""

import pickle
import struct
from typing import NamedTuple

from holdfast.core.host import Silence
from holdfast.core.messages import Exited
from holdfast.system.evidence import Evidence, shortened

# task, letter box, payload bytes (below 0: the box says where the payload is), journal bytes behind it, samples in it
TASK = struct.Struct("<5q")
ELSEWHERE = struct.Struct("<3q")  # the trainer's pid, a descriptor of the trainer, and the inode of its file
RECORD = struct.Struct("<10q")  # a ReplyKind, worker, life, task, slot, where, buffers, spec bytes, bad, mark
MAGIC = 0x484F4C44 << 8  # in the high bytes of `kind`, so that a stray write is noticed

# Descriptors that go with a StartLife.
DESCRIPTORS = 3
# The largest message between trainer and keeper. The socket takes a message whole or not at all.
MOST_BYTES = 64 << 10
# If evidence would make it longer, lists keep so many entries and texts so many letters: the first pair that fits.
_SHORTER = ((64, 16 << 10), (16, 8 << 10), (16, 1 << 10), (9, 100))


class StartLife(NamedTuple):
    """trainer -> keeper, with descriptors: task pipe, memory file, crash file."""

    worker: int
    life: int
    slots: int
    boxes: int
    stride: int


class EndLife(NamedTuple):
    """trainer -> keeper: end this life. It may take `grace_s` to leave by itself."""

    worker: int
    life: int
    grace_s: float


class StopAll(NamedTuple):
    """trainer -> keeper: end all workers. They may take `grace_s` to leave by themselves."""

    grace_s: float


class KeeperUp(NamedTuple):
    """keeper -> trainer: the keeper runs."""

    pid: int


class LifeStarted(NamedTuple):
    """keeper -> trainer."""

    worker: int
    life: int
    pid: int


class KeeperSignalled(NamedTuple):
    """keeper -> trainer: the keeper got a signal, noted it and went on."""

    number: int
    evidence: Evidence


class RoomLeft(NamedTuple):
    """keeper -> trainer: so many workers fit into memory. `evidence`: only if they are fewer than before."""

    workers: int
    paused: bool
    need: int
    evidence: Evidence | None


Message = RoomLeft | StartLife | EndLife | StopAll | KeeperUp | KeeperSignalled | LifeStarted | Exited | Silence


def encode(message: Message, most: int = MOST_BYTES) -> bytes:
    """The message, pickled, in at most so many bytes. Evidence that is too large loses detail."""
    data = pickle.dumps(message, protocol=5)
    if len(data) <= most or not isinstance(message, Exited | Silence | KeeperSignalled | RoomLeft):
        return data  # (the others are a few numbers)
    evidence = message.evidence
    if not isinstance(evidence, Evidence):
        return data
    for entries, letters in _SHORTER:
        data = pickle.dumps(message._replace(evidence=shortened(evidence, entries, letters)), protocol=5)
        if len(data) <= most:
            return data
    return pickle.dumps(message._replace(evidence=Evidence(pid=evidence.pid)), protocol=5)


def decode(data: bytes) -> Message:
    message: Message = pickle.loads(data)
    return message
