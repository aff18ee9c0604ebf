"""Samples of a map-style dataset under the policy: retries, skip, replace. Used by workers and by num_workers=0.

Around user code, `BaseException` is caught in a worker: a `SystemExit` in a dataset must not end it silently. In the
trainer (num_workers=0) only `Exception` is, so that Ctrl-C still works; and not what a signal handler of the trainer's
raised, which is no sample's fault.
"""

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from holdfast.core.host import BASE, JOB_WORDS, POSITION, RETRIES, SAMPLES, SINCE, SPARE, STAGE, Recorder, Spent, Words
from holdfast.core.messages import Stage
from holdfast.errors import SampleError
from holdfast.loader import seeds
from holdfast.loader.journal import Journal
from holdfast.policy import Policy
from holdfast.remote_exception import Raised, capture, text_of
from holdfast.system.evidence import Facts, facts_of
from holdfast.system.linux import refused
from holdfast.system.signal_origin import raised_by_handler

# Looked up once: in Python 3.11 each time takes 100 ns.
_FETCH = Stage.FETCH
Caught = type[BaseException] | tuple[()]
# Stands for a sample that is left out of its batch.
_LEFT_OUT = object()
# What becomes of a sample that has ended its workers: this one finds something to be given in its place.
GIVEN = "given another"
_NOTHING = Raised("", "", "", None, None)
_NO_FACTS = Facts()
# What may stand in the place of a bad sample: its index, the sample, None. Or its index, None, and what it raised.
Spare = tuple[Any, Any, BaseException | None]


def errors() -> Caught:
    """In an except clause of the trainer's: what may be caught of what was just raised."""
    error = sys.exc_info()[1]
    return () if error is None or raised_by_handler(error) else Exception


def everything() -> Caught:
    """In one of a worker's."""
    return BaseException


@dataclass(frozen=True, slots=True)
class Trouble:
    """One sample that raised, or could not be collated with the others (`stage`).

    It went well in the end, was left out, or was replaced.
    """

    position: int
    index: object
    attempts: int
    seconds: float
    raised: Raised
    fate: str  # "retried", "skipped", "replaced"; or GIVEN: replaced, and what it did was told before
    replaced_by: object = None
    stage: Stage = Stage.FETCH

    def brief(self) -> "Trouble":
        """What finds more room, and always pickles."""
        index, spare = _plain(self.index), _plain(self.replaced_by)
        return replace(self, index=index, replaced_by=spare, raised=self.raised.brief())


def bad_of(troubles: Sequence[Trouble]) -> int:
    """How many samples are missing or replaced, of which nobody knows yet."""
    return sum(trouble.fate not in ("retried", GIVEN) for trouble in troubles) if troubles else 0


def uncollated(troubles: Sequence[Trouble]) -> int:
    """How many were loaded, and left out because they could not be collated with the rest."""
    return sum(trouble.stage is Stage.COLLATE and trouble.fate == "skipped" for trouble in troubles)


def _plain(index: object) -> object:
    return index if type(index) in (int, str) else None


@dataclass(frozen=True, slots=True)
class BatchFailure:
    """A task that ends in an exception. `troubles`: what had gone wrong with its samples before."""

    position: int
    index: object
    stage: Stage
    attempts: int
    raised: Raised
    troubles: tuple[Trouble, ...] = ()

    def brief(self) -> "BatchFailure":
        """What always finds room, and always pickles."""
        troubles = tuple(trouble.brief() for trouble in self.troubles)
        return replace(self, index=_plain(self.index), raised=self.raised.brief(), troubles=troubles)


class SampleFailed(Exception):
    """User code raised, and the policy is to say so. Its cause is the exception; around it is where it was."""

    def __init__(
        self,
        error: BaseException,
        position: int,
        index: object,
        stage: Stage,
        attempts: int,
        facts: Facts = _NO_FACTS,
    ) -> None:
        super().__init__(error, position, index, stage, attempts, facts)
        self.error = error
        self.facts = facts
        self.position = position
        self.index = index
        self.stage = stage
        self.attempts = attempts

    def to_failure(self, troubles: Sequence[Trouble] = (), catch: type[BaseException] = BaseException) -> BatchFailure:
        """As plain data, for the trainer. `catch`: what may be caught of what the exception itself raises."""
        raised = capture(self.error, self.facts, catch)
        return BatchFailure(self.position, self.index, self.stage, self.attempts, raised, tuple(troubles))


class Draw:
    """What one task asks for.

    `stay`: up to this position a fresh worker was of no help. `positions`: where in the batch each index stands, if
    some were left out before. `spares`: what may be tried in the place of bad ones; not the `deadly` ones, by number
    from 1 on. `bad`: positions that are not tried themselves, if bad ones are replaced. `journal`: of a
    batch that has ended a life before; `done`: its first samples, which an earlier life has loaded. `troubles`: what
    went wrong with its samples so far, in that life, too.
    """

    __slots__ = (
        "alone",
        "bad",
        "deadly",
        "done",
        "indices",
        "journal",
        "positions",
        "spares",
        "stay",
        "troubles",
    )

    def __init__(
        self,
        stay: int,
        indices: Any,
        positions: Sequence[int] | None = None,
        alone: bool = False,
        spares: Sequence[object] = (),
        bad: Sequence[int] = (),
        deadly: Sequence[int] = (),
    ) -> None:
        self.stay = stay
        self.bad = bad
        self.deadly = deadly
        self.journal: Journal | None = None
        self.done: list[Any] = []
        self.troubles: list[Trouble] = []
        self.indices = indices
        self.positions = positions
        self.alone = alone
        self.spares = spares


class Unwatched:
    """Where the trainer itself loads: only the fetcher reads what is noted here."""

    def __init__(self) -> None:
        self.words: Words = [0] * JOB_WORDS

    def enter(self, stage: int, position: int = 0, /) -> None:
        self.words[STAGE], self.words[POSITION] = stage, position

    def walk(self, stage: int, indices: Iterable[Any], /) -> Iterator[Any]:
        words = self.words
        for words[POSITION], index in enumerate(indices):
            yield index


class Watched(Recorder, Protocol):
    """What a `MapFetcher` needs of a JobContext."""

    @property
    def words(self) -> Words: ...


class MapFetcher:
    """Loads the samples of batches of one dataset. `context`: a job's; `catch()`: what may be caught."""

    def __init__(
        self,
        dataset: Any,
        auto_collation: bool,
        policy: Policy,
        *,
        context: Watched | None = None,
        catch: Callable[[], Caught] = errors,
        reseed: bool = False,
        may_leave: bool = False,
        growth_bytes: int | None = None,
    ) -> None:
        """`may_leave`: for a fresh worker, where this one has used something up; raises `Spent`. `growth_bytes`: what
        it may allocate.
        """
        self.dataset = dataset
        self._auto_collation = auto_collation
        self._policy = policy
        context = Unwatched() if context is None else context
        self._words, self._walk = context.words, context.walk
        self._catch = catch
        self._kind: type[BaseException] = BaseException if catch is everything else Exception
        self._reseed = reseed
        self._may_leave = may_leave
        self._growth = growth_bytes
        self._loaded = 0  # batches of this life
        self._down = False  # the last sample that failed had been tried as often as allowed
        self._all_or_none = policy.bad_sample == "raise"  # then what was loaded before an exception is not needed
        many = getattr(dataset, "__getitems__", None)
        self._many = many if callable(many) else None

    def load(self, draw: Draw, seed: Callable[[], None]) -> tuple[Any, list[Trouble]]:
        """The samples of a batch (or the one sample, without auto-collation), and what went wrong on the way."""
        troubles = draw.troubles
        if not self._auto_collation:
            self._words[STAGE] = Stage.FETCH
            sample = self._one(0, draw.indices, draw, troubles)
            self._loaded += 1
            return sample, troubles
        if self._many is not None and not (draw.alone or draw.done or draw.bad):
            samples = self._all_at_once(draw, seed)
            if samples is not None:
                self._loaded += 1
                return samples, troubles
        samples = self._one_by_one(draw, troubles)
        self._loaded += 1
        return samples, troubles

    def _one_by_one(self, draw: Draw, troubles: list[Trouble]) -> list[Any]:
        """The pulse says which sample is being loaded, and since when."""
        plain = not (self._policy.retries or draw.journal or draw.positions or draw.bad)
        samples = self._quickly(draw, troubles) if plain else self._carefully(draw, troubles)
        self._words[SAMPLES] += len(samples)
        return samples

    def _quickly(self, draw: Draw, troubles: list[Trouble]) -> list[Any]:
        """The hot loop."""
        dataset = self.dataset
        walk = self._walk(_FETCH, draw.indices)
        samples: list[Any] = []
        while True:
            try:
                if self._all_or_none:
                    return [dataset[index] for index in walk]
                for index in walk:
                    samples.append(dataset[index])
                return samples
            except self._catch() as error:
                position = self._words[POSITION]
                self._leave_if_spent(error, position, draw)
                index = list(draw.indices)[position]  # (they may be a set)
                sample = self._bad(error, position, index, 1, 0.0, draw, troubles)
                if sample is not _LEFT_OUT:
                    samples.append(sample)

    def _carefully(self, draw: Draw, troubles: list[Trouble]) -> list[Any]:
        """With retries, and with what an earlier life has left."""
        positions = range(len(draw.indices)) if draw.positions is None else draw.positions
        samples: list[Any] = list(draw.done)
        journal = draw.journal
        for position, index in list(zip(positions, draw.indices, strict=True))[len(samples) :]:
            self._words[STAGE] = _FETCH
            before = len(troubles)
            sample = self._one(position, index, draw, troubles)
            if sample is not _LEFT_OUT:
                samples.append(sample)
            if journal is not None:
                journal.close() if sample is _LEFT_OUT else journal.add(sample, troubles[before:])
        return samples

    def _all_at_once(self, draw: Draw, seed: Callable[[], None]) -> list[Any] | None:
        """`__getitems__`. If it raises, the samples are tried one by one: None."""
        words = self._words
        words[STAGE] = Stage.FETCH_MANY
        words[POSITION] = len(draw.indices)
        words[SINCE] = time.monotonic_ns()
        assert self._many is not None
        try:
            samples: list[Any] = self._many(draw.indices)
        except self._catch() as error:
            self._leave_if_spent(error, len(draw.indices), draw)
            if not _has_getitem(self.dataset):
                raise SampleFailed(error, -1, None, Stage.FETCH_MANY, 1) from error
            seed()
            return None
        words[SAMPLES] += len(draw.indices)
        return samples

    def _leave_if_spent(self, error: BaseException, position: int, draw: Draw) -> None:
        """A worker that has loaded something before may have used up what this sample lacks: a fresh one has it."""
        first = len(draw.done) if draw.positions is None else (*draw.positions, -1)[len(draw.done)]
        if self._loaded or position != first:
            self._leave(error, position, draw)

    def leave_if_spent(self, failed: SampleFailed, draw: Draw) -> None:
        """The same for a collate: it stands behind the last sample."""
        if self._loaded > 1:  # this batch is one
            self._leave(failed.error, len(draw.indices) if self._auto_collation else 1, draw)

    def _leave(self, error: BaseException, position: int, draw: Draw) -> None:
        if self._may_leave and position > draw.stay:
            try:
                facts = facts_of(error)
                why = refused(error, self._growth, self._words[BASE])
            except self._catch():  # user code: its __str__, its properties
                return
            if why is not None:
                raise Spent(why, (f"{type(error).__name__}: {text_of(error, self._kind)}"[:300], *facts.texts))

    def _one(self, position: int, index: Any, draw: Draw, troubles: list[Trouble]) -> Any:
        """One sample, with retries. While a store is down, the first sample alone waits for it as long as it may."""
        policy, words = self._policy, self._words
        if position in draw.bad and policy.bad_sample == "replace":
            return self._another(None, position, index, 0, 0.0, draw, troubles)
        state = seeds.save() if policy.retries and self._reseed else None
        first: BaseException | None = None
        began = time.monotonic()
        for attempt in range(1, policy.retries + 2):
            words[POSITION] = position
            words[SINCE] = time.monotonic_ns()
            try:
                sample = self.dataset[index]
            except self._catch() as error:
                first = error
                self._leave_if_spent(error, position, draw)
                worth = issubclass(type(error), policy.retry_on)
                if not worth or self._down or attempt > policy.retries:
                    self._down = worth
                    spent = time.monotonic() - began
                    return self._bad(error, position, index, attempt, spent, draw, troubles)
                words[RETRIES] += 1
                self._pause(attempt)
                if state is not None:
                    seeds.restore(state)
            else:
                self._down = False
                if first is not None:
                    spent = time.monotonic() - began
                    troubles.append(
                        Trouble(position, index, attempt, spent, capture(first, catch=self._kind), "retried")
                    )
                return sample
        raise AssertionError("unreachable")

    def _pause(self, attempt: int) -> None:
        """Exponential, with jitter of its own generator: the user's random numbers stay as they are."""
        delay = min(self._policy.retry_delay_max, self._policy.retry_delay * 2 ** (attempt - 1))
        self._words[STAGE] = Stage.IDLE  # no deadline runs meanwhile
        time.sleep(delay * random.SystemRandom().uniform(0.75, 1.25))
        self._words[STAGE] = Stage.FETCH

    def _bad(
        self,
        error: BaseException,
        position: int,
        index: object,
        attempts: int,
        seconds: float,
        draw: Draw,
        troubles: list[Trouble],
    ) -> Any:
        """A sample that cannot be loaded: what the policy says of it."""
        match self._policy.bad_sample:
            case "skip":
                troubles.append(
                    Trouble(position, index, attempts, seconds, capture(error, catch=self._kind), "skipped")
                )
                return _LEFT_OUT
            case "replace":
                return self._another(error, position, index, attempts, seconds, draw, troubles)
        raise SampleFailed(error, position, index, Stage.FETCH, attempts) from error

    def _another(
        self,
        error: BaseException | None,
        position: int,
        index: object,
        attempts: int,
        seconds: float,
        draw: Draw,
        troubles: list[Trouble],
    ) -> Any:
        """One in the place of a bad sample; `error`: None for one that has ended its workers, which was told."""
        last, tried = error, index
        for spare, sample, why in self.spares(position, draw):
            if why is None:
                raised = _NOTHING if error is None else capture(error, catch=self._kind)
                fate = GIVEN if error is None else "replaced"
                troubles.append(Trouble(position, index, attempts, seconds, raised, fate, spare))
                return sample
            if error is None:
                last, tried = why, spare
        last = last or SampleError("there is nothing left to try in its place", index)
        raise SampleFailed(last, -1 if error is None else position, tried, Stage.FETCH, max(1, attempts)) from last

    def spares(self, position: int, draw: Draw) -> Iterator[Spare]:
        """What may stand at this position instead. One that raises is bad, too, and named when its own turn comes."""
        words = self._words
        for number, spare in enumerate(draw.spares, 1):
            if number in draw.deadly:
                continue
            words[STAGE] = _FETCH
            words[POSITION] = position
            words[SPARE] = number
            words[SINCE] = time.monotonic_ns()
            found: Spare
            try:
                found = spare, self.dataset[spare], None
            except self._catch() as error:
                found = spare, None, error
            finally:
                words[SPARE] = 0
            yield found

    def left_out(self, samples: Any, draw: Draw, troubles: list[Trouble]) -> bool:
        """True when nothing is left of this batch. One that was asked for empty is none of these: it is collated."""
        if samples is _LEFT_OUT:
            return True
        fewer = bool(troubles) or draw.positions is not None
        return fewer and self._auto_collation and isinstance(samples, list) and not samples


def _has_getitem(dataset: Any) -> bool:
    from torch.utils.data import Dataset

    method = getattr(type(dataset), "__getitem__", None)
    return method is not None and method is not Dataset.__getitem__
