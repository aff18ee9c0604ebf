"""Batches to the device, ahead of their turn: `DataLoader(device="cuda")`.

The ferry takes finished batches out of their slots and copies them on a stream of its own, while the device computes.
Its memory is the *consumer's*: each tensor is allocated on the stream that is current when its copy is queued, and the
copy waits for what that stream was given before. So a batch behaves as if `.to(device)` had been called there: dropped
at any moment, its memory is used again in the order of that stream, and what is on the device is what is ahead and
what the user keeps. At its turn the then current stream waits for the copy.

    next(due, ready)   in next(): the batch whose turn it is; takes ahead what is there already
    clear()            a new epoch, or the end

Tensors in lists, tuples and mappings cross. Of anything else, what has a `.to(device)` is asked to go, at its turn;
the rest stays on the host. Each large tensor has memory of its own; the small ones of a batch share some, so that 20
labels are one copy and a kept one keeps at most `SHARED_BYTES`.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from holdfast.core.host import Result
from holdfast.diagnose.narrator import Record
from holdfast.loader.cuda_slots import CudaSlots, gate
from holdfast.loader.tree import kept, mapped, moved, tensors_of
from holdfast.shm.pack import SMALL
from holdfast.shm.slot_writer import ALIGN
from holdfast.shm.slots import SlotResult
from holdfast.system.signal_origin import raised_by_handler

# Batches on the device before their turn: one is enough to hide the copy of even steps, two that of uneven ones.
AHEAD = 2
# And no more than about this; batches can be large.
AHEAD_BYTES = 1 << 30
# Small tensors that lie side by side are copied at once, up to this much.
SHARED_BYTES = 1 << 20
_LOOK_S = 50e-6


class Unpacked(NamedTuple):
    """A batch. `result`: what it came in. `error`: what is to be raised in its place."""

    batch: Any = None
    samples: int = 0
    result: Result | None = None
    error: BaseException | None = None


# A batch on its way ------------------------------------------------------------------------------------------------


class Crossing:
    """One batch. `host` until its copy is queued, `batch` from then until it is delivered."""

    def __init__(self, unpacked: Unpacked) -> None:
        self.host = unpacked.batch
        self.samples = unpacked.samples
        # Only what lies in a slot can be read by the device in place.
        self.slot_result = unpacked.result if isinstance(unpacked.result, SlotResult) else None
        self.bytes = 0
        self.queued = False
        self.batch: Any = None
        self.error = unpacked.error
        self.stream: torch.cuda.Stream  # whose memory it is
        self.copied: torch.cuda.Event
        self.twins: list[torch.Tensor] = []

    def landed(self) -> bool:
        return bool(self.copied.query())  # type: ignore[no-untyped-call]


class Waits:
    """How long the consumer's stream waited for data, seen by the stream itself.

    One event when next() is called, one when the batch is there: if the device was busy between the two, it reaches
    the first one late, and no time passes between them.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []
        self._last: torch.cuda.Event | None = None
        self._asked: torch.cuda.Event

    def asked(self, stream: torch.cuda.Stream) -> None:
        self._asked = self._recorded(stream)

    def given(self, stream: torch.cuda.Stream) -> None:
        self._pairs.append((self._asked, self._recorded(stream)))

    def _recorded(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def add_up(self) -> None:
        """What the device has passed by now."""
        while self._pairs and self._pairs[0][1].query():  # type: ignore[no-untyped-call]
            asked, given = self._pairs.popleft()
            self._record.device_waited_s += asked.elapsed_time(given) / 1000
            # (Of two streams one may be behind the other.)
            self._record.device_ran_s += max(0.0, (self._last or asked).elapsed_time(given) / 1000)
            self._spare += (asked,) if self._last is None else (asked, self._last)
            self._last = given

    def clear(self) -> None:
        """The time until the next epoch is nobody's wait."""
        self._pairs.clear()
        self._last = None


class DeviceTransfer:
    """See the module. `depth`: how many batches may be ahead."""

    def __init__(self, device: torch.device, depth: int, record: Record) -> None:
        self._device = device
        self._most = depth
        self._side: torch.cuda.Stream | None = None  # made with the first batch, after the workers were forked
        self._gate = gate()
        self._ahead: deque[Crossing] = deque()
        self._waits = Waits(record)

    def __len__(self) -> int:
        return len(self._ahead)

    def clear(self) -> None:
        """Forget what is ahead. (The gate holds on to what is being copied until it has landed.)"""
        self._ahead.clear()
        self._waits.clear()

    def next(self, due: Callable[[], Unpacked | None], ready: Callable[[], Unpacked | None]) -> Unpacked | None:
        """The next batch, on the device. `due()` waits for one, None is the end; `ready()` gives one that is there."""
        if self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        stream = torch.cuda.current_stream(self._device)
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing:
            self._waits.add_up()
            self._waits.asked(stream)
        if not self._ahead:
            unpacked = due()
            if unpacked is None or unpacked.error is not None:
                return unpacked
            self._ahead.append(Crossing(unpacked))
        crossing = self._ahead[0]
        if crossing.error is not None:
            self._ahead.popleft()
            return Unpacked(error=crossing.error)
        try:
            self._land(crossing, stream, capturing)
        except Exception as error:  # no memory, say: the next call tries the same one again
            if raised_by_handler(error):
                raise
            return Unpacked(error=error)
        if not capturing:
            self._waits.given(stream)
            self._take_ahead(ready, stream)
        self._ahead.popleft()  # only now: whatever was raised until here, it is not lost
        batch, crossing.batch, crossing.host, crossing.twins = crossing.batch, None, None, []
        return Unpacked(batch, crossing.samples)

    def _take_ahead(self, ready: Callable[[], Unpacked | None], stream: torch.cuda.Stream) -> None:
        """Beside the one that is due."""
        while len(self._ahead) <= self._most:
            if sum(crossing.bytes for crossing in self._ahead) > AHEAD_BYTES:
                return  # with the one that is due, which is as large as the one that would come
            unpacked = ready()
            if unpacked is None:
                return
            crossing = Crossing(unpacked)
            self._ahead.append(crossing)
            if crossing.error is not None:
                return  # the user's to see, when it is this batch's turn
            try:
                self._queue_copy(crossing, stream)
            except RuntimeError as error:  # no memory, mostly: fewer ahead from now on. It is tried again at its turn
                if raised_by_handler(error):
                    raise
                self._most = max(0, len(self._ahead) - 2)
                return

    def _land(self, crossing: Crossing, stream: torch.cuda.Stream, capturing: bool) -> None:
        """It is there, or will be before the stream does anything more."""
        if not crossing.queued:
            try:
                self._queue_copy(crossing, stream, capturing)
                if not crossing.queued:
                    crossing.batch = moved(crossing.host, self._device)
            except torch.OutOfMemoryError as error:
                error.add_note(self._too_large())
                raise
        if crossing.queued:
            self._join(crossing, stream, capturing)

    def _too_large(self) -> str:
        return (
            f"a batch did not fit on {self._device}; next() tries the same one again\n"
            f"    seen   {len(self._ahead) - 1} other batches of this loader are there ahead of their turn\n"
            f"    try    a smaller batch_size, or drop the last batch before the next is asked for\n"
            f"    more   holdfast explain gpu-memory-full"
        )

    def _join(self, crossing: Crossing, stream: torch.cuda.Stream, capturing: bool) -> None:
        """The stream goes on when the copy has landed."""
        if capturing:  # a captured wait would be for a copy that no replay makes
            self._wait_for(crossing)
        else:
            stream.wait_event(crossing.copied)
            if stream != crossing.stream:
                for twin in crossing.twins:
                    twin.record_stream(stream)
        if self._gate is not None and crossing.slot_result is not None and crossing.slot_result.slots is not None:
            self._gate.shown(crossing.slot_result.slots, crossing.slot_result.slot)

    def _wait_for(self, crossing: Crossing) -> None:
        while not crossing.landed():
            time.sleep(_LOOK_S)

    # Copies --------------------------------------------------------------------------------------------------------

    def _queue_copy(self, crossing: Crossing, stream: torch.cuda.Stream, capturing: bool = False) -> None:
        """Queue its copy, unless it holds something odd. Raises when there is no memory; then nothing has changed."""
        host = crossing.host
        leaves = tensors_of(host)
        if leaves is None:
            return
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._room = torch.cuda.Event()  # type: ignore[no-untyped-call]  # behind all that used its memory before
        side = self._side
        home = side if capturing else stream  # what is allocated on a captured stream belongs to the graph
        with torch.cuda.stream(home) if capturing else nullcontext():
            twins, copies = self._twins(leaves, crossing.slot_result, capturing)
        if not capturing:
            self._room.record(home)
            side.wait_event(self._room)
        with torch.cuda.stream(side):
            for twin, source in copies:
                twin.copy_(source, non_blocking=True)
            crossing.copied = side.record_event()
        crossing.batch = mapped(host, lambda leaf: twins[id(leaf)] if id(leaf) in twins else kept(leaf))
        crossing.stream, crossing.queued, crossing.host = home, True, None
        crossing.twins = [twin for twin, _ in copies]
        crossing.bytes = sum(twin.nbytes for twin in crossing.twins)
        slot_result = crossing.slot_result
        if slot_result is None or slot_result.slots is None or slot_result.slot not in slot_result.slots.lent:
            crossing.slot_result = None  # copied out of its slot, or never in one
        elif self._gate is not None:
            self._gate.copying(slot_result.slots, slot_result.slot, crossing)

    def _twins(
        self, leaves: dict[int, torch.Tensor], slot_result: SlotResult | None, capturing: bool
    ) -> tuple[dict[int, torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """For each tensor, by identity, its twin on the device; and what to copy into what."""
        twins: dict[int, torch.Tensor] = {}
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        start, end = _known_to_device(slot_result)
        small: list[tuple[int, torch.Tensor]] = []
        for key, leaf in leaves.items():
            address = leaf.data_ptr()
            inside = start <= address and address + leaf.nbytes <= end
            if inside and 0 < leaf.nbytes < SMALL and (address - start) % ALIGN == 0 and leaf.is_contiguous():
                small.append((address, leaf))
                continue
            twins[key] = torch.empty_like(leaf, device=self._device)
            copies.append((twins[key], leaf if inside or capturing or not leaf.nbytes else leaf.pin_memory()))
        small.sort(key=lambda pair: pair[0])
        for group in _side_by_side(small):
            assert slot_result is not None and slot_result.slots is not None
            first, last = group[0][0], group[-1][0] + group[-1][1].nbytes
            offset = first - slot_result.slots.memory.address
            source = torch.frombuffer(slot_result.slots.memory.view[offset : offset + last - first], dtype=torch.uint8)
            whole = torch.empty_like(source, device=self._device)
            copies.append((whole, source))
            storage = whole.untyped_storage()
            for address, leaf in group:
                twin = torch.empty(0, dtype=leaf.dtype, device=self._device)
                twins[id(leaf)] = twin.set_(storage, (address - first) // leaf.itemsize, leaf.shape, leaf.stride())
        return twins, copies


def _known_to_device(slot_result: SlotResult | None) -> tuple[int, int]:
    """The addresses of a slot's bytes that the device reads by itself; none where it is not registered."""
    if slot_result is None or slot_result.slots is None or slot_result.slot not in slot_result.slots.registered:
        return 0, 0
    slots, slot = slot_result.slots, slot_result.slot
    start = slots.memory.address + slot * slots.stride
    return start, start + slots.registered[slot]


def _side_by_side(small: list[tuple[int, torch.Tensor]]) -> list[list[tuple[int, torch.Tensor]]]:
    """Small tensors, by address, in groups that are copied at once."""
    groups: list[list[tuple[int, torch.Tensor]]] = []
    end = 0
    for address, leaf in small:
        if groups and address - end < ALIGN and address + leaf.nbytes - groups[-1][0][0] <= SHARED_BYTES:
            groups[-1].append((address, leaf))
        else:
            groups.append([(address, leaf)])
        end = address + leaf.nbytes
    return groups


# What a loader wants -----------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """How batches leave the host; all None where they stay as they are."""

    gate: CudaSlots | None = None
    transfer: DeviceTransfer | None = None
    plain: torch.device | None = None
    """Some other kind of device: by `.to()`, at each batch's turn."""


def checked(device: torch.device | str | int | None) -> torch.device | None:
    """What `device=` means; None for the host. Does not touch the device."""
    if device is None:
        return None
    known = torch.device(device)
    return None if known.type == "cpu" else known


def present(device: torch.device) -> torch.device:
    """The same device. Raises where there is none; makes no context, for workers may be forked after this."""
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        raise RuntimeError(
            f"DataLoader(device={str(device)!r}): {built}\n"
            "    try    nvidia-smi, and torch.cuda.is_available(); device=None leaves batches on the host"
        )
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise RuntimeError(
            f"DataLoader(device={str(device)!r}): there are {torch.cuda.device_count()} CUDA devices, numbered from 0\n"
            "    try    a lower number; CUDA_VISIBLE_DEVICES may hide some"
        )
    return device


def way_to(device: torch.device | None, pinned_for: str | None, prefetch: int, record: Record) -> Way:
    """`pinned_for`: the kind of device to pin memory for. `prefetch`: how many batches are drawn ahead."""
    if device is None:
        return Way(gate() if pinned_for is not None and pinned_for.split(":")[0] in ("", "cuda") else None)
    if present(device).type != "cuda":
        return Way(plain=device)
    # Half of what is drawn ahead at most: the rest is what workers are busy with.
    return Way(gate(), DeviceTransfer(device, min(AHEAD, prefetch // 2), record))
