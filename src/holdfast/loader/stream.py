"""Batches of an iterable dataset. A worker *is* its place in the stream.

When a worker dies, its next life brings the stream back to that place: the dataset is iterated again from the start
(or from its own snapshot), and what was delivered is dropped. Each item still comes once. A rolling hash of cheap
fingerprints notices a replay that gives other items: that is an error, not silence.

A generator that raised is finished, whatever the policy: what it would have given is lost, and that is said. Other
iterators may go on after an exception.
"""

import copy
import inspect
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from holdfast.core.messages import Stage
from holdfast.errors import StreamBroken
from holdfast.loader.fetch import Caught, Failed, Trouble, errors
from holdfast.loader.shapes import differing
from holdfast.local.pulse import POSITION, SAMPLES, SINCE, STAGE, new_words
from holdfast.local.raised import capture
from holdfast.policy import Policy
from holdfast.shm.pack import is_plain
from holdfast.shm.place import CODES

# Edge bytes of a leaf that go into its fingerprint, and children of a node.
_EDGE = 32
_CHILDREN = 16
# A dataset with state_dict is asked for it at most this often.
SNAPSHOT_S = 1.0


class StreamFetcher:
    """One worker's stream of one epoch. `seed(number)` sets the generators for its n-th batch."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        auto_collation: bool,
        drop_last: bool,
        policy: Policy,
        seed: Callable[[int], None],
        *,
        words: Any = None,
        catch: Callable[[], Caught] = errors,
    ) -> None:
        self._dataset = dataset
        self._collate = collate_fn
        self._auto_collation = auto_collation
        self._drop_last = drop_last
        self._policy = policy
        self._seed = seed
        self._words: memoryview = new_words() if words is None else words
        self._catch = catch
        self._items: Iterator[Any] | None = None
        self._ended = False
        self._broken = ""
        self._generators: tuple[Any, ...] | None = None
        self.number = 0  # of the batch that comes next
        self.print = 0  # rolling fingerprint of all items so far
        self._snapshot_at = 0.0
        self._held: tuple[int, int, Any] | None = None  # the last one, until another batch is done

    # The stream ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._items is None:
            self._words[STAGE] = Stage.FETCH
            self._words[POSITION] = 0
            self._words[SINCE] = time.monotonic_ns()
            try:
                self._items = iter(self._dataset)
            except self._catch() as error:
                self._ended = True
                raise Failed(error, 0, None, Stage.FETCH, 1) from error

    def resume(self, number: int, print_: int, snapshot: tuple[int, int, Any] | None, size: int) -> None:
        """Bring a new life to where the last one was: `number` batches are done, whose fingerprint is `print_`."""
        if snapshot is not None:
            at, so_far, state = snapshot
            self._restore(state)
            self.number, self.print = at, so_far
        while self.number < number and not self._ended:
            self._seed(self.number)
            try:
                self.take(size, Stage.REPLAY)
            except StopIteration:
                break
            except Failed:
                continue  # it raised for the last life too, and that was told
        if self.number != number or self.print != print_:
            self._ended = True
            raise StreamBroken(
                f"the dataset's stream gave other items when it was replayed for batch {number} of this worker: "
                "its order is not reproducible, so nothing more can be taken from it without loss\n"
                "    try    seed what shuffles it from get_worker_info().seed, or give the "
                "dataset state_dict() and load_state_dict()"
            )

    def _restore(self, state: Any) -> None:
        if hasattr(self._dataset, "load_state_dict"):
            self._dataset.load_state_dict(state)
            self._seed(0)  # as when the last life opened it
            self._open()
        else:
            self._seed(0)
            self._open()
            self._items.load_state_dict(state)  # type: ignore[union-attr]

    def snapshot(self) -> tuple[int, int, Any] | None:
        """(batches done, fingerprint, state) of a dataset that knows its state; now and then.

        One batch late: who begins there comes by a batch that is known, so a state that leads elsewhere is noticed.
        """
        held, self._held = self._held, None
        owner: Any = self._dataset if hasattr(self._dataset, "load_state_dict") else self._items
        if not hasattr(owner, "state_dict") or not hasattr(owner, "load_state_dict"):
            return None
        now = time.monotonic()
        if now - self._snapshot_at >= SNAPSHOT_S:
            self._snapshot_at = now
            self._held = self.number, self.print, copy.deepcopy(owner.state_dict())
        return held

    # Batches -------------------------------------------------------------------------------------------------------

    def take(self, size: int, stage: Stage = Stage.FETCH) -> tuple[Any, list[Trouble]]:
        """The items of the next batch. StopIteration at the end of the stream."""
        if self._broken:
            self._ended, self._broken = True, ""
        if self._ended:
            raise StopIteration
        self._open()
        self.number += 1
        troubles: list[Trouble] = []
        if not self._auto_collation:
            return self._item(0, stage, troubles), troubles
        items: list[Any] = []
        for position in range(size):
            try:
                items.append(self._item(position, stage, troubles))
            except StopIteration:
                self._ended = True
                break
        if not items or (self._drop_last and len(items) < size):
            raise StopIteration
        self._words[SAMPLES] += len(items)
        return items, troubles

    def _item(self, position: int, stage: Stage, troubles: list[Trouble]) -> Any:
        words = self._words
        assert self._items is not None
        while True:
            words[STAGE] = stage
            words[POSITION] = position
            words[SINCE] = time.monotonic_ns()
            try:
                item = next(self._items)
            except StopIteration:
                raise
            except self._catch() as error:
                if inspect.isgenerator(self._items):
                    self._ended = True
                    error.add_note(
                        "The dataset's generator raised, so it is finished: what it would still have given in this "
                        "worker is lost. Catch the exception inside __iter__ to go on."
                    )
                    raise Failed(error, position, None, Stage.FETCH, 1) from error
                if self._policy.bad_sample == "skip":
                    troubles.append(Trouble(position, None, 1, 0.0, capture(error), "skipped"))
                    continue
                raise Failed(error, position, None, Stage.FETCH, 1) from error
            self.print = fingerprint(item, self.print)
            return item

    def collate(self, items: Any) -> Any:
        """The batch."""
        self._words[STAGE] = Stage.COLLATE
        self._words[SINCE] = time.monotonic_ns()
        try:
            return self._collate(items)
        except self._catch() as error:
            raise Failed(error, -1, None, Stage.COLLATE, 1, differing(error, items, None)) from error


def fingerprint(item: Any, so_far: int, depth: int = 4) -> int:
    """A cheap hash of structure and edge bytes, added to what came before."""
    crc = zlib.crc32
    if type(item) is torch.Tensor and item.dtype in CODES and is_plain(item):
        item = item.numpy()  # whose edges can be had without a copy, also of one that is transposed
    if isinstance(item, torch.Tensor):
        if item.is_nested:
            return crc(f"{item.dtype} nested".encode(), so_far)  # one of these has no shape
        so_far = crc(f"{item.dtype}{tuple(item.shape)}".encode(), so_far)
        if item.device.type != "cpu" or item.layout is not torch.strided or item.is_quantized or not item.numel():
            return so_far
        flat = item.detach().reshape(-1)
        edge = max(1, _EDGE // item.element_size())
        ends = torch.cat((flat[:edge], flat[-edge:])) if len(flat) > 2 * edge else flat.resolve_conj().resolve_neg()
        return crc(ends.contiguous().view(torch.uint8).numpy().tobytes(), so_far)
    if isinstance(item, np.ndarray):
        so_far = crc(f"{item.dtype}{item.shape}".encode(), so_far)
        if item.dtype.hasobject or not item.size:
            return so_far
        row: Any = item.flat
        return crc(row[-_EDGE:].tobytes(), crc(row[:_EDGE].tobytes(), so_far))
    if isinstance(item, bytes | bytearray):
        return crc(bytes(item[-_EDGE:]), crc(struct.pack("<q", len(item)), crc(bytes(item[:_EDGE]), so_far)))
    if isinstance(item, str):
        return fingerprint(item.encode(errors="replace"), crc(b"s", so_far))
    if item is None or isinstance(item, bool | int | float | complex):
        return crc(repr(item).encode(), so_far)
    so_far = crc(type(item).__name__.encode(), so_far)
    if depth and isinstance(item, dict):
        for key in list(item)[:_CHILDREN]:
            so_far = fingerprint(item[key], fingerprint(key, so_far, 1), depth - 1)
    elif depth and isinstance(item, list | tuple):
        so_far = crc(struct.pack("<q", len(item)), so_far)
        for child in item[:_CHILDREN]:
            so_far = fingerprint(child, so_far, depth - 1)
    return so_far
