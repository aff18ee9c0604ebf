"""Supervisor: wait for the host, tell the ledger, do what it says.

The faces read four things here. `ready`: the results whose turn has come. `dropped`: how many tasks ended without a
result. `notes`: incidents to be diagnosed. `stop`: set when going on would not help.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import assert_never, cast

from holdfast.core.autoscale import Autoscale
from holdfast.core.host import Host, Result, Room, Silence
from holdfast.core.ledger import Ledger
from holdfast.core.messages import (
    Action,
    Allowed,
    Booted,
    BootFailed,
    Deliver,
    Discard,
    Drawn,
    Drop,
    Event,
    Exhausted,
    Exited,
    Finished,
    Gone,
    Kill,
    Note,
    Opened,
    Release,
    Renew,
    Rested,
    Retire,
    Returned,
    Send,
    Spared,
    Start,
    Stop,
    TakeBack,
    Withdrawn,
)

# How long a worker that has done its share may take to leave by itself: the user's exit handlers run then.
LEAVE_S = 5.0


class Supervisor:
    """`payload(send)` gives the bytes of a task for this sending of it."""

    def __init__(self, ledger: Ledger, host: Host, payload: Callable[[Send], bytes], autoscale: Autoscale) -> None:
        self._ledger = ledger
        self._autoscale = autoscale
        self._allowed = autoscale.allowed
        self._host = host
        self._payload = payload
        self.story = Story()
        self.ready: deque[Deliver] = deque()
        self.notes: deque[Note | Silence] = deque()
        self.resolved = 0  # tasks that were delivered or dropped
        self.dropped = 0
        self.stop: Stop | None = None

    def open(self, at: float) -> None:
        """Start what is not running yet. `at`: the time, as events have it."""
        self.tell(Opened(at))
        self.tell(self._allowed)  # an earlier epoch may have left others at work, or a pause

    def step(self, timeout_s: float | None) -> None:
        """Wait for something to happen, at most `timeout_s`, and act on it."""
        happened = self._host.wait(timeout_s)
        for event in happened:
            match event:
                case Finished():
                    self.tell(event)
                case Silence():
                    self.notes.append(event)
                case Room():
                    self._autoscale.room(*event)
                    self.muster()
                case _:
                    self.tell(event)
                    if isinstance(event, Exited) and self._ledger.allowed < self._allowed.workers:
                        self._autoscale.refused(self._ledger.allowed, event.at)  # it went on with fewer
                        self.muster()

    def muster(self) -> None:
        """The number of workers may have to change."""
        allowed = self._autoscale.allowed
        if allowed != self._allowed and self.stop is None:
            self._allowed = allowed
            self.tell(allowed)

    def tell(self, event: Event) -> None:
        """One event, and all it leads to."""
        self.story.tell(event)
        for action in self._ledger.on(event):
            match action:
                case Send():
                    self._host.send(action.worker, action.life, action.task, self._payload(action))
                case Deliver():
                    self.resolved += 1
                    self.ready.append(action)
                case Retire():
                    self._host.retire(action.worker, action.life)
                case Start():
                    self._host.start(action.worker, action.life)
                case Kill():
                    self._host.kill(action.worker, action.life, action.task)
                case TakeBack():
                    self._host.take_back(action.worker, action.life)
                case Release():
                    self._host.release(action.worker, action.life, LEAVE_S)
                case Drop():
                    self.resolved += 1
                    self.dropped += 1
                case Discard():
                    cast(Result, action.result).discard()
                case Note():
                    self.notes.append(action)
                case Renew():
                    self._host.renew()
                case Stop():
                    self.stop = action
                case _:
                    assert_never(action)


# Story: the last events, kept so that an incident can be told, and replayed through a new ledger.


# The last thousand batches. More would not stay in the processor's cache until it is overwritten.
KEPT = 2_000


class Story:
    """The last events, in the order in which the ledger heard them. Results are left out: they are the user's memory.

    The two events of every batch are kept as bare tuples of numbers: the garbage collector does not trace those.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._events: deque[tuple[int, ...] | Event] = deque(maxlen=kept)

    def tell(self, event: Event) -> None:
        """One more."""
        if isinstance(event, Finished):
            self._events.append((event.worker, event.life, event.task, event.bad))
        elif isinstance(event, Drawn) and event.lives is None:
            self._events.append((event.task, event.samples))
        elif isinstance(event, BootFailed):
            self._events.append(event._replace(result=None))
        else:
            self._events.append(event)

    def __iter__(self) -> Iterator[Event]:
        for kept in self._events:
            match kept:
                case Finished() | Drawn() | Opened() | Booted() | BootFailed() | Exhausted() | Exited():
                    yield kept
                case Gone() | Withdrawn() | Returned() | Spared() | Rested() | Allowed():
                    yield kept
                case (task, samples):
                    yield Drawn(task, samples)
                case (worker, life, task, bad):
                    yield Finished(worker, life, task, None, bad)

    def __len__(self) -> int:
        return len(self._events)

    def of_task(self, task: int) -> list[Event]:
        """The events of one task."""
        return [e for e in self if getattr(e, "task", None) == task]

    def of_worker(self, worker: int) -> list[Event]:
        """The events of one worker, in all its lives."""
        return [e for e in self if getattr(e, "worker", None) == worker]


def replay(events: Iterable[Event], on: Callable[[Event], Sequence[Action]]) -> list[Action]:
    """The actions that these events lead to; `on` is that of a new ledger."""
    return [action for event in events for action in on(event)]
