"""`__main__` on its way to processes that cannot import it: of a notebook, `python -c`, stdin, a prompt.

pickle names a class by its module, and a new process imports that module. A script has a file, so a new process imports
it, and everything goes by name. A `__main__` without a file cannot be imported: its classes and functions travel by
value, with cloudpickle. The process that opens them *adopts* the classes: it puts them into its own `__main__`, under
their names. So batches, results and exceptions on their way back go by name again, and the trainer finds its own class.

A forked process has what was in `__main__` at the fork, and needs only what was defined later.
"""

import dis
import io
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any, NoReturn

import cloudpickle

# Globals that travel with a function are worth a warning beyond this: they go to each process, or with each call.
LARGE = 64 << 20
# The exit status of a process of ours in which the script, imported again, started to work. (EX_CONFIG of sysexits.h)
NO_GUARD = 78
GUARD = (
    'put your training under `if __name__ == "__main__":`\n'
    "    seen   a new process imports the script again (start method spawn or forkserver), and there the script began\n"
    "           to start processes of its own\n"
    '    try    def main(): ..., and at the end of the script: if __name__ == "__main__": main()'
)


def is_importable() -> bool:
    """True when a new process can import the trainer's main module again; not from stdin, nor in a notebook."""
    if hasattr(sys, "ps1"):
        return False  # a prompt or a notebook: what was typed is in no file
    main = sys.modules.get("__main__")
    if getattr(getattr(main, "__spec__", None), "name", None) is not None:
        return True  # python -m
    path = getattr(main, "__file__", None)
    return path is not None and os.path.isfile(path)


@contextmanager
def true_main() -> Iterator[None]:
    """While multiprocessing starts a process: it would import whatever calls itself the file of `__main__`."""
    main = sys.modules["__main__"]
    # The name of what a new process imports. multiprocessing has given it to the `__main__` of its own import, which is
    # another one under `holdfast run` or IPython's %run.
    sys.modules["__mp_main__"] = main
    file = getattr(main, "__file__", None)
    if file is None or is_importable():
        yield
        return
    main.__file__ = None  # "<stdin>", say
    try:
        yield
    finally:
        main.__file__ = file


def refuse_without_guard(ours: str) -> None:
    """Before a process is started. Raises where the script is just being imported by a new process.

    One whose name begins with `ours` ends at once instead: its trainer says why.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        if process.name.startswith(ours):
            _leave()
        raise RuntimeError(GUARD)


def _leave() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(NO_GUARD)


class MainModule:
    """What workers know of `__main__`: `all`, when they import it again; what it was at the fork; or nothing."""

    def __init__(self, fork: bool) -> None:
        """Which process: the trainer, just before the keeper is made."""
        self.fork = fork
        self.all = False
        self._known: dict[str, object] = {}
        if fork:
            named = {n: o for n, o in _defined().items() if isinstance(o, FunctionType | type)}
            self._known.update({n: o for n, o in named.items() if o.__module__ == "__main__"})
        else:
            self.all = is_importable()

    def knows(self, thing: Any) -> bool:
        """True when a worker finds the same thing under its name."""
        return _found(self._known, thing)

    def forget(self) -> None:
        """A worker did not find something after all: from now on everything goes by value."""
        self.all = False
        self._known.clear()


def _defined() -> dict[str, object]:
    return vars(sys.modules["__main__"])


def _found(known: dict[str, object], thing: Any) -> bool:
    first, *rest = thing.__qualname__.split(".")
    found: object = known.get(first)
    for name in rest:
        found = getattr(found, name, None)
    return found is thing


class MainPickler(cloudpickle.Pickler):
    """cloudpickle, but what the reader has in its `__main__` goes by name. By itself: what this process has there."""

    def __init__(self, file: Any, protocol: int = 5, buffer_callback: Any = None) -> None:
        super().__init__(file, protocol, buffer_callback)
        self.knows: Callable[[Any], bool] = lambda thing: _found(_defined(), thing)
        self.sent_functions: list[FunctionType] = []
        self._sent_classes: dict[str, type] = {}

    def reducer_override(self, obj: Any) -> Any:
        if issubclass(type(obj), FunctionType | type) and obj.__module__ == "__main__":
            if self.knows(obj):
                return NotImplemented
            if isinstance(obj, FunctionType):
                self.sent_functions.append(obj)
            elif isinstance(obj, type) and _defined().get(obj.__qualname__) is obj:
                self._sent_classes[obj.__qualname__] = obj
        return super().reducer_override(obj)

    def dump_for_adoption(self, content: object, main: MainModule) -> None:
        """For a worker of the trainer's: it adopts the classes of `__main__` that travel with the content."""
        self.knows = main.knows
        # The classes come last: all are in the pickle already by then, and known.
        self.dump(_Adoption(content, self._sent_classes, main.fork))


class _Adoption:
    """Unpickles as its content."""

    def __init__(self, content: object, classes: dict[str, type], fork: bool) -> None:
        self._parts = content, classes, fork

    def __reduce__(self) -> Any:
        return _adopt, self._parts


def _adopt(content: object, classes: dict[str, type], fork: bool) -> object:
    """Which process: the worker. A forked one keeps what it has: the trainer names that by its name."""
    own = _defined()
    own.update({name: kind for name, kind in classes.items() if not fork or name not in own})
    return content


def dumps(value: object) -> bytes:
    """By name what this process has in its `__main__`, by value what can only travel so."""
    file = io.BytesIO()
    MainPickler(file).dump(value)
    return file.getvalue()


# Globals that functions drag along ------------------------------------------------------------------------------------


def warn_of_large_globals(functions: list[FunctionType], weigh: Callable[[object], int]) -> None:
    """Which process: the trainer, when much was sent. `weigh`: bytes of a value as it was sent."""
    weighed: set[str] = set()
    for function in functions:
        for name in _globals_in(function.__code__) - weighed:
            weighed.add(name)
            if name not in function.__globals__ or (size := weigh(function.__globals__[name])) <= LARGE:
                continue
            warnings.warn(
                f"the global {name} ({size >> 20} MiB) is sent to the worker processes, because "
                f"{function.__qualname__} uses it, and __main__ has no file that they could import\n"
                f"    try    put the code into a module (a .py file), or load {name} where the workers use it",
                stacklevel=2,
            )


def _globals_in(code: CodeType) -> set[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return names.union(*(_globals_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
