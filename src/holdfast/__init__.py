"""Holdfast: data loading for PyTorch with processes that are allowed to die.

errors, policy     what can be raised, and what can be set
core/              decides: the ledger, and the modules that it asks; no I/O, no clock
shm/               shared memory: who owns which bytes
system/            what only asks Linux: /proc, control groups, prctl, signals
remote_exception   exceptions on their way from a worker to the trainer
local/             workers as processes of this machine: protocol, worker, keeper, trainer
diagnose/          why it happened: findings, report
loader/            the DataLoader, where iterator.py is the main path; CachedDataset and FileCache
pool/              the Pool: any calls, in processes that may die
launch/            spawn: N ranks, the first failure named, all started again if you wish
testing/           faults to inject, for our tests and yours; a second host, over sockets
cli/               the command line, which __main__ runs

An import points one way, down this list: a test keeps it so. core/, system/, local/, launch/ and cli/ have maps of
their own.
"""

from holdfast.diagnose.incident import Incident
from holdfast.diagnose.report import Report
from holdfast.errors import (
    BatchTimeout,
    CannotSend,
    FileShared,
    HoldfastError,
    LoaderTorn,
    PolicyError,
    PoolBroken,
    RemoteTraceback,
    SampleError,
    StreamBroken,
    TaskLost,
    TaskTimeout,
    TooManyBad,
    WorkerLost,
    WrongProcess,
)
from holdfast.launch.attempts import Ranks, spawn
from holdfast.launch.cause import RankExited, RankRaised
from holdfast.loader.cached import CachedDataset
from holdfast.loader.dataloader import DataLoader
from holdfast.loader.files import FileCache
from holdfast.policy import Policy
from holdfast.pool.executor import Pool
from holdfast.pool.progress import Progress

__version__ = "0.1.0"

__all__ = [
    "BatchTimeout",
    "FileShared",
    "CachedDataset",
    "CannotSend",
    "DataLoader",
    "FileCache",
    "HoldfastError",
    "Incident",
    "LoaderTorn",
    "Policy",
    "PolicyError",
    "RankExited",
    "RankRaised",
    "Ranks",
    "Pool",
    "PoolBroken",
    "Progress",
    "RemoteTraceback",
    "Report",
    "SampleError",
    "StreamBroken",
    "TaskLost",
    "TaskTimeout",
    "TooManyBad",
    "WorkerLost",
    "WrongProcess",
    "spawn",
]
