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

from importlib import import_module
from sys import modules
from typing import TYPE_CHECKING

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
from holdfast.policy import Policy

if TYPE_CHECKING:
    from holdfast.diagnose.incident import Incident
    from holdfast.diagnose.report import Report
    from holdfast.launch.attempts import Ranks, spawn
    from holdfast.launch.cause import RankExited, RankRaised
    from holdfast.loader.cached import CachedDataset
    from holdfast.loader.dataloader import DataLoader
    from holdfast.loader.files import FileCache
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

# These are imported when somebody first asks for them: most need torch, which takes seconds to import, and commands
# that only read do not use it.
_MODULES = {
    "CachedDataset": "holdfast.loader.cached",
    "DataLoader": "holdfast.loader.dataloader",
    "FileCache": "holdfast.loader.files",
    "Incident": "holdfast.diagnose.incident",
    "Pool": "holdfast.pool.executor",
    "Progress": "holdfast.pool.progress",
    "RankExited": "holdfast.launch.cause",
    "RankRaised": "holdfast.launch.cause",
    "Ranks": "holdfast.launch.attempts",
    "Report": "holdfast.diagnose.report",
    "spawn": "holdfast.launch.attempts",
}

if not TYPE_CHECKING:  # a type checker must find out which names there are not

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=modules[__name__])
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value  # from now on it is found without this function
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
