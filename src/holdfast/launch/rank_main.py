"""The rank's side: what is set up before the user's function runs, and the rank's last words.

No rank outlives the trainer. PDEATHSIG would fire on the death of the parent *thread*, and a thread of our own would
not run while native code holds the GIL. So each rank holds the reading end of a pipe whose writing end only the trainer
has, and has asked the kernel to send SIGKILL when that end is closed, by whatever end of the trainer.
"""

import atexit
import faulthandler
import fcntl
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, Literal, NamedTuple

import cloudpickle

from holdfast.errors import CannotSend
from holdfast.local.trainer.keeper_birth import Surroundings, main_is_importable
from holdfast.remote_exception import Raised, capture, text_of
from holdfast.shm.memory import Memory, new_file
from holdfast.system import linux
from holdfast.system.linux import limit_growth
from holdfast.system.signals import SenderNote

# A page in which the sender of a signal is noted, and in its last byte that the rank has come as far as our own code.
PAGE = 4096
ENTERED = PAGE - 1
# Signals whose sender is worth knowing; they do what they always do.
TOLD_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# An exception that carries more than this travels as text.
MOST_BYTES = 4 << 20
HEAD = struct.Struct("<Q")


class Said(NamedTuple):
    """A rank's last words. "exit": by sys.exit; "boot": the function did not even arrive."""

    what: Literal["done", "raised", "exit", "boot"]
    at_ns: int
    code: int = 0
    """The exit status that follows, unless the process is stopped on its way out."""
    raised: Raised | None = None


class Ends(NamedTuple):
    """Descriptors of a rank's own."""

    out: int
    err: int
    words: int
    alive: int
    crash: int
    page: int


class Card:
    """All that a rank is told at its start, but for the function."""

    def __init__(
        self,
        rank: int,
        method: str,
        ends: Ends,
        environment: Mapping[str, str],
        threads: int | None,
        growth: int | None,
    ) -> None:
        """`threads`: None when the user has said how many. `growth`: bytes that it may allocate, if that is limited."""
        self._rank = rank
        self._method = method
        self._ends = ends
        self._environment = dict(environment)
        self._threads = threads
        self._growth = growth
        self._surroundings: Surroundings | None = None

    def __getstate__(self) -> Any:
        assert get_spawning_popen() is not None, "a card travels with a new process only"
        ends = [DupFd(fd) for fd in self._ends]
        surroundings = Surroundings() if self._method == "forkserver" else None  # the server may be older than they
        return self._rank, self._method, ends, self._environment, self._threads, self._growth, surroundings

    def __setstate__(self, state: Any) -> None:
        self._rank, self._method, ends, self._environment, self._threads, self._growth, self._surroundings = state
        self._ends = Ends(*(fd.detach() for fd in ends))

    def enter(self) -> int:
        """The rank, ready for the user's function."""
        self._pid = os.getpid()
        for fd in self._ends:
            os.set_inheritable(fd, False)
        die_with(self._ends.alive)
        self._take_output()
        if self._surroundings is not None:
            self._surroundings.enter()
        os.environ.clear()
        os.environ.update(self._environment)
        if self._threads is not None and self._method != "spawn" and "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(self._threads)  # it has read OMP_NUM_THREADS long ago
        self._note_trouble()
        return self._rank

    def _take_output(self) -> None:
        for number, fd in ((1, self._ends.out), (2, self._ends.err)):
            os.dup2(fd, number)
            os.close(fd)
        # A fork has the trainer's, which may be a notebook's, or a test's; a fresh interpreter perhaps none.
        if self._method == "fork" or None in (sys.stdout, sys.stderr):
            sys.stdout = sys.__stdout__ = _stream(1)  # type: ignore[misc]
            sys.stderr = sys.__stderr__ = _stream(2)  # type: ignore[misc]
        else:
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what is printed is not lost

    def _note_trouble(self) -> None:
        """A crash leaves its stack, a signal its sender; for this process alone, not for those it forks."""
        before = faulthandler.is_enabled()
        faulthandler.enable(file=self._ends.crash, all_threads=True)
        faulthandler.register(linux.DUMP_SIGNAL, file=self._ends.crash, all_threads=True)
        memory = Memory(self._ends.page, PAGE)
        memory.view[ENTERED] = 1
        tell_senders(memory)
        os.register_at_fork(after_in_child=faulthandler.enable if before else faulthandler.disable)

    def limit(self) -> None:
        """Just before the function is called: imports and arguments do not count."""
        if self._growth is not None:
            limit_growth(self._growth)

    def say(self, said: Said) -> None:
        """Last words: the trainer hears them now, however long the process takes to end."""
        if os.getpid() != self._pid:
            return  # a process that the function forked, and that comes back from it, does not speak for the rank
        body = pickle.dumps(said)
        if len(body) > MOST_BYTES and said.raised is not None:
            body = pickle.dumps(said._replace(raised=replace(said.raised, pickled=None, parts=None)))
        body = HEAD.pack(len(body)) + body
        while body:
            body = body[os.write(self._ends.words, body) :]


def _stream(number: int) -> Any:
    return open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def tell_senders(memory: Memory) -> None:
    """From now on who sends a signal is noted there. It stays mapped to the very end: a signal may come as late."""
    SenderNote(memory, 0, ENTERED).install(TOLD_SIGNALS)
    atexit.register(id, memory)


def die_with(alive: int) -> None:
    """SIGKILL for this process, from the kernel, when the other end of the pipe `alive` is closed."""
    try:
        fcntl.fcntl(alive, fcntl.F_SETSIG, int(signal.SIGKILL))
        fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:  # a kernel that is not quite Linux
        threading.Thread(target=_die_at_end_of, args=(alive,), name="holdfast-alive", daemon=True).start()
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    if poll.poll(0):  # it has happened already
        os._exit(1)


def _die_at_end_of(alive: int) -> None:
    os.read(alive, 1)
    os.kill(os.getpid(), signal.SIGKILL)


# The function and its arguments on their way into a new process.
#
# Pickle names a function by its module. That cannot work where the new process has no such module: `__main__` of a
# notebook, of `python -`, of a prompt; nor for lambdas and closures. Those travel by value, with cloudpickle. What is
# shared already (queues, locks, shared tensors) stays shared: multiprocessing's own way of pickling serves throughout.


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
        if main_is_importable():
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


def live(card: Card, parcel: ShippedFunction) -> None:
    """A rank's whole life; what ends it is told before it ends."""
    rank = card.enter()
    try:
        fn, args = parcel.open()
    except BaseException as error:  # user code: importing, unpickling
        card.say(Said("boot", time.monotonic_ns(), 1, capture(error)))
        raise SystemExit(1) from None
    card.limit()
    try:
        fn(rank, *args)
    except SystemExit as error:
        if error.code not in (None, 0):
            code = error.code & 0xFF if isinstance(error.code, int) else 1
            card.say(Said("exit", time.monotonic_ns(), code, capture(error)))
        raise
    except BaseException as error:  # user code
        card.say(Said("raised", time.monotonic_ns(), 1, capture(error)))
        raise SystemExit(1) from None
    card.say(Said("done", time.monotonic_ns()))
