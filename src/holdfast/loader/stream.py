"""Batches of an iterable dataset. A worker *is* its place in the stream.

When a worker dies, its next life brings the stream back to that place: the dataset is iterated again from the start
(or from its own snapshot), and what was delivered is dropped. Each item still comes once. A rolling hash of cheap
fingerprints notices a replay that gives other items: that is an error, not silence.

A generator that raised is finished, whatever the policy: what it would have given is lost, and that is said. Other
iterators may go on after an exception.
"""

import pickle
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from itertools import islice
from types import GeneratorType
from typing import Any

import numpy as np
import torch

from holdfast.core.host import JOB_WORDS, POSITION, SAMPLES, SINCE, STAGE, Words
from holdfast.core.messages import Stage
from holdfast.errors import StreamBroken
from holdfast.loader.fetch import Caught, SampleFailed, Trouble, errors, everything
from holdfast.policy import Policy
from holdfast.remote_exception import Raised, capture
from holdfast.shm.main_module import dumps
from holdfast.shm.pack import bytes_of, is_plain
from holdfast.shm.slot_writer import CODES

# Edge bytes of a leaf that go into its fingerprint, and children of a node.
_EDGE = 32
_CHILDREN = 16
_FINISHED = (
    "The dataset's generator raised, so it is finished: what it would still have given in this worker is lost. "
    "Catch the exception inside __iter__ to go on."
)
# Numbers of the same size, to look at those of which this torch can do little more than hold them.
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A dataset with state_dict is asked for it at most this often.
SNAPSHOT_S = 1.0

# Batches done, items in them, their fingerprint, and the pickled state.
Snapshot = tuple[int, int, int, bytes]
# Of an epoch that was left: its seed, batches that were asked for (or all), their fingerprint, and the last snapshot.
Left = tuple[int, int, int, Snapshot | None]
WHOLE = -1


class Sure(IntEnum):
    """Whether what is given on of a dataset is all that has changed of it."""

    SEEN = 0
    NOT_SEEN = 1  # not all of it could be looked at
    LOST = 2  # no: something has changed that cannot be given on


# What the epochs before have made of the dataset, nothing if all is as before; None where nothing is said of it.
Moved = tuple[bytes, Sure] | None
# Of a stream: the fingerprint of its batches in this epoch, the last snapshot of it, epochs that moved it before, and
# before these, what whole ones have made of the dataset.
Place = tuple[int, Snapshot | None, Sequence[Left], bytes]


class StreamFetcher:
    """One worker's stream of one epoch. `seed(number)` sets the generators for its n-th batch."""

    def __init__(
        self,
        dataset: Any,
        auto_collation: bool,
        drop_last: bool,
        policy: Policy,
        seed: Callable[[int], None],
        *,
        words: Words | None = None,
        catch: Callable[[], Caught] = errors,
    ) -> None:
        self._dataset = dataset
        self._auto_collation = auto_collation
        self._drop_last = drop_last
        self._policy = policy
        self._seed = seed
        self._words: Words = [0] * JOB_WORDS if words is None else words
        self._catch = catch
        self._kind: type[BaseException] = BaseException if catch is everything else Exception
        self._items: Iterator[Any] | None = None
        self.ended = False
        self.number = 0  # of the batch that comes next
        self.items = 0  # in all batches so far, those included that were only replayed
        self.print = 0  # rolling fingerprint of all items so far
        self._snapshot_at = 0.0
        self._held: Snapshot | Raised | None = None  # the last one, until another batch is done
        self._restored = False  # the dataset was given a state
        self._lives_there = False  # and what it gives as its state is that at once

    # The stream ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._items is None:
            self._words[STAGE] = Stage.FETCH
            self._words[POSITION] = 0
            self._words[SINCE] = time.monotonic_ns()
            try:
                self._items = iter(self._dataset)
            except self._catch() as error:
                self.ended = True
                raise SampleFailed(error, 0, None, Stage.FETCH, 1) from error

    @property
    def moves(self) -> bool:
        """The state that it was given is its own place now, from which also a next iter() may go on."""
        return self._restored and self._lives_there

    @property
    def spoilt(self) -> bool:
        """The next epoch must not begin with this dataset: it may begin where it was told to go on in this one."""
        return self._restored and (self.ended or not self._lives_there)

    def resume(self, number: int, print_: int, snapshot: Snapshot | None, size: int) -> None:
        """Bring a new life to where the last one was: `number` batches are done, whose fingerprint is `print_`."""
        if snapshot is not None and self._restore(snapshot[-1]):
            self.number, self.items, self.print, _ = snapshot
        while self.number < number and not self.ended:
            self._seed(self.number)
            try:
                self.take(size, Stage.REPLAY)
            except StopIteration:
                break
            except SampleFailed:
                continue  # it raised for the last life too, and that was told
        if self.number != number or self.print != print_:
            self.give_up(number)
            raise StreamBroken(
                f"the dataset's stream gave other items when it was replayed for batch {number} of this worker: "
                "its order is not reproducible, so nothing more can be taken from it without loss\n"
                "    try    seed what shuffles it from get_worker_info().seed, or give the "
                "dataset state_dict() and load_state_dict()",
                diverged=True,
            )

    def run_out(self, size: int, number: int) -> None:
        """An epoch that another life has given, so many batches of it or the whole."""
        while not self.ended and self.number != number:
            self._seed(self.number)
            with suppress(SampleFailed, StopIteration):
                self.take(size, Stage.REPLAY)

    def _restore(self, packed: bytes) -> bool:
        """False where it will not go on from there: then the stream is replayed from its start."""
        self._restored = True
        try:
            if hasattr(self._dataset, "load_state_dict"):
                self._dataset.load_state_dict(pickle.loads(packed))
                self._lives_there = self._is_at(self._dataset, packed)
                self._seed(0)  # as when the last life opened it
                self._open()
            else:
                self._seed(0)
                self._open()
                items: Any = self._items
                items.load_state_dict(pickle.loads(packed))
                self._lives_there = self._is_at(items, packed)
        except self._catch():  # user code; what it has changed shows in the fingerprint
            self._items, self.ended = None, False
            return False
        return True

    def _is_at(self, owner: Any, packed: bytes) -> bool:
        """The state that it was given is its own now, and not only kept until somebody iterates."""
        try:
            return bool(owner.state_dict() == pickle.loads(packed))
        except self._catch():  # perhaps nothing that can be compared
            return False

    def snapshot(self) -> Snapshot | Raised | None:
        """(batches done, items in them, fingerprint, state) of a dataset that knows its state; now and then.

        One batch late: who begins there comes by a batch that is known, so a state that leads elsewhere is noticed.
        Once, why there is none: its state_dict() raised, perhaps because it wants arguments.
        """
        held, self._held = self._held, None
        now = time.monotonic()
        if now - self._snapshot_at < SNAPSHOT_S:
            return held
        self._snapshot_at = now
        try:
            owner: Any = self._dataset if hasattr(self._dataset, "load_state_dict") else self._items
            if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
                self._held = self.number, self.items, self.print, dumps(owner.state_dict())
        except self._catch() as error:
            self._snapshot_at = float("inf")
            self._held = capture(error)
        return held

    # Batches -------------------------------------------------------------------------------------------------------

    def prepare(self, number: int) -> None:
        """The next batch is to be this one."""
        self._seed(number)
        if self.number != number and not self.ended:
            came = self.number
            self.give_up(number)
            raise StreamBroken(
                f"this worker's stream has come to batch {came}, and was asked for batch {number}: "
                "to go on would lose or double samples\n"
                "    try    please report this; a new iterator begins clean: iter(loader)"
            )

    def give_up(self, number: int) -> None:
        """Of this batch an error is told, and none follows."""
        self.ended, self.number = True, number + 1

    def take(
        self, size: int, stage: Stage = Stage.FETCH, troubles: list[Trouble] | None = None
    ) -> tuple[Any, list[Trouble]]:
        """The items of the next batch. StopIteration at the end of the stream.

        `troubles`: what goes wrong on the way is added there, also where there is no batch then: such a batch counts,
        though nothing is in it.
        """
        if self.ended:
            raise StopIteration
        self.number += 1
        self._open()
        troubles = [] if troubles is None else troubles
        if not self._auto_collation:
            try:
                item = self._item(0, stage, troubles)
            except StopIteration:
                self._end(troubles)
                raise
            self.items += 1
            return item, troubles
        items: list[Any] = []
        for position in range(size):
            try:
                items.append(self._item(position, stage, troubles))
            except StopIteration:
                self.ended = True
                break
        if not items or (self._drop_last and len(items) < size):
            self._end(troubles)
            raise StopIteration
        self.items += len(items)
        self._words[SAMPLES] += len(items)
        return items, troubles

    def _end(self, troubles: list[Trouble]) -> None:
        """There is no such batch, if nothing went wrong in it. Nobody asks for more: some iterators begin again."""
        self.ended = True
        self.number -= not troubles

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
                if type(self._items) is GeneratorType:
                    self.ended = True
                    with suppress(self._kind):  # notes of the user's that are no list, attributes that cannot be set
                        BaseException.add_note(error, _FINISHED)
                    raise SampleFailed(error, position, None, Stage.FETCH, 1) from error
                if self._policy.bad_sample == "skip":
                    troubles.append(Trouble(position, None, 1, 0.0, capture(error, catch=self._kind), "skipped"))
                    continue
                raise SampleFailed(error, position, None, Stage.FETCH, 1) from error
            try:
                self.print = fingerprint(item, self.print)
            except self._catch():  # user code, or a kind of tensor that cannot be asked
                self.print = zlib.crc32(type(item).__name__.encode(), self.print)
            return item


def fingerprint(item: Any, so_far: int, depth: int = 4) -> int:
    """A cheap hash of structure and edge bytes, added to what came before.

    Of a subclass of the user's the methods of the built-in class are called: its own may draw random numbers.
    """
    crc = zlib.crc32
    if type(item) is torch.Tensor and item.dtype in CODES and is_plain(item):
        item = item.numpy()  # whose edges can be had without a copy, also of one that is transposed
    if isinstance(item, torch.Tensor):
        if item.is_nested:
            return crc(f"{item.dtype} nested".encode(), so_far)  # one of these has no shape
        so_far = crc(f"{item.dtype}{tuple(item.shape)}".encode(), so_far)
        if item.device.type != "cpu" or item.layout is not torch.strided or item.is_quantized or not item.numel():
            return so_far
        return crc(_edges(item.detach()), so_far)
    if isinstance(item, np.ndarray):
        so_far = crc(f"{item.dtype}{item.shape}".encode(), so_far)
        if item.dtype.hasobject or not item.size:
            return so_far
        row: Any = item.flat
        return crc(row[-_EDGE:].tobytes(), crc(row[:_EDGE].tobytes(), so_far))
    if isinstance(item, bytes | bytearray):
        return crc(bytes(item[-_EDGE:]), crc(struct.pack("<q", len(item)), crc(bytes(item[:_EDGE]), so_far)))
    if isinstance(item, str):
        return fingerprint(str.encode(item, errors="replace"), crc(b"s", so_far))
    if item is None or isinstance(item, bool | int | float | complex):
        number: Any = next((kind for kind in (int, float, complex) if isinstance(item, kind)), type(item))
        return crc(number.__repr__(item).encode(), so_far)
    so_far = crc(type(item).__name__.encode(), so_far)
    if depth and isinstance(item, dict):
        for key, child in islice(dict.items(item), _CHILDREN):
            so_far = fingerprint(child, fingerprint(key, so_far, 1), depth - 1)
    elif depth and isinstance(item, list | tuple):
        sequence: Any = list if isinstance(item, list) else tuple
        so_far = crc(struct.pack("<q", sequence.__len__(item)), so_far)
        for child in islice(sequence.__iter__(item), _CHILDREN):
            so_far = fingerprint(child, so_far, depth - 1)
    return so_far


def _edges(tensor: torch.Tensor) -> bytes:
    """The bytes of its first and its last elements."""
    if not (tensor.is_conj() or tensor.is_neg() or tensor.dtype in CODES):
        tensor = tensor.view(_AS_INTEGERS[tensor.element_size()])
    flat = tensor.reshape(-1)
    edge = max(1, _EDGE // tensor.element_size())
    ends = torch.cat((flat[:edge], flat[-edge:])) if len(flat) > 2 * edge else flat.resolve_conj().resolve_neg()
    return bytes(bytes_of(ends))
