"""SlotClaims: a worker's side of its slots. It runs in the worker's main thread.

The worker claims a slot when it has something to put into it, not when a task begins: it loads samples while the
trainer still looks at the last batch. It takes the lowest free slot, so that it touches as few as possible.

The first use of a slot costs memory for its whole size, for good. A slot that was used before is usually free soon: the
trainer puts it back as soon as it has the next batch. So for large batches the worker waits for that. It does not wait
if the trainer waits for this very batch. And it does not wait for ever: if the trainer keeps its batches for longer
than the workers need to make theirs, the workers take new slots.
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
# For batches from this size on the worker waits once it has two slots: the trainer reads one, it writes the other.
LARGE = 4 << 20
# From HUGE on it waits once it has `enough` slots. If the workers fill the processors, one is enough: a worker that
# waits leaves its processor to the worker that writes, which uses two threads.
_ANY = 1 << 30
# For about as long as a batch takes to write, the worker waits for another worker; after that, for the trainer. Waits
# for the trainer may take this share of the worker's time, and at most so long each; half as long after each in vain.
_ABOUT, _HANDING_OVER_S = 1.5, 1e-3
_SHARE = 0.1
MOMENT_S = 0.2
_LOOK_S = 100e-6


class SlotClaims:
    """`enough`: how many slots it takes without a wait, for huge batches; None: it never waits. `may_wait`: it asks
    this again and again while it waits."""

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
        self._enough = _ANY  # how many slots it takes without a wait, for batches like the last one
        self._moment = self._patience = MOMENT_S
        self._asked = self._claimed = 0.0
        self._fair = 0.0  # seconds that another worker may need for its batch
        self.waited_ns = 0  # in all

    def space(self) -> SlotSpace:
        """The slot for the present task. The first call in a task claims it."""
        space = self._space
        if space is None:
            if len(self._spaces) >= self._enough:
                self._wait()
            while (slot := bytes(self._states).find(FREE)) < 0:
                time.sleep(_LOOK_S)  # few slots can be lent, and the trainer frees the others
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
        """The task is done, in `size` bytes. Gives its slot, which belongs to the trainer now, or `NO_SLOT`."""
        space, self._space = self._space, None
        if size <= LARGE or self._for_huge is None:
            self._enough = _ANY
        else:
            self._enough = self._for_huge if size > HUGE else 2
            fair = _ABOUT * (time.monotonic() - self._claimed) + _HANDING_OVER_S
            self._fair = min(max(fair, 0.95 * self._fair), MOMENT_S / 4)
        return NO_SLOT if space is None else space.slot

    def close_in_child(self) -> None:
        """In a process that user code forks: if it returns from there, it writes into no slot."""
        for space in self._spaces.values():
            space.__class__ = ClosedSpace
        self.__class__ = ClosedSlotClaims

    def _wait(self) -> None:
        """Wait a moment for one of the slots that were used before."""
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
