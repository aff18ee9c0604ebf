"""Where a worker puts a batch's bytes: into a slot that it claims, or into a file of their own.

For a batch that is collated straight into a slot, the worker makes a tensor over the slot, once for each place, dtype
and shape. It keeps the tensor for the next batch there: to make one takes longer than a small batch does.

The worker claims a slot when it has something to put into it, not when a task begins: it loads samples while the
trainer still looks at the last batch. It takes the lowest free slot, so that it touches as few as possible.

The first use of a slot costs memory for its whole size, for good. A slot that was used before is usually free soon: the
trainer puts it back as soon as it has the next batch. So for large batches the worker waits for that. It does not wait
if the trainer waits for this very batch. And it does not wait for ever: if the trainer keeps its batches for longer
than the workers need to make theirs, the workers take new slots.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from holdfast.errors import WrongProcess
from holdfast.shm.memory_file import CLAIMED, FREE, Memory, slot_view, states_of

try:
    from holdfast.shm._stream import copy_all, learn, looks, same, stack

    if not learn(torch.Tensor):  # an older torch
        stack = None  # type: ignore[assignment]
except ImportError:  # built without a compiler: torch and numpy copy instead
    copy_all = stack = None  # type: ignore[assignment]


def _looks(tensor: torch.Tensor) -> Any:
    """As the compiled one. Gives, for `_same`, another tensor over the same memory, which nobody else has."""
    return tensor.detach()


def _same(tensor: torch.Tensor, looks: Any) -> bool:
    """Says what the compiled one says."""
    return tensor.dtype is looks.dtype and tensor.is_set_to(looks) and not tensor.requires_grad


# Whether a tensor is still what it was: of the same dtype, shape and order, over the same memory, without a gradient.
looks_of: Callable[[torch.Tensor], Any] = _looks if stack is None else looks
is_same: Callable[[torch.Tensor, Any], bool] = _same if stack is None else same

ALIGN = 64
# Batches from this size on are copied past the cache: they would push out of it what worker and trainer need.
STREAMED = 1 << 20
# Smaller samples are not: torch copies one faster than Python asks it for its address.
WORTH_IT = 4 << 10
# The worker writes batches from this size on with two threads, if other workers wait meanwhile.
HUGE = 16 << 20
# How many tensors are kept for one slot: batches with new shapes each time (text) must not fill the memory.
MOST_MADE = 64

NUMPY_TWIN: dict[torch.dtype, Any] = {
    torch.float32: np.dtype(np.float32),
    torch.int64: np.dtype(np.int64),
    torch.uint8: np.dtype(np.uint8),
    torch.float64: np.dtype(np.float64),
    torch.int32: np.dtype(np.int32),
    torch.float16: np.dtype(np.float16),
    torch.bool: np.dtype(np.bool_),
    torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}
TORCH_TWIN = {twin: dtype for dtype, twin in NUMPY_TWIN.items()}
CODES = {dtype: code for code, dtype in enumerate(NUMPY_TWIN)}
TWINS = list(NUMPY_TWIN.values())


class Full(Exception):
    """The slot's stride is too small for this batch."""


@dataclass(slots=True)
class Placed:
    """A tensor that lies in the slot already. `shape` begins with the code of its dtype.

    `looks`: for `is_same`. `alone`: what stands behind it if it is the whole batch. The first time it is packed sets
    this.
    """

    shape: tuple[int, ...]
    offset: int
    size: int
    looks: Any
    alone: bytes | None = None


class Made(NamedTuple):
    """A tensor in the slot. `past`: write its bytes past the cache (1), and with two threads (2)."""

    tensor: torch.Tensor
    placed: Placed
    past: int


class SlotSpace:
    """A slot, filled from its start. Which process: its worker, in its main thread.

    `by_two`: a processor is free for a second thread, because other workers wait while this one writes.
    """

    def __init__(self, view: memoryview, address: int, slot: int = 0, *, by_two: bool = False) -> None:
        self.view = view
        self.slot = slot
        self.by_two = by_two
        self._address = address
        self._made: dict[tuple[int, torch.dtype, tuple[int, ...]], Made] = {}
        self._last: dict[int, Made] = {}  # offset -> the last tensor that was asked for there
        self.end = 0
        self.placed: dict[int, Placed] = {}  # id of a tensor made for this batch -> where it lies

    def clear(self) -> None:
        """Begin again at its start."""
        self.end = 0
        self.placed.clear()
        if len(self._made) > MOST_MADE:  # not in the middle of a batch: `placed` goes by identity
            self._made.clear()
            self._last.clear()

    def room(self, size: int) -> int:
        """Reserves `size` bytes for the caller to write; gives their offset."""
        start = -(-self.end // ALIGN) * ALIGN
        if start + size > len(self.view):
            raise Full
        self.end = start + size
        return start

    def put(self, raw: memoryview) -> int:
        start = self.room(raw.nbytes)
        self.view[start : self.end] = raw
        return start

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
        """A tensor in the slot, to be filled in place; None for a dtype without a numpy twin. Raises `Full`."""
        twin = NUMPY_TWIN.get(dtype)
        if twin is None:
            return None
        size = math.prod(shape) * twin.itemsize
        if not size:
            return None
        start = self.room(size)
        made = self._made.get((start, dtype, shape))
        if made is None:
            tensor = torch.from_numpy(np.ndarray(shape, twin, self.view[start : self.end]))
            past = _past(size, shape[0], self.by_two)
            placed = Placed((CODES[dtype], *shape), start, size, looks_of(tensor))
            made = self._made[start, dtype, shape] = Made(tensor, placed, past)
        self._last[start] = made
        self.placed[id(made.tensor)] = made.placed
        return made.tensor

    def forget(self, tensor: torch.Tensor) -> None:
        """Other code has changed this tensor's shape or memory: do not use it again, and pack it like any other."""
        del self.placed[id(tensor)]
        self._made = {place: made for place, made in self._made.items() if made.tensor is not tensor}
        self._last = {start: made for start, made in self._last.items() if made.tensor is not tensor}

    def stacked(self, samples: list[Any] | tuple[Any, ...]) -> torch.Tensor | None:
        """The samples, stacked, if they are like those of the last batch at this place; else None.

        Most batches are alike. The compiled `stack` checks all samples anyway. That takes less time than to ask the
        first sample for its dtype and shape in Python, and to find the tensor for them.
        """
        start = -(-self.end // ALIGN) * ALIGN
        last = self._last.get(start)
        if last is None or stack is None or not stack(last.tensor, samples, last.past):
            return None
        self.end = start + last.placed.size
        self.placed[id(last.tensor)] = last.placed
        return last.tensor


class FileSpace:
    """A file for a batch that no slot can hold. It grows as it is written."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size = 0
        self.placed: dict[int, Placed] = {}  # always empty

    def forget(self, tensor: torch.Tensor) -> None:
        """No tensor lies here, so there is none to forget."""

    def put(self, raw: memoryview) -> int:
        start = -(-self.size // ALIGN) * ALIGN
        done = 0
        while done < raw.nbytes:
            done += os.pwrite(self._fd, raw[done:], start + done)
        self.size = start + raw.nbytes
        return start


AnySpace = SlotSpace | FileSpace


def _past(size: int, count: int, by_two: bool) -> int:
    """How to copy `size` bytes of so many samples, see `Made`."""
    if size < STREAMED or size // count < WORTH_IT:
        return 0
    return 2 if by_two and size > HUGE else 1


def stack_tensors(samples: list[Any] | tuple[Any, ...], out: torch.Tensor, by_two: bool = False) -> None:
    """`torch.stack(samples, 0, out=out)`. Raises what that raises if they do not fit together."""
    past = _past(out.nbytes, len(samples), by_two)
    if stack is not None:
        if stack(out, samples, past):
            return
    elif copy_all is not None and past and isinstance(samples, list | tuple) and not out.dtype.is_complex:
        dtype, shape = out.dtype, out.shape[1:]
        sources: list[object] = []
        for sample in samples:  # (complex tensors may be marked as conjugated, and any tensor as negated)
            if type(sample) is not torch.Tensor or sample.dtype is not dtype or sample.shape != shape:
                break
            if not sample.is_contiguous() or not sample.is_cpu or sample.requires_grad or sample.is_neg():
                break
            sources.append(sample.data_ptr())
        else:
            copy_all(out.data_ptr(), out.nbytes // len(samples), sources, past > 1)
            return
    torch.stack(samples, 0, out=out)


def stack_arrays(samples: list[Any] | tuple[Any, ...], out: torch.Tensor, by_two: bool = False) -> bool:
    """False if they are not all alike."""
    past = _past(out.nbytes, len(samples), by_two)
    into = out.numpy()
    dtype, shape = into.dtype, into.shape[1:]
    for sample in samples:
        if type(sample) is not np.ndarray or sample.dtype is not dtype or sample.shape != shape:
            return False
    if copy_all is not None and past and all(sample.flags.c_contiguous for sample in samples):
        size = out.nbytes // len(samples)
        copy_all(out.data_ptr(), size, list(samples), past > 1)  # default_collate may pass a tuple
        return True
    for place, sample in enumerate(samples):
        into[place] = sample
    return True


# SlotClaims: which slot a worker takes, and when it waits for one.


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
