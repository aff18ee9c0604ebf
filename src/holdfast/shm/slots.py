"""Slots: one life's memory, cut into strides.

    slot 0 ... count-1 | a letter box per task that may be out | one in which a failing boot speaks, and the states

A slot holds a finished batch; a letter box holds what a worker is told of a task. The worker *claims* a free slot when
it has something to put there (shm/slot_writer.py). Only the trainer *frees* a slot, when nobody looks at it any more.
Only the worker sets a state byte to claimed, and only the trainer sets it to free, so they need no lock. Each life has
a file of its own, so a late write of a dead worker reaches no other life's bytes, and slots need no generation number.

    take_box()          trainer, before it sends a task; free_box() when the reply is there
    lend(slot)          trainer, when it opens a batch without copying: the bytes, for tensors to keep
    put_back(slot)      trainer, when nobody looks at the slot
    retire()            trainer, when the life is over: gives back all slots that are not lent

A lent slot is free again when its last view has ended. Views are tensors and arrays of the user, and slices of them.
They all hold on to one object, the *exporter*. A weak reference calls us when it ends, in whatever thread. We free the
slot at once: the sooner slots come back, the fewer are in use.

A signal handler of the user may raise at that very moment. Python then prints the exception, goes on, and does not
call us again. Python runs signal handlers only at the start of a Python function, after a call, and at the end of a
round of a loop. So the first callback is not a Python function: `deque.append` notes the slot. The second callback
frees the slots that are noted. If it is cut short, the next one goes on. Between freeing a slot and removing its note
it makes no call.

A child that the trainer forks sees the lent slots too, and they must not change for it. So nobody uses such a slot
again before the child has ended. The child holds the writing end of a pipe, so we read the end of file when it ends.
Several threads may fork at once, and take and drop batches meanwhile. So while a fork is under way, no slot comes back.

A device may read a slot after its last view has ended, because copies are queued. So with a device, a *gate*
(loader/cuda_slots.py) takes each slot that comes back, and lets it go when no copy can be in flight. Pages that the
device reads are registered with it. The gate unregisters them before they go back to the system.
"""

import ctypes
import os
import select
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from holdfast.shm.memory_file import FREE, SMALLEST_STRIDE, Memory, slot_view, states_of
from holdfast.shm.pack import SMALL, unpack

# Slots that a user may keep without copying, per life. Beyond that, batches are copied out.
KEEPABLE = 32
# How many bytes a registered slot may keep that it does not use. To unregister pages, the trainer waits for the device.
# With batches of varying length that would happen all the time.
LOCKED_SURPLUS = 64 << 20


class Lent(weakref.ref[ctypes.Array[ctypes.c_char]]):
    """A weak reference to the exporter of a lent slot. `then`: a second one, whose callback runs after it."""

    __slots__ = ("slot", "then")
    slot: int
    then: "weakref.ref[ctypes.Array[ctypes.c_char]]"


class ForkGuard:
    """Tells whether a forked child that saw lent slots may still be alive."""

    def __init__(self) -> None:
        self._close: weakref.finalize[..., ForkGuard] | None = None
        self._close_other: weakref.finalize[..., ForkGuard] | None = None
        try:
            self._read, write = os.pipe()
        except OSError:
            return  # no descriptor is left, so the child's end will not be noticed, and its slots stay in use for ever
        self._close_other = weakref.finalize(self, os.close, write)
        self._close_other.atexit = False
        self._close = weakref.finalize(self, os.close, self._read)
        self._close.atexit = False

    def in_parent(self) -> None:
        """After the fork. Called again if a signal handler has cut it short."""
        if self._close_other is not None:
            self._close_other()

    def in_child(self) -> None:
        """After the fork. The other end stays open until the child ends or execs."""
        if self._close_other is not None:
            self._close_other.detach()
        if self._close is not None:
            self._close()

    @property
    def over(self) -> bool:
        """True if the child, and all that it forked, have ended. In any thread, perhaps in several at once."""
        if self._close is None:
            return False
        if self._close.alive:
            poll = select.poll()
            poll.register(self._read, select.POLLIN)
            if poll.poll(0):
                self._close()
        return not self._close.alive


class Gate(Protocol):
    """Between the last view of a slot and its next use, where a device may still read it."""

    def hold(self, slots: "Slots", slot: int) -> None:
        """The last view has ended. Calls `let_go` later, when no copy can be in flight. In any thread: notes the slot,
        and makes no call after that."""

    def register(self, slots: "Slots", slot: int, size: int) -> bool:
        """From now on the device may read the first `size` bytes. In the trainer's thread, before they are lent."""

    def unregister(self, slots: "Slots", slot: int) -> None:
        """Its pages are to go back. Calls `put_back` once they are unregistered. In any thread: only notes it."""


class Slots:
    """The trainer's side. `busy`: how many tasks may be out at once."""

    def __init__(self, memory: Memory, stride: int, count: int, busy: int, gate: Gate | None = None) -> None:
        self.memory = memory
        self.stride = stride
        self.retired = False
        self.registered: dict[int, int] = {}  # slot -> bytes that the device knows; the gate's to write
        self.gate = gate
        self._armed = True
        self._states = states_of(memory, count)
        self._boxes = list(range(count, count + busy))[::-1]
        self._back: deque[Lent] = deque()  # slots whose views have all ended
        self._turn = [None]  # a token: the thread that empties `_back` holds it
        self.lent: dict[int, Lent] = {}  # slots that the user sees, or saw a moment ago
        self._came_back = self._returner()
        # The slots that each child may see; None, which means all, while its fork is under way.
        self._guards: dict[ForkGuard, frozenset[int] | None] = {}
        self._used = [0] * count
        self._usual = 0.0  # slowly falling maximum of batch sizes
        self._exporter: type[ctypes.Array[ctypes.c_char]] = type(
            "SlotBytes", (ctypes.Array,), {"_type_": ctypes.c_char, "_length_": stride}
        )

    def take_box(self) -> int | None:
        """A letter box for a task; None when all are taken."""
        if self._back:
            self._reclaim()  # a forked child has seen it
        return self._boxes.pop() if self._boxes else None

    def free_box(self, box: int) -> None:
        """The reply to the task in this box has come."""
        self._boxes.append(box)

    def used(self, slot: int, size: int) -> None:
        """A batch of `size` bytes came in this slot."""
        self._usual = max(size, self._usual * 0.95)
        self._used[slot] = max(self._used[slot], size)

    def copy(self, slot: int, size: int) -> bytes:
        """The first bytes of a slot."""
        return bytes(slot_view(self.memory, self.stride, slot)[0][:size])

    def lend(self, slot: int) -> memoryview | None:
        """The slot's bytes, for views of the user. None if too many slots are lent already: then copy them."""
        if len(self.lent) >= KEEPABLE:
            return None
        exporter = self._exporter.from_address(self.memory.address + slot * self.stride)
        exporter.slots = self  # type: ignore[attr-defined]  # the mapping lives as long as any view
        then = weakref.ref(exporter, self._came_back)
        lent = self.lent[slot] = Lent(exporter, self._back.append)  # the younger one is called first
        lent.slot, lent.then = slot, then
        return memoryview(exporter).cast("B")

    def _returner(self) -> Callable[[object], None]:
        me = weakref.ref(self)  # a strong reference would be a cycle that holds the mapping

        def back(_: object) -> None:
            slots = me()
            if slots is not None:
                slots._reclaim()

        return back

    def put_back(self, slot: int) -> None:
        """No view of this slot is left: it may be used again."""
        if slot >= len(self._used):
            return  # the last one, in which a failing boot speaks
        if self.retired:
            self._empty(slot)
        elif self._used[slot] > 2 * self._usual + SMALLEST_STRIDE and slot not in self.registered:
            start = slot * self.stride
            self.memory.give_back(start + int(self._usual), start + self._used[slot])
            self._used[slot] = int(self._usual)
        self._states[slot] = FREE

    def let_go(self, slot: int) -> None:
        """A lent slot may be used again."""
        self.put_back(slot)
        if slot in self.lent:
            del self.lent[slot]  # after it is free, so that a slot which is claimed again is never still lent

    def pages_go_back(self, slot: int) -> bool:
        """True when pages of a registered slot are worth giving to the system."""
        return self.retired or self._used[slot] > 2 * self._usual + LOCKED_SURPLUS

    def looked_at(self, slot: int) -> bool:
        """True while a view of this lent slot lives."""
        lent = self.lent.get(slot)
        return lent is not None and lent() is not None

    def _empty(self, slot: int) -> None:
        if slot in self.registered:
            assert self.gate is not None
            self.gate.unregister(self, slot)
        else:
            self.memory.give_back(slot * self.stride, (slot + 1) * self.stride)

    def _reclaim(self) -> None:
        """Free the slots whose views have ended, or give them to the gate. In any thread, one at a time."""
        if not self._armed:
            return
        try:
            del self._turn[0]
        except IndexError:
            return  # another thread does this, or this thread does, further up its stack
        try:
            back = self._back
            for _ in range(len(back)):
                slot = back[0].slot
                if self._guards and self._is_seen(slot):
                    back.rotate(-1)
                    continue
                if self.gate is None:
                    self.let_go(slot)
                else:
                    self.gate.hold(self, slot)
                del back[0]  # no call between the end of the last one and this: see the module
        finally:
            self._turn = [None]

    def _is_seen(self, slot: int) -> bool:
        """True if a child may see it. (Each step here is atomic: other threads fork and reclaim meanwhile.)"""
        return any((seen is None or slot in seen) and not guard.over for guard, seen in list(self._guards.items()))

    def guard(self, guard: ForkGuard) -> None:
        """The trainer is about to fork: from now on no lent slot comes back."""
        for old in list(self._guards):
            if old.over:
                self._guards.pop(old, None)
        self._guards[guard] = None

    def guarded(self, guard: ForkGuard) -> None:
        """It has forked: the slots that are lent now are all that the child can see. They stay lent while it lives."""
        seen = frozenset(self.lent)
        if seen:
            self._guards[guard] = seen
        else:
            self._guards.pop(guard, None)

    def disarm(self) -> None:
        """In a forked child: it sees the lent slots, and frees none."""
        self._armed = False
        self._guards = {}
        self._states = self._states.toreadonly()
        self.memory.close_to_writing()

    def retire(self) -> None:
        """The life is over. Give back all slots, except those that are lent, or finished and not opened yet."""
        self.retired = True
        self._reclaim()
        for slot in range(len(self._used)):
            if self._states[slot] == FREE:
                self._empty(slot)


def _nothing_lent() -> None:
    """For `unpack`: lends nothing, so all leaves are copied."""


class SlotResult(NamedTuple):
    """A finished batch. It lies in a slot, or in a file of its own, or the system refused the trainer that file."""

    slots: Slots | None
    slot: int
    file: Memory | OSError | None
    where: int
    buffers: int
    spec_bytes: int
    failed: bool
    worker: int

    @property
    def size(self) -> int:
        """How many bytes it takes in the slot, up to the end of the spec, which comes last."""
        return self.where + 16 * self.buffers + self.spec_bytes

    def open(self, small: int = SMALL, read: Callable[..., Any] = unpack) -> Any:
        """The batch. Its slot is free when its last view has ended. Leaves below `small` bytes are copied.

        `read`: what to call in the place of `unpack`, if the job packed in its own way.
        """
        slots, slot = self.slots, self.slot
        if slots is None:
            if isinstance(self.file, OSError):
                raise self.file
            assert self.file is not None
            return read(self.file.view, self.where, self.buffers, self.spec_bytes, self.file.export, small)
        start = slot * slots.stride
        view = slots.memory.view[start : start + slots.stride]
        if self.where < small:  # and so is each leaf
            try:
                return read(view, self.where, self.buffers, self.spec_bytes, _nothing_lent, small)
            finally:
                slots.put_back(slot)
        lent: list[bool] = []  # not `slots.lent`: it may have come back already, and been claimed again

        def lend() -> memoryview | None:
            view = slots.lend(slot)
            lent.append(view is not None)
            if view is not None and slots.gate is not None:
                slots.gate.register(slots, slot, self.size)
            return view

        try:
            return read(view, self.where, self.buffers, self.spec_bytes, lend, small)
        finally:
            if not any(lent):
                slots.put_back(slot)

    def discard(self) -> None:
        """Nobody will open it: free its slot."""
        if self.slots is not None:
            self.slots.put_back(self.slot)
