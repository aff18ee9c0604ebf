"""Supervisor: wait, tell the ledger, act. The few lines between who decides and who does.

What the user's side gets out of it: `ready`, the results whose turn has come; `dropped`, how many tasks ended without
one; `notes`, incidents to be diagnosed; `stop`, set when going on would not help.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import assert_never

from holdfast.core.crew import Crew
from holdfast.core.host import Host, Room, Silence
from holdfast.core.ledger import Ledger
from holdfast.core.messages import (
    Deliver,
    Discard,
    Drop,
    Event,
    Exited,
    Finished,
    Kill,
    Note,
    Opened,
    Release,
    Renew,
    Retire,
    Send,
    Start,
    Stop,
    TakeBack,
)
from holdfast.core.story import Story

# What a worker that has done its share gets to leave by itself: exit handlers of the user's code run then.
LEAVE_S = 5.0


class Supervisor:
    """`payload(send)` gives the bytes of a task for this sending of it."""

    def __init__(self, ledger: Ledger, host: Host, payload: Callable[[Send], bytes], crew: Crew) -> None:
        self._ledger = ledger
        self._crew = crew
        self._allowed = crew.allowed
        self._host = host
        self._payload = payload
        self.story = Story()
        self.ready: deque[Deliver] = deque()
        self.notes: deque[Note | Silence] = deque()
        self.resolved = 0  # tasks that were delivered or dropped
        self.dropped = 0
        self.stop: Stop | None = None

    def open(self) -> None:
        """Start what is not running yet."""
        self.tell(Opened(time.monotonic()))
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
                    self._crew.room(*event)
                    self.muster()
                case _:
                    self.tell(event)
                    if isinstance(event, Exited) and self._ledger.allowed < self._allowed.workers:
                        self._crew.refused(self._ledger.allowed, event.at)  # it went on with fewer
                        self.muster()

    def muster(self) -> None:
        """The crew may have changed its mind."""
        allowed = self._crew.allowed
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
                    self._host.discard(action.result)
                case Note():
                    self.notes.append(action)
                case Renew():
                    self._host.renew()
                case Stop():
                    self.stop = action
                case _:
                    assert_never(action)
