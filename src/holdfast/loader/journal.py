"""Journal: what is loaded of a batch that has ended a life before, so that the next life need not begin again.

Without it a batch that takes longer than the time between two kills would never be finished. A batch is journalled
from its second attempt on: the samples that are loaded, in their order, each with the state of the random generators
after it and with what went wrong with it, lie in the slot until the batch is collated. If the worker dies, the trainer
hands them to its next life.

    slot: [where, buffers, spec bytes] per sample | the samples
"""

import struct
from collections.abc import Sequence
from typing import Any

from holdfast.core.host import JOURNAL_BYTES, JOURNALLED, SLOT
from holdfast.loader import seeds
from holdfast.shm.pack import Packer, unpack
from holdfast.shm.slot_writer import Full, SlotSpace

_ENTRY = struct.Struct("<QQQ")


class Journal:
    """One task's. `saved` is what the last life left; it is copied out at once, for the slot is written again."""

    def __init__(self, packer: Packer, space: SlotSpace, words: Any, samples: int) -> None:
        self._packer = packer
        self._space = space
        self._words = words
        self.troubles: list[Any] = []  # of the samples that were restored
        try:
            space.room(_ENTRY.size * samples)
            self._open = True
        except Full:
            self._open = False
        words[JOURNALLED] = words[JOURNAL_BYTES] = 0
        words[SLOT] = space.slot

    def restore(self, saved: memoryview, count: int) -> list[Any]:
        """The samples that are there already; the generators go on where they were after the last of them."""
        entries = []
        for i in range(count):
            where, buffers, spec_bytes = _ENTRY.unpack_from(saved, i * _ENTRY.size)
            try:
                entries.append(unpack(saved, where, buffers, spec_bytes, lambda: None))
            except BaseException:  # user code (__setstate__): from here on they are loaded again
                break
        for sample, state, troubles in entries:
            self.add(sample, troubles, state)
            self.troubles += troubles
        if entries:
            seeds.restore(entries[-1][1])
        return [sample for sample, *_ in entries]

    def add(self, sample: Any, troubles: Sequence[Any] = (), state: Any = None) -> None:
        """One more is loaded, with these troubles. What cannot be written is not: the journal then ends there."""
        if not self._open:
            return
        words = self._words
        try:
            entry = self._packer.pack((sample, state or seeds.save(), tuple(troubles)), self._space)
        except BaseException:  # user code (__reduce__ may exit), or a full slot: this is a help, not a duty
            self.close()
            return
        number = words[JOURNALLED]
        _ENTRY.pack_into(self._space.view, number * _ENTRY.size, *entry)
        words[JOURNAL_BYTES] = self._space.end
        words[JOURNALLED] = number + 1

    def close(self) -> None:
        """Something is left out, or cannot be written: what follows would not be in its place."""
        self._open = False

    def discard(self) -> None:
        """The slot is about to be written by the batch itself."""
        self._words[JOURNALLED] = 0
        self._space.clear()
