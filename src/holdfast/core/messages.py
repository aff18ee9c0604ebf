"""Everything that crosses a boundary inside Holdfast: events (past tense) go in, actions (imperative) come out.

A *worker* is a number from 0 on; each process that plays it is a *life*. A *task* is one batch; its number is its
*turn*. A sample's place in its batch is its *position*. `result` fields are opaque here: whoever made a task knows
what they hold.

Named tuples, because two events and two actions are made for every batch: 0.3 us each against 0.6 us for a frozen
dataclass, and as immutable.
"""

from enum import IntEnum
from typing import NamedTuple


class Stage(IntEnum):
    """What a worker is doing; written into its pulse."""

    BOOT = 0  # forked; unpickling the dataset
    INIT = 1  # in worker_init_fn
    IDLE = 2
    FETCH = 3  # in dataset[index], one sample: the position says which
    FETCH_MANY = 4  # in dataset.__getitems__: no single sample can be blamed
    COLLATE = 5
    SEND = 6  # writing the batch into its slot
    REPLAY = 7  # an iterable dataset is being brought back to its place
    ANNOUNCE = 8  # its batch is complete; the trainer does not take the word of it


class Cause(IntEnum):
    """How a life ended."""

    SIGNAL = 0  # `code` is the signal
    EXIT = 1  # `code` is the exit status
    DEADLINE = 2  # we killed it: past sample_timeout
    MEMORY = 3  # we killed it: past worker_memory
    KEEPER = 4  # its keeper died or was replaced; nobody's fault
    RECYCLED = 5  # it left for a fresh one: `code` is the `Leave`; nobody's fault
    UNBORN = 6  # the system refused a process; `code` is the errno
    PRESSURE = 7  # we killed it: the memory of all was almost used up; nobody's fault
    ASKED = 8  # we ended it: its task was withdrawn, or it had done its share of tasks


class Leave(IntEnum):
    """Why a worker makes room for a fresh one. In the middle of a batch only after it was refused something."""

    ASKED = 1  # fewer workers are wanted
    MEMORY = 2  # it has grown to its mark, or an allocation was refused
    DESCRIPTORS = 3
    PROCESSES = 4  # a thread or a process was refused to it
    UNFIT = 5  # it could not start, and has said so


class Place(NamedTuple):
    """What a worker was on, from its pulse. `task`: -1 where it was on none."""

    task: int
    position: int
    stage: Stage
    seconds: float


# Events ------------------------------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """The supervisor is ready to act; `at` is its clock in seconds."""

    at: float


class Drawn(NamedTuple):
    """The source gave one more task.

    `lives`: how many lives it may end, whatever ends them; None to judge each death by the policy.
    """

    task: int
    samples: int
    lives: int | None = None


class Withdrawn(NamedTuple):
    """Nobody wants this task any more, even if it is being done right now."""

    task: int


class Returned(NamedTuple):
    """A worker was sent this task, had not begun it, and will not."""

    worker: int
    life: int
    task: int


class Spared(NamedTuple):
    """The order to kill this life came too late, or was not needed: it is not on that task. It lives on."""

    worker: int
    life: int


class Rested(NamedTuple):
    """The source has nothing more for now."""


class Booted(NamedTuple):
    """A worker is ready for work."""

    worker: int
    life: int


class BootFailed(NamedTuple):
    """Unpickling the dataset or worker_init_fn raised."""

    worker: int
    life: int
    result: object


class Finished(NamedTuple):
    """A task has an outcome, good or bad; it no longer needs its worker. `bad` samples are missing or replaced."""

    worker: int
    life: int
    task: int
    result: object
    bad: int = 0


class Gone(NamedTuple):
    """The result of a task was lost after its Finished: it cannot be opened any more. `bad`: as in the Finished."""

    task: int
    bad: int = 0


class Exhausted(NamedTuple):
    """An iterable dataset has nothing left in this worker. `made`: batches, by the worker's own count."""

    worker: int
    life: int
    task: int
    made: int


class Exited(NamedTuple):
    """A life ended. All its messages were told before this one. `on` is None where nobody knows what it was on.
    `evidence` is for diagnosis alone.
    """

    worker: int
    life: int
    at: float
    cause: Cause
    code: int
    on: Place | None
    evidence: object = None


class Allowed(NamedTuple):
    """So many workers may be at work now. `paused`: and no task may be handed out while another is being done."""

    workers: int
    paused: bool


Event = (
    Opened
    | Drawn
    | Withdrawn
    | Returned
    | Spared
    | Rested
    | Booted
    | BootFailed
    | Finished
    | Gone
    | Exhausted
    | Exited
    | Allowed
)

# Actions -----------------------------------------------------------------------------------------------------------


class Start(NamedTuple):
    """Give this worker a new life."""

    worker: int
    life: int


class Kill(NamedTuple):
    """End this life at once if it is on this task, which is not wanted any more.

    If it is not, Spared comes back. Tasks that it had not begun come back as Returned.
    """

    worker: int
    life: int
    task: int


class TakeBack(NamedTuple):
    """If the next task of this life has not been begun, it comes back as Returned."""

    worker: int
    life: int


class Release(NamedTuple):
    """This life has done its share: it may leave by itself."""

    worker: int
    life: int


class Send(NamedTuple):
    """Hand a task to a worker.

    `bad`: positions known to kill; leave them out or replace them. `alone`: load the samples one by one.
    `number`: the batch's number in this worker's stream (iterable datasets). `stay`: up to this position
    it must not leave for a fresh worker any more: that was tried.
    """

    worker: int
    life: int
    task: int
    attempt: int
    bad: tuple[int, ...]
    alone: bool
    number: int
    stay: int


class Retire(NamedTuple):
    """Ask this worker to leave after the batch it is on. Its Exited follows."""

    worker: int
    life: int


class Deliver(NamedTuple):
    """It is this task's turn: give its result to the user."""

    task: int
    result: object


class Drop(NamedTuple):
    """This task ends without a batch: its stream is over, or all its samples were bad."""

    task: int


class Discard(NamedTuple):
    """A result that nobody waits for any more; give its memory back."""

    result: object


class Renew(NamedTuple):
    """Replace the keeper: its workers hang as if they had inherited a held lock. Starts follow."""


class Note(NamedTuple):
    """An incident: what happened, what was done about it, and the standing of the sample it happened on.

    `spare`: which sample in its place it was, counted from 1; 0 for the sample itself.
    """

    event: Exited
    did: str
    strike: int
    needed: int
    spare: int = 0


class Stop(NamedTuple):
    """Going on would not help. `why`: "boot", "restarts" or "bad". `results`: of tasks whose turn had not come; they
    know more about what was bad.
    """

    why: str
    event: BootFailed | Exited | None
    bad: int
    seen: int
    results: tuple[tuple[int, object], ...] = ()


Action = Start | Kill | TakeBack | Release | Send | Retire | Deliver | Drop | Discard | Renew | Note | Stop


class Short(NamedTuple):
    """The result of the task at which a stream ended: as many batches were made by the worker's count, came by ours."""

    task: int
    worker: int
    made: int
    came: int


class Lost(NamedTuple):
    """The result of a task that is given up: a sample (or the collate, position -1) ended too many lives."""

    task: int
    position: int
    event: Exited
    attempts: int
