"""THE CONTRACT between those who want work done and whoever owns the processes that do it.

    a face (loader, pool) ── supervisor ── Host ─ ─ processes ─ ─ Job
                    Result ◄── Finished ◄── ▲ ─ ─ ─ ─ ─ ─ ─ ─ Reply

A host starts workers, carries tasks to them, and reports what happened. It decides nothing. `LocalHost` runs processes
of this machine; `testing/socket_host.py` runs children that it talks to over sockets; another host may run actors of a
cluster.

Four things make the contract: `Host`, which the supervisor and the faces call; `Result`, which a host hands out; `Job`,
which a host calls in its workers; and `JobContext`, which a job calls there. What only some hosts can do stands at the
end, each ability a protocol of its own: a face asks `isinstance` once, and works without.

Each sentence in a docstring of `Host`, `Result`, `Job` and `JobContext` is a promise, and a test of that name in
tests/host/test_conformance.py holds every host to it.
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
        """The job replied with an error, and that is what the result holds."""

    @property
    def worker(self) -> int:
        """The worker that made it."""

    def open(self, small: int = ..., read: Callable[..., Any] = ...) -> Any:
        """What the job packed. Leaves below `small` bytes are copies. What reading raises, for instance the
        `__setstate__` of the user, is raised here. `read`: as shm.pack.unpack, where the job packed in its own way.
        """

    def discard(self) -> None:
        """Nobody opens this result: its memory goes back."""


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
    """Everything is called in one thread at a time, but for `ring`, `pid_of` and `close`."""

    resting: bool
    """True while `wait` waits, and nothing is half done: a signal handler may raise then. The caller sets it back."""

    @property
    def marks(self) -> Sequence[int]:
        """The last mark that each worker gave with a reply, over all its lives. It is always the same list."""

    @property
    def items(self) -> Mapping[int, int]:
        """How many items each worker gave whose stream has ended, as it counted them."""

    @property
    def ends(self) -> "Mapping[int, bytes | StreamEnd]":
        """What the next life of such a worker must know, or why the worker cannot say. A worker is not there if it has
        nothing to say.
        """

    @property
    def workers(self) -> Sequence[WorkerProcess]:
        """One handle per worker, in their order."""

    @property
    def closed(self) -> bool:
        """True before `open`, and once all processes have been ended."""

    def open(self) -> None:
        """Comes first, once. It opens everything, or raises and leaves nothing open."""

    def start(self, worker: int, life: int) -> None:
        """A new life begins. The worker need not be up when this returns: Booted or BootFailed follows, or Exited."""

    def send(self, worker: int, life: int, task: int, payload: bytes) -> None:
        """Never blocks. Tasks are done in the order in which they were sent. A task that is sent to a dying life is
        lost, and the Exited of that life follows.
        """

    def flush(self) -> None:
        """What was sent may wait until `flush` or `wait` is called."""

    def take_back(self, worker: int, life: int) -> None:
        """A Returned follows if the life has a task that it has not begun. It never begins that one."""

    def want(self, task: int) -> None:
        """The caller is about to wait for this task."""

    def abandon_below(self, task: int) -> None:
        """Nobody wants the tasks before this one: they need not be done. Marks and ends of streams begin anew."""

    def retire(self, worker: int, life: int) -> None:
        """The life leaves after the task it is on, and its Exited follows. Tasks that it has not begun come back as
        Returned, or stay with it until the Exited.
        """

    def release(self, worker: int, life: int, grace_s: float) -> None:
        """The life has no more tasks, and leaves by itself. After `grace_s` it is killed. Its Exited follows."""

    def kill(self, worker: int, life: int, task: int) -> None:
        """If the life is on this task, it is killed, and its Exited follows; what it had not begun comes back as
        Returned. If it is not on this task, Spared follows.
        """

    def renew(self) -> None:
        """All workers end, without a report. `start` of each follows."""

    def wait(self, timeout_s: float | None) -> Sequence[Event | Silence | Room]:
        """What happened since the last call. It blocks until something happens, at most `timeout_s`. All that a life
        finished is told before its Exited. A life ends in one Exited. `Exited.on` is what the life was on, or None
        where that is not known. A result that is lost after its Finished is told as Gone. With `fixed` none is lost.
        """

    def ring(self) -> None:
        """From any thread: a `wait` returns, with or without an event."""

    def pid_of(self, worker: int) -> int | None:
        """The process of this worker. None while it is made, and after its end."""

    def leftovers(self) -> Sequence[Silence]:
        """After `close`: incidents that were not told."""

    def close(self, grace_s: float = ...) -> None:
        """Comes last, from any thread, perhaps more than once. Every process has ended when it returns, within
        seconds.
        """


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
    ) -> Host:
        """`busy`: how many tasks may be out at once. `fork`: workers know what this process knows; or they know only
        what is pickled. `sample_timeout`: a worker that is on one place for longer is killed. `growth_bytes`: what a
        worker may allocate. `need`: what one needed in an earlier epoch. `take_back`: tasks that were sent and not
        begun may be wanted back. `fixed`: no worker can do the work of another. `enough`: batches of a worker that
        may be in memory before it waits, see shm/slot_claims.py.
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
        """Room for this task's reply. The same for all calls during one task, and empty at the first."""


class JobContext(Recorder, Protocol[Space_co]):
    """What a host gives a job in the worker."""

    @property
    def words(self) -> Words:
        """What the worker notes of itself. It begins at 0 with each life, but for counts and `KEPT_APART`."""

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
        """Comes first in each life, once, in the worker. What it raises is a BootFailed."""

    def run(self, payload: memoryview, saved: memoryview, count: int) -> Reply:
        """Does one task, of which the payload says what it is. `saved` is what the last life had done of it, `count`
        samples, if the host keeps that. It raises `Spent`, and nothing that user code raised.
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
