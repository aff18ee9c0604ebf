"""Everything that crosses a boundary inside Holdfast: events (past tense) go in, actions (imperative) come out.

A *worker* is a number, counted from 0; each process that plays it is a *life*. A *task* is one batch; its number is
its *turn*. A sample's place in its batch is its *position*. Fields named `result` are opaque here: the maker of a task
knows what they hold.

These are named tuples because every batch makes two events and two actions. A named tuple costs 0.3 us, a frozen
dataclass 0.6 us, and both are immutable.
"""

from enum import Enum, IntEnum, auto
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
    ANNOUNCE = 8  # its batch is complete, and the trainer's pipe is too full to say so


class Cause(IntEnum):
    """How a life ended."""

    SIGNAL = 0  # `code` is the signal
    EXIT = 1  # `code` is the exit status
    DEADLINE = 2  # we killed it: past sample_timeout
    MEMORY = 3  # we killed it: past worker_memory
    KEEPER = 4  # its keeper died or was replaced; nobody's fault
    RECYCLED = 5  # it left for a fresh one: `code` is the `Leave`; nobody's fault
    UNBORN = 6  # the system refused a process; `code` is the errno
    PRESSURE = 7  # we killed it: all workers together had almost used up the memory; nobody's fault
    ASKED = 8  # we ended it: its task was withdrawn, or it had done its share of tasks


class Leave(IntEnum):
    """Why a worker makes room for a fresh one. It leaves in the middle of a batch only if it was refused something."""

    ASKED = 1  # fewer workers are wanted
    MEMORY = 2  # it has grown to its limit, or an allocation was refused
    DESCRIPTORS = 3
    PROCESSES = 4  # a thread or a process was refused to it
    UNFIT = 5  # it could not start, and said so


class What(Enum):
    """What an incident is about. The ledger sees the first one; a host notices four more; the faces add their own."""

    EXITED = auto()  # a worker's life ended
    SILENT = auto()  # nothing was heard of a worker for long
    SIGNALLED = auto()  # a process noted a signal and went on
    COPIED = auto()  # a worker has copied much of what it inherited from the trainer
    ROOM = auto()  # fewer workers fit into memory
    BOOT = auto()  # a worker could not start, and said why
    RAISED = auto()  # user code raised
    RETRIED = auto()  # user code raised, and did not at a later attempt
    UNPINNED = auto()  # the device cannot read shared memory in place
    STATELESS = auto()  # the state of a stream cannot be saved
    TRAINER_ENDED = auto()  # the trainer is gone, and has not said stop: its keeper saw it
    SHARED = auto()  # the dataset holds files open that forked workers would read at one position


class Did(Enum):
    """What the ledger did about a death. Each face has its own words for it."""

    NOTHING = auto()  # the worker's stream had ended
    STARTED = auto()  # a new worker; the dead one was on no task
    SENT_AGAIN = auto()  # a new worker, which does the task again
    RENEWED = auto()  # a new keeper and new workers
    REFRESHED = auto()  # a fresh worker in the place of one that left
    WENT_ON = auto()  # with the workers that are left
    REPLACED = auto()  # another sample takes the place of a bad one
    REPLACED_AGAIN = auto()  # the one in its place was bad as well
    LEFT_OUT = auto()  # the bad sample
    LEFT_OUT_LAST = auto()  # the bad sample, which was the last one of its batch
    GAVE_UP_TASK = auto()
    GAVE_UP_STREAM = auto()
    STOPPED = auto()  # this worker died too often without progress
    STOPPED_REFUSED = auto()  # it was refused a process, or left, too often


class Why(Enum):
    """Why going on would not help."""

    BOOT = auto()  # a worker could not start: `event` is its BootFailed
    RESTARTS = auto()  # a worker dies again and again: `event` is its last Exited
    BAD = auto()  # too many samples are bad


class Place(NamedTuple):
    """What a worker was on, from its pulse. `task`: -1 if it was on none.

    `spare`: which sample in the place of that one, counted from 1; 0 for the sample itself.
    """

    task: int
    position: int
    stage: Stage
    seconds: float
    spare: int = 0


# Events ------------------------------------------------------------------------------------------------------------


class Opened(NamedTuple):
    """The supervisor is ready to act. `at`: the time by its clock, in seconds."""

    at: float


class Drawn(NamedTuple):
    """The source gave one more task.

    `lives`: how many lives the task may end, whatever ends them. None: the policy judges each death.
    """

    task: int
    samples: int
    lives: int | None = None


class Withdrawn(NamedTuple):
    """Nobody wants this task any more, even if it is being done right now."""

    task: int


class Returned(NamedTuple):
    """A worker got this task, has not begun it, and never will."""

    worker: int
    life: int
    task: int


class Spared(NamedTuple):
    """This life was to be killed for a task that it is not on. It lives on."""

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
    """A task has an outcome, good or bad, and needs its worker no more. `bad`: samples that are missing or replaced."""

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
    """A life ended. All that it said was told before this. `on` is None if nobody knows what it was on. Only diagnosis
    reads `evidence`. `for_memory`: the kernel killed it for memory, and that is known, not guessed.
    """

    worker: int
    life: int
    at: float
    cause: Cause
    code: int
    on: Place | None
    evidence: object = None
    for_memory: bool = False


class Allowed(NamedTuple):
    """So many workers may be at work now. `paused`: no task may be handed out while another is being done."""

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
    """This life has done its share of tasks: it may leave by itself."""

    worker: int
    life: int


class Send(NamedTuple):
    """Hand a task to a worker.

    `bad`: positions known to kill; leave them out or replace them, but by none of the `deadly` spares, counted from 1.
    `alone`: load the samples one by one. `number`: the batch's number in this worker's stream (iterable datasets).
    `stay`: up to this position it must not leave for a fresh worker any more: that was tried.
    """

    worker: int
    life: int
    task: int
    attempt: int
    bad: tuple[int, ...]
    alone: bool
    number: int
    stay: int
    deadly: tuple[int, ...] = ()


class Retire(NamedTuple):
    """Ask this worker to leave after the batch it is on. Its Exited follows."""

    worker: int
    life: int


class Deliver(NamedTuple):
    """This task's turn has come: give its result to the user."""

    task: int
    result: object


class Drop(NamedTuple):
    """This task ends without a batch: its stream is over, or all its samples were bad."""

    task: int


class Discard(NamedTuple):
    """Nobody waits for this result any more: give its memory back."""

    result: object


class Renew(NamedTuple):
    """Replace the keeper: its workers hang as if they had inherited a lock that is held. Starts follow."""


class Suspicion(NamedTuple):
    """What speaks against a sample if its deaths may have come from outside.

    `here`: such deaths at this sample; `in_all`: such deaths so far, wherever; `chance`: that plain bad luck explains
    those here; `alone`: those here for which the kernel killed a worker for memory while no other was at work.
    """

    here: int = 0
    in_all: int = 0
    chance: float = 1.0
    alone: int = 0


NO_SUSPICION = Suspicion()


class Note(NamedTuple):
    """An incident: what happened, what the ledger did about it, and which strike of how many it is for the sample.

    `spare`: which sample in the place of that one, counted from 1; 0 for the sample itself. `at_work`: the workers that
    are left, for Did.WENT_ON.
    """

    event: Exited
    did: Did
    strike: int
    needed: int
    spare: int = 0
    at_work: int = 0
    suspicion: Suspicion = NO_SUSPICION


class Stop(NamedTuple):
    """Going on would not help. `results`: those of tasks whose turn had not come. They may say what was bad."""

    why: Why
    event: BootFailed | Exited | None
    bad: int
    seen: int
    results: tuple[tuple[int, object], ...] = ()


Action = Start | Kill | TakeBack | Release | Send | Retire | Deliver | Drop | Discard | Renew | Note | Stop


class Short(NamedTuple):
    """The result of a task at which a stream ended, if the counts of its batches differ. `made`: by the worker's own
    count; `came`: by ours.
    """

    task: int
    worker: int
    made: int
    came: int


class Lost(NamedTuple):
    """The result of a task that is given up: one sample ended too many lives; or the collate did, at position -1."""

    task: int
    position: int
    event: Exited
    attempts: int
    suspicion: Suspicion = NO_SUSPICION
