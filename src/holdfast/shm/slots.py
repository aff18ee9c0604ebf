"""Slots: one life's memory, cut into strides.

    slot 0 ... count-1 | a letter box per task that may be out | one in which a failing boot speaks, and the states

A slot holds a finished batch; a letter box holds what a worker is told of a task. The worker *claims* a free slot when
it has something to put there (shm/slot_writer.py). Only the trainer *frees* a slot, when nobody looks at it any more.
Each side writes a state byte in one direction only, so no lock is needed. Each life has a file of its own, so a late
write of a dead worker can touch nobody else's bytes. A slot needs no other generation.

    take_box()          trainer, before it sends a task; free_box() when the reply is there
    lend(slot)          trainer, when it opens a batch without copying: the bytes, for tensors to keep
    put_back(slot)      trainer, when nobody looks at the slot
    retire()            trainer, when the life is over: gives back all but what is lent

A lent slot is free again when its last view has died. Views are tensors and arrays of the user, and slices of them.
They all hold on to one object, the *exporter*; a weak reference to it tells us of its end, in whatever thread. The slot
is free at that moment: the sooner slots come back, the fewer are in use.

A signal handler of the user may raise at that very moment. Python then prints the exception and goes on, and nobody
would tell us again. Python looks for signals at the start of a Python function, after a call and at the end of a loop's
round, and nowhere else. So the first callback is no Python function: `deque.append` notes the slot. The second callback
frees what is noted. If it is cut short, the next one goes on. It takes a freed slot off the note without any call in
between.

A child that the trainer forks sees the lent slots too, and must go on seeing them unchanged. So such a slot is not used
again before the child is gone: the child holds the writing end of a pipe, whose end of file tells us. Several threads
may fork at once, and take and drop batches meanwhile: while a fork is under way, no slot comes back.

A device reads a slot after its last view has died, because copies are queued. Where there is a device, a *gate*
(loader/cuda_slots.py) takes each slot that comes back, and lets it go when no copy can be in flight. Pages that the
device knows by address are registered with it; the gate undoes that before they go back to the system.
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
# What a registered slot may keep beyond its use. To unregister pages waits for the device; batches of varying length
# shall not do that all the time.
LOCKED_SURPLUS = 64 << 20


class Lent(weakref.ref[ctypes.Array[ctypes.c_char]]):
    """To the exporter of a slot that is lent. `then`: a second one, whose callback follows."""

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
            return  # no descriptor is left: nobody will hear of the child's end, and it is waited for in vain
        self._close_other = weakref.finalize(self, os.close, write)
        self._close_other.atexit = False
        self._close = weakref.finalize(self, os.close, self._read)
        self._close.atexit = False

    def in_parent(self) -> None:
        """After the fork; a second time where a signal handler cut the first one short."""
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
        """True when the child, and whoever it forked, is gone. In any thread, perhaps in several at once."""
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
        """The last view has died. Calls `let_go` when no copy can be in flight. In any thread; only notes it, and
        calls nothing after that."""

    def register(self, slots: "Slots", slot: int, size: int) -> bool:
        """The device may read the first `size` bytes from now on. In the trainer's thread, before they are lent."""

    def unregister(self, slots: "Slots", slot: int) -> None:
        """Its pages shall go back. Calls `put_back` when the device knows them no more. In any thread; notes it."""


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
        self._back: deque[Lent] = deque()  # nobody looks at these any more
        self._turn = [None]  # of those who take them from there: empty while one does
        self.lent: dict[int, Lent] = {}  # what the user looks at, or did a moment ago
        self._came_back = self._returner()
        # What each child may see: slots, or None for all while its fork is under way.
        self._guards: dict[ForkGuard, frozenset[int] | None] = {}
        self._used = [0] * count
        self._usual = 0.0  # slowly falling maximum of batch sizes
        self._exporter: type[ctypes.Array[ctypes.c_char]] = type(
            "SlotBytes", (ctypes.Array,), {"_type_": ctypes.c_char, "_length_": stride}
        )

    def take_box(self) -> int | None:
        """A letter box for a task; None when all are taken."""
        if self._back:
            self._reclaim()  # what a forked child looked at
        return self._boxes.pop() if self._boxes else None

    def free_box(self, box: int) -> None:
        """The task that lay there is answered."""
        self._boxes.append(box)

    def used(self, slot: int, size: int) -> None:
        """A batch of `size` bytes came in this slot."""
        self._usual = max(size, self._usual * 0.95)
        self._used[slot] = max(self._used[slot], size)

    def copy(self, slot: int, size: int) -> bytes:
        """The first bytes of a slot."""
        return bytes(slot_view(self.memory, self.stride, slot)[0][:size])

    def lend(self, slot: int) -> memoryview | None:
        """The slot's bytes, to be looked at by the user; None when too many are lent already: copy them."""
        if len(self.lent) >= KEEPABLE:
            return None
        exporter = self._exporter.from_address(self.memory.address + slot * self.stride)
        exporter.slots = self  # type: ignore[attr-defined]  # the mapping lives as long as any view
        then = weakref.ref(exporter, self._came_back)
        lent = self.lent[slot] = Lent(exporter, self._back.append)  # the younger one is called first
        lent.slot, lent.then = slot, then
        return memoryview(exporter).cast("B")

    def _returner(self) -> Callable[[object], None]:
        me = weakref.ref(self)  # a strong one would be a cycle around the mapping

        def back(_: object) -> None:
            slots = me()
            if slots is not None:
                slots._reclaim()

        return back

    def put_back(self, slot: int) -> None:
        """Nobody looks at this slot: it may be used again."""
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
            del self.lent[slot]  # after it is free: what is lent and what is claimed must fit together

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
        """In any thread, in one at a time: free what nobody looks at any more, or give it to the gate."""
        if not self._armed:
            return
        try:
            del self._turn[0]
        except IndexError:
            return  # another thread is here, or this one further up
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
                del back[0]  # nothing is called between this and the end of what was called: see the module
        finally:
            self._turn = [None]

    def _is_seen(self, slot: int) -> bool:
        """True when some child may see it. (Each step is one for all threads: others fork, and reclaim, meanwhile.)"""
        return any((seen is None or slot in seen) and not guard.over for guard, seen in list(self._guards.items()))

    def guard(self, guard: ForkGuard) -> None:
        """The trainer is about to fork: from now on nothing that is lent comes back."""
        for old in list(self._guards):
            if old.over:
                self._guards.pop(old, None)
        self._guards[guard] = None

    def guarded(self, guard: ForkGuard) -> None:
        """It has forked: what is lent now, all that the child can see, stays as it is while that lives."""
        seen = frozenset(self.lent)
        if seen:
            self._guards[guard] = seen
        else:
            self._guards.pop(guard, None)

    def disarm(self) -> None:
        """In a forked child: it sees what is lent, and frees nothing."""
        self._armed = False
        self._guards = {}
        self._states = self._states.toreadonly()
        self.memory.close_to_writing()

    def retire(self) -> None:
        """The life is over. Give back all but what is lent, or finished and not yet opened."""
        self.retired = True
        self._reclaim()
        for slot in range(len(self._used)):
            if self._states[slot] == FREE:
                self._empty(slot)


def _nothing_lent() -> None:
    """All leaves are copied."""


class SlotResult(NamedTuple):
    """A finished batch that lies in a slot, or in a file of its own, or in one that could not be had."""

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
        """Bytes from the start of the slot to the end of the spec, which comes last."""
        return self.where + 16 * self.buffers + self.spec_bytes

    def open(self, small: int = SMALL, read: Callable[..., Any] = unpack) -> Any:
        """What it holds. Its slot is free when the last view of it is gone; leaves below `small` bytes are copied.

        `read`: as `unpack`, where it was not packed as usual.
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
        """Nobody opens it: its slot is free."""
        if self.slots is not None:
            self.slots.put_back(self.slot)
