"""What came of calls: results, failures and deaths become the outcomes of futures. Which thread: the dispatcher's."""

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from holdfast.core.host import Host, Result
from holdfast.core.messages import Cause, Lost
from holdfast.pool.call import Call
from holdfast.pool.mapping import UNOPENED, ItemFailed, ItemOutcome, Part, left_by, unfold
from holdfast.pool.pool_job import CallFailure
from holdfast.pool.pool_narrator import PoolNarrator
from holdfast.shm.pack import unpack

# What the worker was on was noted before the kill. It may have gone on to the next item meanwhile.
_NOTED_BEFORE = (Cause.DEADLINE, Cause.MEMORY, Cause.PRESSURE)


class Settler:
    """`numbers` gives new calls their numbers. `again(call)` sends a call ahead of those that wait. `rewrite(call)`
    sends it by value, because a worker did not know a name in it.
    """

    def __init__(
        self,
        host: Host,
        narrator: PoolNarrator,
        numbers: "itertools.count[int]",
        again: Callable[[Call], None],
        rewrite: Callable[[Call], None],
    ) -> None:
        self._host = host
        self._narrator = narrator
        self._counts = narrator.record.counts
        self._numbers = numbers
        self._again = again
        self._rewrite = rewrite
        self.journals: dict[int, tuple[bytes, int]] = {}  # what dead workers have left of their chunks, by task

    def open(self, call: Call, result: object) -> None:
        """The call has an outcome."""
        if isinstance(result, Lost):
            self._lost(call, result)
            return
        result = cast(Result, result)
        try:
            several = call.items and not result.failed
            content = result.open(read=unfold if several else unpack)
        except BaseException as error:  # user code: __setstate__
            self.done(call, None, self._narrator.unreadable(call, error))
            return
        if result.failed and content.unknown and not _is_cut(call):
            self._rewrite(call)
        elif result.failed and call.items > 1:
            self._halve(call, opened=not content.unopened)
        elif result.failed:
            self.done(call, None, self._failure(call, content, result.worker))
        elif call.items:
            self._settle(call, self._told(call, content, result.worker))
        else:
            retried, value = content
            if retried:
                self._counts["retries"] += retried
            self.done(call, value, None)

    def done(self, call: Call, value: Any, error: BaseException | None) -> None:
        """The call is over. If it is a chunk that has not begun, all its items are over."""
        if call.items and error is not None:
            self._settle(call, [ItemFailed(error)] * call.items)
            return
        call.close()
        if call.tracker is not None:
            call.tracker.ended(1, error is not None)
        self._counts["done" if call.future.settle(value, error) else "cancelled"] += 1

    def unsent(self, call: Call, error: BaseException) -> None:
        """The call cannot be pickled."""
        if call.items > 1:
            self._halve(call)
            return
        with suppress(BaseException):  # the user's exception may have notes that are no list, or refuse attributes
            BaseException.add_note(error, f"while task {call.number} ({call.name}) was being pickled for a worker")
        self.done(call, None, error)

    def _failure(self, call: Call, failure: CallFailure, worker: int) -> BaseException:
        self._counts["raised"] += 1
        return self._narrator.failure(call, failure, worker, self._host.pid_of(worker) or 0)

    def _lost(self, call: Call, lost: Lost) -> None:
        if call.items:
            self._split(call, lost)
            return
        self._counts["lost"] += 1
        self._counts["retries"] += lost.attempts - 1
        self.done(call, None, self._narrator.lost(call, lost))

    # Chunks --------------------------------------------------------------------------------------------------------

    def _told(self, call: Call, outcomes: list[ItemOutcome], worker: int) -> list[Any]:
        """The results of a chunk; an ItemFailed stands for each that is missing."""
        told: list[Any] = []
        if all(retries == 0 and error is None for _, retries, error in outcomes):
            return [outcome[0] for outcome in outcomes]
        for item, (content, retries, error) in enumerate(outcomes):
            if error is not None:
                told.append(ItemFailed(self._narrator.unreadable(call.alone(call.number, item), error)))
            elif retries < 0:
                told.append(ItemFailed(self._failure(call.alone(call.number, item), content, worker)))
            else:
                self._counts["retries"] += retries
                told.append(content)
        return told

    def _split(self, call: Call, lost: Lost) -> None:
        """Its worker has died. Its results count, one item is guilty, and the other items are sent again."""
        saved, count = self.journals.get(call.number, (b"", 0))
        known = lost.event.on is not None
        unopened = known and lost.position == UNOPENED and not count and lost.event.cause not in _NOTED_BEFORE
        if unopened and call.items > 1:
            self._halve(call)
            return
        outcomes, begun = left_by(saved, count, lost.position if known else call.items - 1)
        told = self._told(call, outcomes, lost.event.worker)
        for item in range(len(told), begun):
            last = call.lives == 1
            guilty = call.alone(next(self._numbers) if not last else call.number, item, 0 if last else 1)
            if last:
                self._counts["lost"] += 1
                told.append(ItemFailed(self._narrator.lost(guilty, lost)))
            else:
                self._counts["retries"] += 1
                told.append(self._once_more(guilty.cut_from(call)))
        if len(told) < call.items:
            told.append(self._once_more(self._part(call, len(told), call.items).cut_from(call)))
        self._settle(call, told)

    def _halve(self, call: Call, opened: bool = False) -> None:
        """An item of the chunk cannot be pickled or opened, and none has begun. Send the chunk again as two halves.

        `opened`: a worker failed to open it, so it could be pickled: both halves are cut from the same letter.
        """
        middle = call.items // 2
        halves = [self._part(call, 0, middle), self._part(call, middle, call.items)]
        if opened or _is_cut(call):
            halves = [half.cut_from(call) for half in halves]
        self._settle(call, [self._once_more(half) for half in halves])

    def _part(self, call: Call, begin: int, end: int) -> Call:
        return call.part(next(self._numbers), begin, end)

    def _once_more(self, part: Call) -> Part:
        self._again(part)
        return Part(part.future, bool(part.items))

    def _settle(self, call: Call, told: list[Any]) -> None:
        call.close()
        if call.tracker is not None:
            here = [outcome for outcome in told if type(outcome) is not Part]
            call.tracker.ended(len(here), sum(type(outcome) is ItemFailed for outcome in here))
        self._counts["done" if call.future.settle(told, None) else "cancelled"] += 1


def _is_cut(call: Call) -> bool:
    return call.letter is not None and call.letter.is_cut
