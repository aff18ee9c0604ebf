"""Story: the bounded log of events, so that an incident can be told, and replayed through a new ledger."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from holdfast.core.messages import Action, Event

# Enough for the last few thousand batches; a named tuple of small numbers each.
KEPT = 10_000


class Story:
    """The last events, in the order the ledger was told them."""

    def __init__(self, kept: int = KEPT) -> None:
        self._events: deque[Event] = deque(maxlen=kept)
        self.tell: Callable[[Event], None] = self._events.append

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)

    def of_task(self, task: int) -> list[Event]:
        """What is known of one task."""
        return [e for e in self._events if getattr(e, "task", None) == task]

    def of_worker(self, worker: int) -> list[Event]:
        """What is known of one worker, in all its lives."""
        return [e for e in self._events if getattr(e, "worker", None) == worker]


def replay(events: Sequence[Event], on: Callable[[Event], Sequence[Action]]) -> list[Action]:
    """The actions that these events lead to in a new ledger."""
    return [action for event in events for action in on(event)]
