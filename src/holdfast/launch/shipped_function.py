"""The function and its arguments on their way into a new process.

Pickle names a function by its module. That cannot work where the new process has no such module: `__main__` of a
notebook, of `python -`, of a prompt; nor for lambdas and closures. Those travel by value, with cloudpickle. What is
shared already (queues, locks, shared tensors) stays shared: multiprocessing's own way of pickling is kept throughout.
"""

import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import cloudpickle

from holdfast.errors import CannotSend
from holdfast.remote_exception import text_of
from holdfast.shm.memory import new_file


def main_has_a_file() -> bool:
    """False where a new process cannot import `__main__` again."""
    main = sys.modules.get("__main__")
    if getattr(getattr(main, "__spec__", None), "name", None) is not None:
        return True  # python -m
    path = getattr(main, "__file__", None)
    return path is not None and os.path.isfile(path)


class ShippedFunction:
    """One rank's copy. Forked ranks open it as it is; for others it is pickled while their process is being started."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._content: tuple[Callable[..., Any], tuple[Any, ...]] | None = (fn, args)
        self._fd = -1

    def __getstate__(self) -> Any:
        """Which process: the trainer, while multiprocessing starts a rank: only then its own things pickle."""
        assert get_spawning_popen() is not None, "a parcel travels with a new process only"
        self._fd = new_file("parcel", 0)  # a file, not the pipe: the trainer need not wait until the rank has read it
        try:
            self._write()
        except BaseException:
            self.close()
            raise
        return DupFd(self._fd)

    def __setstate__(self, fd: Any) -> None:
        self._content, self._fd = None, fd.detach()

    def close(self) -> None:
        """Which process: the trainer, once the rank has its own descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def open(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Which process: the rank. Raises whatever unpickling raises."""
        if self._content is None:
            os.lseek(self._fd, 0, os.SEEK_SET)
            with os.fdopen(self._fd, "rb") as file:
                self._content = pickle.load(file)
        return self._content

    def _write(self) -> None:
        if main_has_a_file():
            try:
                self._dump(ForkingPickler)
                return
            except (pickle.PicklingError, AttributeError, TypeError):
                os.ftruncate(self._fd, 0)  # cloudpickle may be able to
        try:
            self._dump(_by_value)
        except Exception as error:
            raise CannotSend(
                f"the function or its arguments cannot be sent to a rank: {type(error).__name__}: {text_of(error)}\n"
                "    seen   pickle and cloudpickle refused them\n"
                '    try    make in the rank what cannot be sent (files, locks, connections); start_method="fork" '
                "sends nothing"
            ) from error

    def _dump(self, pickler: Callable[..., Any]) -> None:
        os.lseek(self._fd, 0, os.SEEK_SET)
        with os.fdopen(self._fd, "wb", closefd=False) as file:
            pickler(file).dump(self._content)


def _by_value(file: Any) -> Any:
    shared: dict[type, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    pickler = cloudpickle.Pickler.__new__(cloudpickle.Pickler)
    # Before __init__, which alone reads it: the class has a table of its own.
    pickler.dispatch_table = ChainMap(shared, cloudpickle.Pickler.dispatch_table)
    pickler.__init__(file)
    return pickler
