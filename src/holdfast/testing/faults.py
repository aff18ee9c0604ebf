"""Saboteurs of three lines each, a dataset that meets them, and a storm that kills workers at random.

Every fault is the real thing: the process is killed, the library does crash, the call does hang.
"""

import ctypes
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset, IterableDataset


def _raise() -> None:
    raise ValueError("injected")


def _raise_unpicklable() -> None:
    class Local(Exception):
        def __init__(self, a: object, b: object) -> None:
            super().__init__("injected")
            self.lock = threading.Lock()

    raise Local(1, 2)


def _raise_os_error() -> None:
    raise FileNotFoundError(2, "No such file or directory", "missing.png")


def _stop_iteration() -> None:
    raise StopIteration


def _keyboard_interrupt() -> None:
    raise KeyboardInterrupt


def _sys_exit() -> None:
    sys.exit(3)


def _os_exit() -> None:
    os._exit(5)


def _os_exit_0() -> None:
    os._exit(0)


def _sigkill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _segfault() -> None:
    ctypes.string_at(0)


def _abort() -> None:
    os.abort()


def _sigstop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang() -> None:
    while True:
        time.sleep(60)


def _hang_in_c() -> None:
    """While the GIL is held: no Python thread or handler runs any more."""
    libc = ctypes.PyDLL(None)
    while True:
        libc.sleep(3600)


def _out_of_memory() -> None:
    bytearray(1 << 46)


def _out_of_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    kept = []
    while True:
        kept.append(open(os.devnull))


FAULTS: Mapping[str, Callable[[], None]] = {
    "raise": _raise,
    "raise-unpicklable": _raise_unpicklable,
    "raise-os-error": _raise_os_error,
    "stop-iteration": _stop_iteration,
    "keyboard-interrupt": _keyboard_interrupt,
    "sys-exit": _sys_exit,
    "os-exit": _os_exit,
    "os-exit-0": _os_exit_0,
    "sigkill": _sigkill,
    "sigterm": _sigterm,
    "segfault": _segfault,
    "abort": _abort,
    "sigstop": _sigstop,
    "hang": _hang,
    "hang-holding-gil": _hang_in_c,
    "out-of-memory": _out_of_memory,
    "out-of-descriptors": _out_of_descriptors,
}


def inflict(fault: str) -> None:
    """Do it, here and now, to this process."""
    FAULTS[fault]()


def _first_time(directory: str | None, key: object) -> bool:
    """True once per key; always without a directory. A file, because the process may not live to remember."""
    if directory is None:
        return True
    try:
        os.close(os.open(os.path.join(directory, f"fault-{key}"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Saboteur(Dataset[Any]):
    """A dataset that meets faults: `at` maps an index to the name of one. `once`: a directory, if each comes once."""

    def __init__(self, dataset: Any, at: Mapping[int, str], once: str | None = None) -> None:
        unknown = set(at.values()) - set(FAULTS)
        if unknown:
            raise ValueError(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
        self.dataset = dataset
        self.at = dict(at)
        self.once = once

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        if index in self.at and _first_time(self.once, index):
            inflict(self.at[index])
        return sample


class StreamSaboteur(IterableDataset[Any]):
    """The same for an iterable dataset: `at` maps an item's number in its worker's stream to a fault."""

    def __init__(self, dataset: Any, at: Mapping[int, str], once: str | None = None) -> None:
        self.dataset = dataset
        self.at = dict(at)
        self.once = once

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self.dataset):
            if number in self.at and _first_time(self.once, f"{number}-{item}"):
                inflict(self.at[number])
            yield item


class storm:
    """`with storm(pids, every_s=0.08)`: a process from `pids()` is killed again and again, by a thread of ours."""

    def __init__(
        self,
        pids: Callable[[], list[int]],
        every_s: float = 0.08,
        signals: tuple[int, ...] = (signal.SIGKILL,),
        seed: int = 0,
    ) -> None:
        self._pids = pids
        self._every_s = every_s
        self._signals = signals
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._blow, daemon=True)
        self.kills = 0

    def _blow(self) -> None:
        while not self._over.wait(self._every_s):
            pids = self._pids()
            if not pids:
                continue
            try:
                os.kill(self._random.choice(pids), self._random.choice(self._signals))
                self.kills += 1
            except ProcessLookupError:
                continue  # it had died already

    def __enter__(self) -> "storm":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
