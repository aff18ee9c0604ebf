"""THE CONTRACT between those who want work done and whoever owns the processes that do it.

    a face (loader, pool) ── supervisor ── Host ─ ─ processes ─ ─ Job
                    Result ◄── Finished ◄── ▲ ─ ─ ─ ─ ─ ─ ─ ─ Reply

A host starts workers, carries tasks to them, and reports what happened. It decides nothing. `LocalHost` runs processes
of this machine; `testing/socket_host.py` runs children that it talks to over sockets; another host may run actors of a
cluster.

Four things make the contract: `Host`, which the supervisor and the faces call; `Result`, which a host hands out; `Job`,
which a host calls in its workers; and `JobContext`, which a job calls there. What only some hosts can do stands at the
end, each ability a protocol of its own: a face asks `isinstance` once, and works without.

Each sentence in the docstring of a method here is a promise of the host, and tests/host/test_conformance.py holds every
host to it, by name. Two kinds of sentences are none: what "The caller" has to do, and what explains a `parameter`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from holdfast.core.messages import Event, Leave, Place, What

Space_co = TypeVar("Space_co", covariant=True)
Space_contra = TypeVar("Space_contra", contravariant=True)
Gate_contra = TypeVar("Gate_contra", contravariant=True)

# What a host says -------------------------------------------------------------------------------------------------


class Silence(NamedTuple):
    """An incident that is no event for the ledger: What.SILENT, SIGNALLED, COPIED or ROOM."""

    worker: int
    life: int
    what: What
    code: int
    on: Place
    evidence: object


class Room(NamedTuple):
    """So many workers fit into memory; `paused`: and not even their next batches, for the moment."""

    workers: int
    paused: bool


class Result(Protocol):
    """What became of a task. Whoever made the task knows what it holds."""

    @property
    def failed(self) -> bool:
        """True where the job replied with an error."""

    @property
    def worker(self) -> int:
        """The worker that made it."""

    def open(self, small: int = ..., read: Callable[..., Any] = ...) -> Any:
        """Gives what the job packed. Raises what reading that raises, for instance in a `__setstate__` of the user.
        The caller opens a result once, or discards it. `small`: leaves below so many bytes are copies. `read`: as
        shm.pack.unpack, where the job packed in its own way.
        """

    def discard(self) -> None:
        """Gives its memory back, unopened."""


class WorkerProcess(Protocol):
    """What third parties expect of a worker's process."""

    name: str

    @property
    def pid(self) -> int | None: ...
    @property
    def exitcode(self) -> int | None: ...
    @property
    def has_life(self) -> bool:
        """False for a worker that is not needed for now."""

    def is_alive(self) -> bool: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def join(self, timeout: float | None = None) -> None: ...


class Host(Protocol):
    """Workers, each of which is played by one life after another. Only `ring`, `pid_of` and `close` are called from any
    thread; everything else, from one at a time.
    """

    resting: bool

    @property
    def marks(self) -> Sequence[int]:
        """The last mark that each worker gave with a reply, over all its lives. It is always the same list."""

    @property
    def items(self) -> Mapping[int, int]:
        """How many items each worker gave whose stream has ended, as it counted them."""

    @property
    def ends(self) -> "Mapping[int, bytes | StreamEnd]":
        """What the next life of a worker whose stream has ended must know, or why the worker cannot say. A worker that
        has nothing to say is not there.
        """

    @property
    def workers(self) -> Sequence[WorkerProcess]:
        """One handle per worker, in their order."""

    @property
    def closed(self) -> bool:
        """True before `open`, and after `close`."""

    def open(self) -> None:
        """Opens everything, or raises and leaves nothing open. The caller comes here first, once."""

    def start(self, worker: int, life: int) -> None:
        """Booted follows when the life is ready. BootFailed follows when its job raises in `boot`. Its Exited follows
        when it ends before that. The caller starts a life after the Exited of the one before.
        """

    def send(self, worker: int, life: int, task: int, payload: bytes) -> None:
        """Never blocks. A life does its tasks in the order in which they were sent. A task that is sent to a life that
        has ended is lost.
        """

    def flush(self) -> None:
        """Without it, tasks go out in `wait` at the latest."""

    def take_back(self, worker: int, life: int) -> None:
        """Returned follows for one task that the life has not begun, if there is one. The life never begins it. The
        caller has asked for a host with `take_back`.
        """

    def want(self, task: int) -> None:
        """`task`: the caller is about to wait for it."""

    def abandon_below(self, task: int) -> None:
        """Forgets marks, items and ends of streams. `task`: those before it need not be done."""

    def retire(self, worker: int, life: int) -> None:
        """The life ends after the task it is on, at once if it is on none. Its Exited says RECYCLED. A task that it has
        not begun comes back as Returned, or is still with it when it ends.
        """

    def release(self, worker: int, life: int, grace_s: float) -> None:
        """The life leaves by itself, and its Exited says ASKED. A life that stays is killed after `grace_s`."""

    def kill(self, worker: int, life: int, task: int) -> None:
        """A life that is on this task is killed, and its Exited says ASKED. What it has not begun comes back as
        Returned. Spared follows for a life that is on something else, or on nothing. The caller has asked for a host
        with `take_back`.
        """

    def renew(self) -> None:
        """Ends all workers, and nothing is told of it. The caller starts new lives."""

    def wait(self, timeout_s: float | None) -> Sequence[Event | Silence | Room]:
        """Gives what has happened since the last call. Blocks until something happens, at most `timeout_s`. Meanwhile
        `resting` is True. All that a life finished is told before its Exited. Each life ends in one Exited. Says what
        the life was on, or None where nobody knows. Kills a life that is on one place for longer than it may, and
        its Exited says DEADLINE. Tells Gone of a result that is lost after its Finished; but no result is lost with
        `fixed`.
        """

    def ring(self) -> None:
        """Makes a `wait` return, from any thread."""

    def pid_of(self, worker: int) -> int | None:
        """The process of this worker, or None while it is made and after its end."""

    def leftovers(self) -> Sequence[Silence]:
        """Gives incidents that were not told. The caller has closed the host."""

    def close(self, grace_s: float = ...) -> None:
        """Ends every process within seconds. Does nothing the second time."""


class HostMaker(Protocol):
    """How a face asks for a host. What a host has no use for, it ignores."""

    def __call__(
        self,
        workers: int,
        busy: int,
        job: Any,
        *,
        fork: bool,
        sample_timeout: float | None,
        growth_bytes: int | None,
        need: int = 0,
        take_back: bool = False,
        fixed: bool = False,
        enough: int | None = None,
        facts: str | None = None,
    ) -> Host:
        """`busy`: how many tasks may be out at once. `fork`: workers know what this process knows; or they know only
        what is pickled. `sample_timeout`: a worker that is on one place for longer is killed. `growth_bytes`: what a
        worker may allocate. `need`: what one needed in an earlier epoch. `take_back`: tasks that were sent and not
        begun may be wanted back. `fixed`: no worker can do the work of another. `enough`: batches of a worker that
        may be in memory before it waits, see shm/slot_writer.py. `facts`: a log to which what happens to workers is
        appended at once, see local/keeper/fact_log.py.
        """


# What a job says --------------------------------------------------------------------------------------------------

# What a worker notes of itself while it works: numbers, in `JobContext.words`, each at its place.
#
# STAGE, POSITION and SINCE (time.monotonic_ns) say where it is; whoever writes all three writes SINCE last. SAMPLES and
# RETRIES count. ALLOWED: nanoseconds for the task at hand, where each has its own; 0 for what holds for all, below 0
# for as long as it takes. JOURNALLED, JOURNAL_BYTES and SLOT say what a dead worker has left of its task. BASE:
# private memory when it was ready. KEPT_APART: 1 where the state that a dataset is given is not its own place; so it
# was for an earlier life, and it stays. SPARE: which sample it tries in the place of the one at POSITION, counted from
# 1; 0 for that one itself.
STAGE, POSITION, SINCE, SAMPLES, RETRIES, ALLOWED, JOURNALLED, JOURNAL_BYTES, SLOT, BASE = range(10)
KEPT_APART, SPARE = range(10, 12)
JOB_WORDS = 12


class Words(Protocol):
    """Numbers that a worker writes, and perhaps somebody else reads."""

    def __getitem__(self, at: int, /) -> int: ...
    def __setitem__(self, at: int, value: int, /) -> None: ...


class Recorder(Protocol):
    """What a worker writes of itself all the time."""

    def enter(self, stage: int, position: int = 0, /) -> None:
        """At each change of what it does."""

    def walk(self, stage: int, indices: Iterable[Any], /) -> Iterator[Any]:
        """Goes through the indices: before each, at which position it stands is noted, and since when."""


class Output(Protocol[Space_co]):
    """Where the present task puts what it makes."""

    def space(self) -> Space_co:
        """Is the same for all calls during one task, and empty at the first."""


class JobContext(Recorder, Protocol[Space_co]):
    """What a host gives a job in the worker."""

    @property
    def words(self) -> Words:
        """Begin at 0 with each worker. `KEPT_APART` stays over all its lives."""

    @property
    def output(self) -> Output[Space_co]:
        """Where the present task puts what it makes."""


class ReplyKind(IntEnum):
    """What became of a task. BOOTED, BOOT_FAILED and ABANDONED are the host's own words; a job does not reply them.

    Of EXHAUSTED `bad` is how many batches the stream had, `buffers` how many items, `spec_bytes` a StreamEnd, and in
    the space, if it was asked for, are `where` bytes.
    """

    BOOTED = 1
    BOOT_FAILED = 2
    BATCH = 3
    ERROR = 4
    EXHAUSTED = 5
    ABANDONED = 6
    BATCH_IN_FILE = 7
    ERROR_IN_FILE = 8


class StreamEnd(IntEnum):
    """What EXHAUSTED says of what the next life must know; 0 if nothing."""

    KNOWN = 1
    NOT_KNOWN = 2
    LOST = 3  # something has changed that cannot be given on


class Reply(NamedTuple):
    """What became of one task. The space holds it: `where`, `buffers` and `spec_bytes` are for whoever unpacks it.

    `file`: the descriptor of a batch that did not fit its space. `mark`: a number that the job wants to have kept for
    this worker, to be given to its next life (the place in a stream).
    """

    kind: ReplyKind
    where: int = 0
    buffers: int = 0
    spec_bytes: int = 0
    bad: int = 0
    file: int = -1
    mark: int = 0


class Spent(Exception):
    """This life was refused something that a fresh one may get: the task is to be done by the next."""

    def __init__(self, why: Leave, facts: tuple[str, ...]) -> None:
        super().__init__(why, facts)
        self.why = why
        self.facts = facts


class Job(Protocol[Space_contra]):
    """What workers do. Made in the trainer; forked with the workers, or pickled for them."""

    def boot(self, worker: int, life: int, context: JobContext[Space_contra]) -> None:
        """Is called once in each life, in its process, before `run`."""

    def run(self, payload: memoryview, saved: memoryview, count: int) -> Reply:
        """Is called once for each task, with the payload that was sent. A life that raises `Spent` here ends, and its
        Exited says RECYCLED. `saved`: what the last life had done of this task, `count` samples or items, if the host
        keeps that.
        """


# What only some hosts can do --------------------------------------------------------------------------------------


@runtime_checkable
class LendsSlots(Protocol[Gate_contra]):
    """Results lie in memory that a device can read in place."""

    def lend_through(self, gate: Gate_contra) -> None:
        """Before `open`: no slot is used again before the gate has let it go."""


@runtime_checkable
class KnowsMemory(Protocol):
    """It knows how many workers fit into memory, and tells a Room when that changes."""

    @property
    def room(self) -> Room:
        """As far as is known now."""

    @property
    def need(self) -> int:
        """Bytes that a worker has needed; 0 when that is not known."""


class Figures(Protocol):
    """One worker, as it is now."""

    def figures(self) -> dict[str, float]:
        """What it has done and used so far, over all its lives."""

    def place(self, now: float) -> Place:
        """What it is on, and for how long. `now`: time.monotonic()."""


@runtime_checkable
class HasPulses(Protocol):
    """What each worker does and uses can be looked at any time."""

    @property
    def pulses(self) -> Sequence[Figures]:
        """One per worker, in their order; after `open`."""


@runtime_checkable
class KeepsJournals(Protocol):
    """What a dead worker had done of its task is not lost."""

    def take_journals(self) -> dict[int, tuple[bytes, int]]:
        """By task: the bytes that are left, and how many samples or items they hold."""
