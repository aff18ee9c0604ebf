"""The gate of CUDA: slots that a device reads in place, and when each may be used again.

A slot is *registered* with the driver, so that the device reads it at the speed of the link, and tensors in it are
pinned. Nobody tells us when such a copy ends: `.to("cuda", non_blocking=True)` only queues it, on whatever stream, and
the user may drop the batch at once. An event on the current stream does not see a copy on another one. So:

    the last view of a slot dies     the slot is held; in any thread
    the next next()                  cuCtxRecordEvent: an event behind all that every stream has been given so far
    a later next()                   the event has passed, so no copy from that slot is in flight: it is let go

A slot that only our own copies read (loader/device.py) waits for their event alone, which passes sooner. Nothing is
waited for, only asked, except when the trainer has run far ahead of the device (`pace`).

Every call to the driver is made inside some next() or iter(), never from a finalizer, and none while a graph is being
captured: each of them would spoil the capture. What a dropped loader leaves registered is taken back by the next call
of any loader, so there is one gate per process, as there is one table of registered memory. Until then the gate holds
on to it: memory must not be unmapped while it is registered, or the device would read pages that are nobody's any more
wherever that address is used next. To unregister waits for the device, so slots stay registered as long as they can.
"""

import ctypes
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import NamedTuple, Protocol

import torch

from holdfast.shm.memory_file import Memory
from holdfast.shm.slots import Slots

# A larger batch in a registered slot makes room for one larger still: batches of varying length shall not be
# registered again and again, by this share. The first time it is exact, for most batches are all of one size.
_HEADROOM = 4
# The trainer may queue work for so many batches more than the device has done. It never idles with that many queued,
# and memory is bounded. A real step is hundreds of kernels, of which CUDA itself queues a thousand.
MOST_BEHIND = 8
# But not for ever: the device may wait for something that the trainer does after next(). More slots are used then.
PATIENCE_S = 1.0
_LOOK_S = 100e-6

# CUDA's numbers.
_SUCCESS = 0
_PORTABLE = 1  # for every device
_NO_TIMING = 2
_RELAXED = 2
# Streams in torch's pool.
_POOL = 32

Mark = tuple[int, int]  # a context, and an event in it
Key = tuple[Slots, int]


class Copying(Protocol):
    """A batch that we copy to the device ourselves."""

    def landed(self) -> bool:
        """True once the copy is done."""


class Orphan(NamedTuple):
    """What was registered of slots that nobody holds any more; it keeps them mapped."""

    memory: Memory
    stride: int
    registered: dict[int, int]


class Refusal(NamedTuple):
    """The driver would not register memory."""

    why: str
    bytes: int


# What we call of CUDA's driver, and torch does not offer.
#
# The driver is called directly, not through the CUDA runtime: an error of the runtime stays behind, and torch's next
# check would find it.


class Driver:
    """libcuda, as far as it is called here. Raises OSError or AttributeError where it is missing or before 12.5."""

    def __init__(self) -> None:
        quick, slow = ctypes.PyDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so.1")  # `slow`: without the GIL
        handle, number = ctypes.c_void_p, ctypes.c_int
        self._record = _declared(quick.cuCtxRecordEvent, handle, handle)
        self._query = _declared(quick.cuEventQuery, handle)
        self._create = _declared(quick.cuEventCreate, ctypes.POINTER(handle), ctypes.c_uint)
        self._push = _declared(quick.cuCtxPushCurrent_v2, handle)
        self._pop = _declared(quick.cuCtxPopCurrent_v2, ctypes.POINTER(handle))
        self._retain = _declared(slow.cuDevicePrimaryCtxRetain, ctypes.POINTER(handle), number)
        self._state = _declared(
            quick.cuDevicePrimaryCtxGetState, number, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(number)
        )
        self._register = _declared(slow.cuMemHostRegister_v2, handle, ctypes.c_size_t, ctypes.c_uint)
        self._unregister = _declared(slow.cuMemHostUnregister, handle)
        self._exchange = _declared(quick.cuThreadExchangeStreamCaptureMode, ctypes.POINTER(number))
        self._capturing = _declared(quick.cuStreamIsCapturing, handle, ctypes.POINTER(number))
        self._name = _declared(quick.cuGetErrorName, number, ctypes.POINTER(ctypes.c_char_p))
        self._contexts: dict[int, int] = {}  # device -> its primary context
        self._pools: dict[int, set[int]] = {}  # device -> streams
        self._spare: dict[int, list[int]] = {}  # context -> events that have passed

    def capturing(self) -> bool:
        """True while a graph is being captured: in this thread, or by `torch.cuda.graph` in any."""
        if torch.cuda.is_current_stream_capturing():
            return True
        stream = torch.cuda.graph.default_capture_stream
        return stream is not None and self._is_capturing(stream.cuda_stream)

    def _is_capturing(self, stream: int) -> bool:
        status = ctypes.c_int()
        return bool(self._capturing(stream, status) == _SUCCESS and status.value)

    def _pool(self) -> set[int]:
        """torch's streams of usual priority: it has so many, and hands them out in turns."""
        device = torch.cuda.current_device()
        if device not in self._pools:
            self._pools[device] = {torch.cuda.Stream(device).cuda_stream for _ in range(_POOL)}  # type: ignore[no-untyped-call]
        return self._pools[device]

    def mark(self) -> list[Mark] | None:
        """An event in each context behind all that its streams were given so far; None where that is refused.

        Of all calls this one spoils a capture in another thread whatever we do; so it is not made during one.
        """
        if threading.active_count() > 1 and any(self._is_capturing(stream) for stream in self._pool()):
            return None
        marks: list[Mark] = []
        for context in self._active():
            with self._inside(context):
                event = self._event(context)
                if event is None or self._record(context, event) != _SUCCESS:
                    return None
            marks.append((context, event))
        return marks

    def passed(self, mark: Mark) -> bool:
        """True once the device is past it; not to be asked again after that."""
        context, event = mark
        with self._inside(context):
            if self._query(event) != _SUCCESS:
                return False
        self._spare[context].append(event)
        return True

    def register(self, address: int, size: int) -> str:
        """Empty, or why not."""
        with self._inside(self._context(torch.cuda.current_device())):
            return self._words(self._register(address, size, _PORTABLE))

    def unregister(self, address: int) -> str:
        """Empty, or why not."""
        with self._inside(self._context(torch.cuda.current_device())):
            return self._words(self._unregister(address))

    def _event(self, context: int) -> int | None:
        spare = self._spare.setdefault(context, [])
        if spare:
            return spare.pop()
        event = ctypes.c_void_p()
        return event.value if self._create(event, _NO_TIMING) == _SUCCESS else None

    def _active(self) -> list[int]:
        """The contexts of all devices in use: a batch may be copied to any of them."""
        flags, active = ctypes.c_uint(), ctypes.c_int()
        found = []
        for device in range(torch.cuda.device_count()):
            if self._state(device, flags, active) == _SUCCESS and active.value:
                found.append(self._context(device))
        return found

    def _context(self, device: int) -> int:
        context = self._contexts.get(device)
        if context is None:
            handle = ctypes.c_void_p()
            failed = self._words(self._retain(handle, device))
            if failed or handle.value is None:
                raise RuntimeError(f"CUDA gives no context for device {device}: {failed}")
            context = self._contexts[device] = handle.value
        return context

    def relaxed(self) -> "Relaxed":
        """What asks or registers inside does not spoil a capture that some other thread has begun."""
        return Relaxed(self._exchange)

    @contextmanager
    def _inside(self, context: int) -> Iterator[None]:
        try:
            self._push(context)  # inside: a signal handler may raise right after it
            yield
        finally:
            self._pop(ctypes.c_void_p())

    def _words(self, code: int) -> str:
        if code == _SUCCESS:
            return ""
        name = ctypes.c_char_p()
        self._name(code, name)
        return f"{(name.value or b'an error that it does not name').decode()} ({code})"


class Relaxed:
    """Of this thread: CUDA's `relaxed` mode for captures. A class, because a generator takes longer than the calls."""

    __slots__ = ("_exchange", "_mode")

    def __init__(self, exchange: Callable[..., int]) -> None:
        self._exchange = exchange
        self._mode = ctypes.c_int(_RELAXED)

    def __enter__(self) -> None:
        self._exchange(self._mode)

    def __exit__(self, *error: object) -> None:
        self._exchange(self._mode)


def _declared(function: Callable[..., int], *arguments: type) -> Callable[..., int]:
    function.argtypes = arguments  # type: ignore[attr-defined]
    function.restype = ctypes.c_int  # type: ignore[attr-defined]
    return function


# The slots.


class CudaSlots:
    """See the module, and `Gate` in shm/slots.py. All but `hold` and `unregister` run in next(), in `relaxed`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._turn = threading.Lock()  # of two threads that iterate, one is here
        self._back: deque[Key] = deque()  # the last view has died
        self._fresh: list[Key] = []  # and no copy of ours reads it: it needs a mark
        self._marked: deque[tuple[list[Mark], list[Key]]] = deque()  # and all streams bear a mark since
        self._copies: dict[Key, Copying] = {}  # what we read ourselves
        self._unseen: set[Key] = set()  # ... and nobody else looks at
        self._leaving: deque[Key] = deque()  # pages that shall go back
        self._known: weakref.WeakSet[Slots] = weakref.WeakSet()  # of which something is or was registered
        self._orphans: deque[Orphan] = deque()
        self._patient = True
        self.refused: Refusal | None = None

    # Noted in any thread -------------------------------------------------------------------------------------------

    def hold(self, slots: Slots, slot: int) -> None:
        self._back += ((slots, slot),)  # no call: see shm/slots.py

    def unregister(self, slots: Slots, slot: int) -> None:
        self._leaving.append((slots, slot))

    # Inside next() -------------------------------------------------------------------------------------------------

    def register(self, slots: Slots, slot: int, size: int) -> bool:
        known = slots.registered.get(slot, 0)
        if known >= size:
            return True
        if self.refused is not None or self._driver.capturing():
            return False
        address = slots.memory.address + slot * slots.stride
        with self._turn:
            if known:
                size += size // _HEADROOM
                self._forget(slots, slot)
            size = min(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE, slots.stride)
            if slots not in self._known:
                orphan = Orphan(slots.memory, slots.stride, slots.registered)
                weakref.finalize(slots, self._orphans.append, orphan).atexit = False
                self._known.add(slots)
            slots.registered[slot] = size  # noted first: a signal handler may raise right after it is registered
            why = self._driver.register(address, size)
            if why:
                del slots.registered[slot]
                self.refused = Refusal(why, size)
                return False
        return True

    def copying(self, slots: Slots, slot: int, copy: Copying) -> None:
        """We read this slot ourselves until `copy` has landed."""
        self._copies[slots, slot] = copy

    def shown(self, slots: Slots, slot: int) -> None:
        """The user gets what we copied. If a view of the slot is in it, the user may copy from it as well."""
        if slots.looked_at(slot):
            self._copies.pop((slots, slot), None)

    def capturing(self) -> bool:
        """True while a graph is being captured in this thread, or as usual in another."""
        return self._driver.capturing()

    def relaxed(self) -> AbstractContextManager[None]:
        """Around all of next(): a capture in some other thread is not spoilt by what we ask and register there."""
        return self._driver.relaxed()

    def step(self) -> None:
        """Let go of what no copy reads any more."""
        if not (self._back or self._fresh or self._copies or self._marked or self._leaving or self._orphans):
            return
        if self._turn.locked():
            return
        with self._turn:  # (after `acquire(blocking=False)` a signal handler may raise, and nobody would release it)
            if not self._driver.capturing():
                self._mark_returned()
                self._see_copies()
                self._see_marks()
                self._empty_leaving()
                self._end_orphans()

    def pace(self) -> None:
        """Wait, for a moment, while the device is many batches behind."""
        if self._behind <= MOST_BEHIND:
            self._patient = True
        elif self._patient and not self._driver.capturing():
            end = time.monotonic() + PATIENCE_S
            while self._behind > MOST_BEHIND and self._patient:
                time.sleep(_LOOK_S)
                self.step()
                self._patient = time.monotonic() < end

    @property
    def _behind(self) -> int:
        return len(self._copies) + len(self._marked)

    # A signal handler may raise in any of these: what they had not finished, the next step goes on with. They take a
    # slot off their list when it is done, and call nothing in between; see shm/slots.py.

    def _see_copies(self) -> None:
        for key, copy in list(self._copies.items()):
            if copy.landed():
                if key in self._unseen:
                    self._let_go(*key)
                    self._unseen -= {key}
                del self._copies[key]

    def _mark_returned(self) -> None:
        back, fresh = self._back, self._fresh
        while back:
            key = back[0]
            if key in self._copies:
                self._unseen |= {key}
            else:
                fresh += (key,)
            del back[0]
        if not fresh:
            return
        marks = self._driver.mark()  # None: the next next() tries again
        if marks is not None:
            self._marked += ((marks, fresh),)
            self._fresh = []

    def _see_marks(self) -> None:
        while self._marked:
            marks, keys = self._marked[0]
            while marks and self._driver.passed(marks[-1]):
                del marks[-1]
            if marks:
                return  # later ones are behind it
            while keys:
                self._let_go(*keys[-1])
                del keys[-1]
            del self._marked[0]

    def _let_go(self, slots: Slots, slot: int) -> None:
        if slot in slots.registered and slots.pages_go_back(slot):
            self._forget(slots, slot)
        slots.let_go(slot)

    def _empty_leaving(self) -> None:
        while self._leaving:
            slots, slot = self._leaving[0]
            if slot in slots.registered:
                self._forget(slots, slot)
            slots.put_back(slot)
            del self._leaving[0]

    def _end_orphans(self) -> None:
        while self._orphans:
            memory, stride, registered = self._orphans[0]
            for slot in list(registered):
                self._driver.unregister(memory.address + slot * stride)  # (once more is refused, and does no harm)
                del registered[slot]
            del self._orphans[0]

    def _forget(self, slots: Slots, slot: int) -> None:
        """What the driver would not give back, it has lost with its context."""
        self._driver.unregister(slots.memory.address + slot * slots.stride)
        del slots.registered[slot]


def gate() -> CudaSlots | None:
    """This process's; None where CUDA cannot tell when all copies are done (a driver before 12.5, or another make)."""
    return _gate_of(os.getpid())


@cache
def _gate_of(pid: int) -> CudaSlots | None:
    if torch.version.cuda is None:
        return None
    try:
        return CudaSlots(Driver())
    except (OSError, AttributeError):
        return None  # torch's own pinned copy does instead
