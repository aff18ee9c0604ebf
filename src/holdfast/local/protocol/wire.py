"""What trainer, keeper and workers say to each other.

trainer -> worker   a pipe per life: TASK records. The task itself lies in a letter box.
worker -> trainer   one pipe for all: RECORDs. A write of up to PIPE_BUF bytes is whole or not at all, so no lock is
                    needed and a killed writer leaves nothing half said. What a worker wrote before its death is in
                    the pipe before its keeper tells of the death: the trainer drains the pipe first.
worker -> trainer   one socket for all: descriptors of files too large for a slot, ahead of their RECORD.
trainer <-> keeper  a sequenced-packet socket: the tuples below, pickled, with descriptors beside them.
"""

import pickle
import struct
from typing import NamedTuple

from holdfast.core.messages import Cause, Place, What
from holdfast.system.evidence import Evidence, shortened

# task, letter box, payload bytes, journal bytes behind it, samples in it. Below 0, the box says where the payload is.
TASK = struct.Struct("<5q")
ELSEWHERE = struct.Struct("<3q")  # the trainer's pid, a descriptor there, and the inode of that file
RECORD = struct.Struct("<10q")  # a ReplyKind, worker, life, task, slot, where, buffers, spec bytes, bad, mark
MAGIC = 0x484F4C44 << 8  # in the high bytes of `kind`: a stray write is noticed

# Descriptors that go with a StartLife.
DESCRIPTORS = 3
# A message between trainer and keeper is at most so long: the socket takes it whole or not at all.
MOST_BYTES = 64 << 10
# Entries and letters that are left of evidence that would make it longer: as few as it takes.
_SHORTER = ((64, 16 << 10), (16, 8 << 10), (16, 1 << 10), (9, 100))


class StartLife(NamedTuple):
    """trainer -> keeper, with descriptors: task pipe, memory file, crash file."""

    worker: int
    life: int
    slots: int
    boxes: int
    stride: int


class EndLife(NamedTuple):
    """trainer -> keeper: this life is not wanted any more; it may take `grace_s` to leave by itself."""

    worker: int
    life: int
    grace_s: float


class StopAll(NamedTuple):
    """trainer -> keeper: no more work; workers may take `grace_s` to leave by themselves."""

    grace_s: float


class KeeperUp(NamedTuple):
    """keeper -> trainer: it runs."""

    pid: int


class LifeStarted(NamedTuple):
    """keeper -> trainer."""

    worker: int
    life: int
    pid: int


class LifeEnded(NamedTuple):
    """keeper -> trainer."""

    worker: int
    life: int
    at: float
    cause: Cause
    code: int
    on: Place
    evidence: Evidence


class LifeQuiet(NamedTuple):
    """keeper -> trainer: What.SILENT, SIGNALLED or COPIED of a worker that lives on."""

    worker: int
    life: int
    what: What
    code: int
    on: Place
    evidence: Evidence


class KeeperSignalled(NamedTuple):
    """keeper -> trainer: it was sent a signal, noted that and went on."""

    number: int
    evidence: Evidence


class RoomLeft(NamedTuple):
    """keeper -> trainer: so many workers fit into memory. `evidence` where they are fewer than before."""

    workers: int
    paused: bool
    need: int
    evidence: Evidence | None


Message = RoomLeft | StartLife | EndLife | StopAll | KeeperUp | KeeperSignalled | LifeStarted | LifeEnded | LifeQuiet


def encode(message: Message, most: int = MOST_BYTES) -> bytes:
    """In at most so many bytes: evidence that is too large loses detail."""
    data = pickle.dumps(message, protocol=5)
    if len(data) <= most or not isinstance(message, LifeEnded | LifeQuiet | KeeperSignalled | RoomLeft):
        return data  # (the others are a few numbers)
    evidence = message.evidence
    if evidence is None:
        return data
    for entries, letters in _SHORTER:
        data = pickle.dumps(message._replace(evidence=shortened(evidence, entries, letters)), protocol=5)
        if len(data) <= most:
            return data
    return pickle.dumps(message._replace(evidence=Evidence(pid=evidence.pid)), protocol=5)


def decode(data: bytes) -> Message:
    message: Message = pickle.loads(data)
    return message
