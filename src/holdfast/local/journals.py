"""Journals: what dead workers had loaded of their batches, for their next lives. In the trainer's memory."""

from holdfast.core.messages import Place, Stage
from holdfast.local.pulse import JOURNAL_BYTES, JOURNALLED, POSITION, SLOT, Pulse
from holdfast.shm.slots import Slots


class Journals(dict[int, tuple[bytes, int]]):
    """task -> (the bytes that its last life wrote, how many samples they hold).

    `sent`: to its next life. Otherwise somebody here reads them, and wants all that there is.
    """

    def __init__(self, *, sent: bool) -> None:
        super().__init__()
        self._sent = sent

    def keep(self, pulse: Pulse, slots: Slots | None, on: Place) -> None:
        """A life ended on this; `slots` are its own, if they are still there."""
        words = pulse.words
        count = words[JOURNALLED]
        self.pop(on.task, None)
        if slots is None or on.stage is not Stage.FETCH or not count:
            return
        if words[POSITION] != on.position and self._sent:
            return  # it went on between the verdict and its end: what it wrote reaches past the sample in question
        start = words[SLOT] * slots.stride
        saved = bytes(slots.memory.view[start : start + words[JOURNAL_BYTES]])
        if len(saved) < slots.stride // 4 or not self._sent:  # it must fit beside the payload
            self[on.task] = (saved, count)
