"""Story: the bounded log of events, so that an incident can be told, and replayed through a new ledger."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from holdfast.core.messages import (
    Action,
    Allowed,
    Booted,
    BootFailed,
    Drawn,
    Event,
    Exhausted,
    Exited,
    Finished,
    Opened,
    Rested,
    Returned,
    Spared,
    Withdrawn,
)

# The last thousand batches. Not more: what is written over must still be in the cache.
KEPT = 2_000


class Story:
    """The last events, in the order the ledger was told them; without results, which are the user's memory.

    The two events of every batch are kept as bare tuples of numbers, which the garbage collector does not trace.
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
                case Withdrawn() | Returned() | Spared() | Rested() | Allowed():
                    yield kept
                case (task, samples):
                    yield Drawn(task, samples)
                case (worker, life, task, bad):
                    yield Finished(worker, life, task, None, bad)

    def __len__(self) -> int:
        return len(self._events)

    def of_task(self, task: int) -> list[Event]:
        """What is known of one task."""
        return [e for e in self if getattr(e, "task", None) == task]

    def of_worker(self, worker: int) -> list[Event]:
        """What is known of one worker, in all its lives."""
        return [e for e in self if getattr(e, "worker", None) == worker]


def replay(events: Iterable[Event], on: Callable[[Event], Sequence[Action]]) -> list[Action]:
    """The actions that these events lead to in a new ledger."""
    return [action for event in events for action in on(event)]
