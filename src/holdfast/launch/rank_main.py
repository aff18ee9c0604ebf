"""The rank's side: what travels to it, what it sets up before the user's function, and its last words.

No rank outlives the trainer. PDEATHSIG would fire on the death of the parent *thread*, and a thread of ours would not
run while native code holds the GIL. So each rank holds the reading end of a pipe, its lifeline. Only the trainer has
the writing end. The rank asks the kernel for SIGKILL when that end closes, however the trainer ends.
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
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, Literal, NamedTuple

from holdfast.errors import CannotSend
from holdfast.local.trainer.keeper_birth import Surroundings
from holdfast.remote_exception import Raised, capture, text_of
from holdfast.shm.memory_file import Memory, new_file
from holdfast.shm.pack import Packer, unpack
from holdfast.shm.slot_writer import FileSpace
from holdfast.system import linux
from holdfast.system.signal_origin import SenderNote

# A page in which the rank notes who sent it a signal. Its last byte is 1 once the rank has reached our code.
PAGE = 4096
ENTERED = PAGE - 1
# Signals whose sender the rank notes. They do what they always do.
SIGNALS_WITH_SENDER = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# An exception of more bytes than this travels as text.
MOST_BYTES = 4 << 20
HEAD = struct.Struct("<Q")


class LastWords(NamedTuple):
    """What a rank says at its end. "exit": sys.exit was called. "boot": the function could not be opened."""

    what: Literal["done", "raised", "exit", "boot"]
    at_ns: int
    code: int = 0
    """The exit status that follows, unless the process is stopped on its way out."""
    raised: Raised | None = None


class Descriptors(NamedTuple):
    """The rank's own descriptors. `words`: the pipe of its last words."""

    out: int
    err: int
    words: int
    lifeline: int
    crash: int
    page: int


class RankSetup:
    """What a rank gets at its start, besides the function."""

    def __init__(
        self,
        rank: int,
        method: str,
        descriptors: Descriptors,
        environment: Mapping[str, str],
        threads: int | None,
        growth_bytes: int | None,
    ) -> None:
        """`threads`: None if the user has set their number. `growth_bytes`: what it may allocate; None: no limit."""
        self.rank = rank
        self.method = method
        self.descriptors = descriptors
        self.environment = dict(environment)
        self._threads = threads
        self._growth_bytes = growth_bytes
        self._surroundings: Surroundings | None = None

    def __getstate__(self) -> Any:
        assert get_spawning_popen() is not None, "it travels with a new process only"
        fds = [DupFd(fd) for fd in self.descriptors]
        surroundings = Surroundings() if self.method == "forkserver" else None  # the server may be older than they
        return self.rank, self.method, fds, self.environment, self._threads, self._growth_bytes, surroundings

    def __setstate__(self, state: Any) -> None:
        self.rank, self.method, fds, self.environment, self._threads, self._growth_bytes, self._surroundings = state
        self.descriptors = Descriptors(*(fd.detach() for fd in fds))

    def enter(self) -> int:
        """Make this process ready for the user's function; gives the rank's number."""
        self._pid = os.getpid()
        for fd in self.descriptors:
            os.set_inheritable(fd, False)
        die_with_trainer(self.descriptors.lifeline)
        self._take_output()
        if self._surroundings is not None:
            self._surroundings.enter()
        os.environ.clear()
        os.environ.update(self.environment)
        if self._threads is not None and self.method != "spawn" and "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(self._threads)  # torch read OMP_NUM_THREADS when it was imported
        self._note_trouble()
        return self.rank

    def _take_output(self) -> None:
        for number, fd in ((1, self.descriptors.out), (2, self.descriptors.err)):
            os.dup2(fd, number)
            os.close(fd)
        # A fork has the trainer's streams, which may be a notebook's or a test's. A fresh interpreter may have none.
        if self.method == "fork" or None in (sys.stdout, sys.stderr):
            sys.stdout = sys.__stdout__ = _stream(1)  # type: ignore[misc]
            sys.stderr = sys.__stderr__ = _stream(2)  # type: ignore[misc]
        else:
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a kill loses nothing that was printed

    def _note_trouble(self) -> None:
        """From now on a crash leaves its stack and a signal its sender: in this process, not in those that it forks."""
        before = faulthandler.is_enabled()
        faulthandler.enable(file=self.descriptors.crash, all_threads=True)
        faulthandler.register(linux.DUMP_SIGNAL, file=self.descriptors.crash, all_threads=True)
        memory = Memory(self.descriptors.page, PAGE)
        memory.view[ENTERED] = 1
        note_senders(memory)
        os.register_at_fork(after_in_child=faulthandler.enable if before else faulthandler.disable)

    def limit(self) -> None:
        """Limit its memory. This comes just before the function is called: imports and arguments do not count."""
        if self._growth_bytes is not None:
            linux.limit_growth(self._growth_bytes)

    def say(self, last_words: LastWords) -> None:
        """Send the last words. The trainer has them now, however long the process takes to end."""
        if os.getpid() != self._pid:
            return  # the function forked this process, and it came back from the function: it is not the rank
        body = pickle.dumps(last_words)
        raised = last_words.raised
        if len(body) > MOST_BYTES and raised is not None:
            body = pickle.dumps(last_words._replace(raised=replace(raised, pickled=None, parts=None)))
        body = HEAD.pack(len(body)) + body
        while body:
            body = body[os.write(self.descriptors.words, body) :]


def _stream(number: int) -> Any:
    return open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def note_senders(memory: Memory) -> None:
    """From now on this process notes there who sends it a signal. The memory stays mapped until the process ends."""
    SenderNote(memory, 0, ENTERED).install(SIGNALS_WITH_SENDER)
    atexit.register(id, memory)


def die_with_trainer(lifeline: int) -> None:
    """The kernel sends this process SIGKILL when the other end of the pipe `lifeline` is closed."""
    try:
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, int(signal.SIGKILL))
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:  # a system that imitates Linux does not know this
        threading.Thread(target=_die_at_end_of, args=(lifeline,), name="holdfast-lifeline", daemon=True).start()
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    if poll.poll(0):  # the trainer has ended already
        os._exit(1)


def _die_at_end_of(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGKILL)


# The function and its arguments on their way into a new process.
#
# They travel as a loader's job does: by name what the rank can import, by value what it cannot (shm/main_module.py).
# What is shared already stays shared: queues, locks, shared tensors.


class ShippedFunction:
    """The function and its arguments, for one rank. A forked rank has them as they are; for others multiprocessing
    pickles them while it starts the process.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._content: tuple[Callable[..., Any], tuple[Any, ...]] | None = (fn, args)
        self._fd, self._size, self._spec = -1, 0, (0, 0, 0)

    def __getstate__(self) -> Any:
        """Which process: the trainer, while multiprocessing starts a rank: its own objects pickle only then."""
        assert get_spawning_popen() is not None, "it travels with a new process only"
        self._fd = new_file("function", 0)  # not a pipe: the trainer need not wait until the rank has read it
        try:
            self._write()
        except BaseException:
            self.close()
            raise
        return DupFd(self._fd), self._size, self._spec

    def __setstate__(self, state: Any) -> None:
        fd, self._size, self._spec = state
        self._content, self._fd = None, fd.detach()

    def close(self) -> None:
        """Which process: the trainer, once the rank has its own descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def open(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Which process: the rank. Raises what unpickling raises."""
        if self._content is None:
            memory = Memory(self._fd, self._size, private=True)
            self.close()
            self._content = unpack(memory.view, *self._spec, memory.export)
        assert self._content is not None
        return self._content

    def _write(self) -> None:
        space = FileSpace(self._fd)
        try:
            self._spec = Packer(spawning=True).pack(self._content, space)
        except Exception as error:
            raise CannotSend(
                f"the function or its arguments cannot be sent to a rank: {type(error).__name__}: {text_of(error)}\n"
                "    seen   pickle and cloudpickle refused them\n"
                '    try    make in the rank what cannot be sent (files, locks, connections); start_method="fork" '
                "sends nothing"
            ) from error
        self._size = space.size


def run_rank(setup: RankSetup, function: ShippedFunction) -> None:
    """A rank's whole life. It tells the trainer why it ends before it ends."""
    rank = setup.enter()
    try:
        fn, args = function.open()
    except BaseException as error:  # user code: importing, unpickling
        setup.say(LastWords("boot", time.monotonic_ns(), 1, capture(error)))
        raise SystemExit(1) from None
    setup.limit()
    try:
        fn(rank, *args)
    except SystemExit as error:
        if error.code not in (None, 0):
            code = error.code & 0xFF if isinstance(error.code, int) else 1
            setup.say(LastWords("exit", time.monotonic_ns(), code, capture(error)))
        raise
    except BaseException as error:  # user code
        setup.say(LastWords("raised", time.monotonic_ns(), 1, capture(error)))
        raise SystemExit(1) from None
    setup.say(LastWords("done", time.monotonic_ns()))
