"""SlotClaims: a worker's side of its slots. It runs in the worker's main thread.

The worker claims a slot when it has something to put into it, not when a task begins: it loads samples while the
trainer still looks at the last batch. It takes the lowest free slot, so that it touches as few as possible.

A slot that was never used costs its whole size, for good. One that was used mostly comes free in a moment: the trainer
puts it back as soon as it has the next batch. So for large batches the worker waits for that moment. It does not wait
when the trainer waits for this very batch. And it does not wait for ever: if the trainer looks at its batches for
longer than the workers need to make theirs, the workers go on with the next ones.
"""

import os
import time
from collections.abc import Callable
from typing import Any, NoReturn

from holdfast.errors import WrongProcess
from holdfast.shm.memory_file import Memory
from holdfast.shm.slot_writer import HUGE, SlotSpace
from holdfast.shm.slots import CLAIMED, FREE, slot_view, states_of

NO_SLOT = -1
# Batches from this size on are worth a wait, once there is a slot to look at and one to write;
LARGE = 4 << 20
# and from HUGE on once there are `enough`. One is, where workers fill the processors: who waits leaves its own to who
# writes, by two threads.
_ANY = 1 << 30
# To wait about as long as a batch takes to write is to wait for another worker; to wait longer, for the trainer. That
# may take this share of the worker's time, and at most so much at a stretch; after a wait in vain, half as much.
_ABOUT, _HANDING_OVER_S = 1.5, 1e-3
_SHARE = 0.1
MOMENT_S = 0.2
_LOOK_S = 100e-6


class SlotClaims:
    """`enough`: slots that are taken without a wait, for huge batches; None: never wait. `may_wait`: asked again and
    again while it does."""

    def __init__(
        self, memory: Memory, stride: int, count: int, enough: int | None, may_wait: Callable[[], bool]
    ) -> None:
        self._memory = memory
        self._stride = stride
        self._states = states_of(memory, count)
        self._for_huge = enough
        self._may_wait = may_wait
        self._spaces: dict[int, SlotSpace] = {}
        self._space: SlotSpace | None = None  # of the present task
        self._enough = _ANY  # for batches like the last one
        self._moment = self._patience = MOMENT_S
        self._asked = self._claimed = 0.0
        self._fair = 0.0  # seconds that another worker may take over its batch
        self.waited_ns = 0  # in all

    def space(self) -> SlotSpace:
        """The slot for the present task; claimed when it is asked for first."""
        space = self._space
        if space is None:
            if len(self._spaces) >= self._enough:
                self._wait()
            while (slot := bytes(self._states).find(FREE)) < 0:
                time.sleep(_LOOK_S)  # what is lent has a bound, and the trainer is at work on the others
            self._states[slot] = CLAIMED
            space = self._spaces.get(slot)
            if space is None:
                view, address = slot_view(self._memory, self._stride, slot)
                space = self._spaces[slot] = SlotSpace(view, address, slot, by_two=self._for_huge == 1)
            space.clear()
            self._space = space
            self._claimed = time.monotonic()
        return space

    def hand_over(self, size: int) -> int:
        """The task is done, in `size` bytes: its slot, the trainer's from now on; `NO_SLOT` if it needed none."""
        space, self._space = self._space, None
        if size <= LARGE or self._for_huge is None:
            self._enough = _ANY
        else:
            self._enough = self._for_huge if size > HUGE else 2
            fair = _ABOUT * (time.monotonic() - self._claimed) + _HANDING_OVER_S
            self._fair = min(max(fair, 0.95 * self._fair), MOMENT_S / 4)
        return NO_SLOT if space is None else space.slot

    def close_in_child(self) -> None:
        """In a process that user code forks: if it comes back from there, it writes into no slot."""
        for space in self._spaces.values():
            space.__class__ = ClosedSpace
        self.__class__ = ClosedSlotClaims

    def _wait(self) -> None:
        """For one of the slots that were used before, a moment long."""
        began, waited = time.monotonic(), 0.0
        self._patience = min(self._moment, self._patience + _SHARE * (began - self._asked))
        self._asked = began
        touched = self._states[: len(self._spaces)]
        while FREE not in bytes(touched) and self._may_wait():
            if waited > self._fair + self._patience:
                self._moment = self._patience = self._moment / 2
                break
            time.sleep(_LOOK_S)
            waited = time.monotonic() - began
        else:
            self._patience = max(0.0, self._patience - max(0.0, waited - self._fair))
        self.waited_ns += int(1e9 * waited)


class ClosedSlotClaims(SlotClaims):
    """In a forked child of the worker."""

    def space(self) -> NoReturn:
        _refuse()


class ClosedSpace(SlotSpace):
    """A slot of the parent."""

    def room(self, size: int) -> NoReturn:
        _refuse()

    def stacked(self, samples: list[Any] | tuple[Any, ...]) -> NoReturn:
        _refuse()


def _refuse() -> NoReturn:
    raise WrongProcess(
        f"process {os.getpid()} was forked by code that a worker runs, and came back from it as if it were the worker\n"
        f"    why    the worker itself goes on with this task; two would write into the same batch\n"
        f"    try    end such a process with os._exit() where it was forked, whatever is raised there"
    )
