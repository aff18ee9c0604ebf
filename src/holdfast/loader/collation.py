"""Collator: makes a batch of samples, and finds out which of them broke it when that fails.

Nothing is compared before. Then `compare` looks at what each sample is: at each path inside it the type, the dtype and
the shape, or the length. If more than half of the samples agree at a path, the others are odd there. If not, nobody can
tell which are.

To be odd is no guilt: torch stacks ints with floats, and a later sample may have more keys than the first. So the
default collate is given each odd sample together with a usual one. If such a pair fails, too, the odd one broke the
batch: it is a bad sample. What a collate_fn of the user's raises belongs to no sample. It is raised, and the comparison
is a note on it.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch.utils.data._utils.collate as torch_collate

from holdfast.core.host import SINCE, STAGE, Words
from holdfast.core.messages import Stage
from holdfast.loader.fetch import GIVEN, Caught, Draw, SampleFailed, Spare, Trouble, everything
from holdfast.loader.tree import parts
from holdfast.policy import Policy
from holdfast.remote_exception import capture, shown, text_of
from holdfast.system.evidence import Facts, Sign

# Looked up once: in Python 3.11 each time takes 100 ns.
_COLLATE = Stage.COLLATE

# How deep it looks into a sample; less deep, if one has more parts than this in all.
_DEPTHS = (6, 3, 1, 0)
_MOST_PARTS = 10_000
# Facts that are told, and groups of samples in one of them.
_MOST = 5
# A process that lacks something says one of these, or raises a MemoryError or an OSError: no sample is to blame.
_LACKS = ("can't allocate memory", "can't start new thread")
# The way to a part: ("['image']", "[0]").
Path = tuple[str, ...]
WhyNot = Callable[[list[Any]], BaseException | None]


class Look(NamedTuple):
    """What a part of a sample is. Numbers of any kind are alike: torch makes one tensor of them."""

    kind: str
    dtype: str = ""
    size: str = ""

    def said(self, beside: Sequence["Look"]) -> str:
        """In words, without what is the same in all `beside` it."""
        told = [word for place, word in enumerate(self) if word and len({look[place] for look in beside}) > 1]
        return " ".join(told) or self.kind


_MISSING = Look("missing")


class Tie(NamedTuple):
    """Where there is no majority: in words, and one sample of each kind."""

    text: str
    places: list[int]


@dataclass(slots=True)
class Comparison:
    """Of the samples of one batch. They are named by their places in it."""

    odd: dict[int, list[str]] = field(default_factory=dict)
    """How each that is unlike the most is so."""
    ties: list[Tie] = field(default_factory=list)
    usual: int | None = None
    """One that is as most are, wherever there is a majority."""

    def told(self, names: Sequence[str]) -> tuple[str, ...]:
        """For people."""
        texts = [f"{names[place]}{way}" for place in sorted(self.odd) for way in self.odd[place]]
        texts += [tie.text for tie in self.ties]
        return tuple(texts[:_MOST]) + ((f"and {len(texts) - _MOST} more",) if len(texts) > _MOST else ())


def compare(samples: Sequence[Any], names: Sequence[str]) -> Comparison:
    """Raises what user code raises that is asked: `shape`, `__len__`, `items`, `__repr__` of a key."""
    looks = _looks_of_all(samples)
    paths = sorted(dict.fromkeys(path for look in looks for path in look), key=len)
    strangers: dict[Path, set[int]] = {}  # who differs there, or above: its parts are not compared with the others'
    found = Comparison()
    for path in paths:
        known = strangers[path[:-1]] if path else set()
        groups: dict[Look, list[int]] = {}
        for place, look in enumerate(looks):
            if place not in known:
                groups.setdefault(look.get(path, _MISSING), []).append(place)
        strangers[path] = known | _strangers(path, groups, len(samples), names, found)
    found.usual = next((place for place in range(len(samples)) if place not in found.odd), None)
    return found


def _strangers(
    path: Path, groups: dict[Look, list[int]], count: int, names: Sequence[str], found: Comparison
) -> set[int]:
    """Those that differ at this path, all where nobody can tell; and what there is to say of them."""
    if len(groups) < 2:
        return set()
    where, beside = "".join(path), list(groups)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    usual, those = ordered[0]
    everybody = {place for places in groups.values() for place in places}
    if 2 * len(those) <= len(everybody):
        texts = [f"{len(places)} are {look.said(beside)}" for look, places in ordered[:_MOST]]
        texts += [f"{len(ordered) - _MOST} more kinds"] if len(ordered) > _MOST else []
        one_each = [places[0] for _, places in ordered[:_MOST]]
        compared = f"compare {names[one_each[0]]} with {names[one_each[1]]}"
        found.ties.append(Tie(f"{where + ': ' if where else ''}{', '.join(texts)} ({compared})", one_each))
        return everybody
    others = f"the other {len(those)}" if len(those) == count - 1 else f"{len(those)} of {count}"
    most = "have none" if usual is _MISSING else f"are {usual.said(beside)}"
    for look, places in ordered[1:]:
        for place in places:
            way = f"{': ' + where if where else ''} is {look.said(beside)}; {others} {most}"
            found.odd.setdefault(place, []).append(way)
    return everybody.difference(those)


def _looks_of_all(samples: Sequence[Any]) -> list[dict[Path, Look]]:
    """As deep as the largest allows: what is not looked at in one sample is in none."""
    looks: list[dict[Path, Look]] = []
    for depth in _DEPTHS:
        looks = [dict(_looks(sample, (), depth)) for sample in samples]
        if max(map(len, looks), default=0) <= _MOST_PARTS:
            break
    return looks


def _looks(value: Any, path: Path, depth: int) -> Iterator[tuple[Path, Look]]:
    look = _look(value)
    yield path, look
    if depth and not look.dtype and not isinstance(value, set | frozenset):
        for step, part in parts(value):
            yield from _looks(part, (*path, step), depth - 1)


def _look(value: Any) -> Look:
    if value is None:
        return Look("None")
    if isinstance(value, int | float | np.number | np.bool_):
        return Look("int or float")
    kind = type(value).__name__
    shape = getattr(value, "shape", None)
    if shape is not None:
        dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
        return Look(kind, dtype or "of no dtype", str(tuple(shape)))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return Look(kind, "", f"of length {len(value)}")
    return Look(kind)


# Guilt. `why_not(samples)`: what the default collate raises when it makes a batch of these; None where it makes one.


def blame(samples: Sequence[Any], compared: Comparison, why_not: WhyNot) -> tuple[Comparison, dict[int, BaseException]]:
    """Of what differs, what breaks a batch: odd ones that cannot be collated with a usual one; and why they cannot."""
    errors: dict[int, BaseException] = {}
    usual = compared.usual
    if usual is not None and why_not([samples[usual]] * 2) is None:
        pairs = {place: _pair(samples[place], place, samples[usual], usual) for place in sorted(compared.odd)}
        errors = {place: error for place, pair in pairs.items() if (error := why_not(pair)) is not None}
    ties = [tie for tie in compared.ties if _breaks(tie, samples, why_not)]
    return Comparison({place: compared.odd[place] for place in errors}, ties, usual), errors


def _breaks(tie: Tie, samples: Sequence[Any], why_not: WhyNot) -> bool:
    one, *others = tie.places
    pairs = [_pair(samples[one], one, samples[other], other) for other in others]
    return why_not([samples[one]] * 2) is None and any(why_not(pair) is not None for pair in pairs)


def _pair(sample: Any, place: int, usual: Any, usual_place: int) -> list[Any]:
    """In their order: torch goes by the first."""
    return [sample, usual] if place < usual_place else [usual, sample]


def unknown_in(samples: Sequence[Any], why_not: WhyNot) -> tuple[str, ...]:
    """What is alike in all samples, and cannot be collated even alone: where, and of which type."""
    path, culprit = "", samples[0]
    for _ in range(_DEPTHS[0]):
        if not isinstance(culprit, Mapping | Sequence) or isinstance(culprit, str | bytes):
            break
        found = next(((step, part) for step, part in parts(culprit) if why_not([part]) is not None), None)
        if found is None:
            return ()
        path, culprit = path + found[0], found[1]
    if why_not([culprit]) is None:
        return ()
    return (f"{path or 'each sample'} is of type {type(culprit).__name__}, which default_collate does not know",)


# What is done about it.


class Member(NamedTuple):
    """One sample of a batch. `position`: in what was asked for; -1 where it is not known which of these it is."""

    name: str
    position: int
    index: Any
    sample: Any


class Collator:
    """Collates the batches of one dataset, under the policy. Used by workers and by num_workers=0.

    `spares(position, draw)`: what may stand there instead, or what that raised. `default`: `collate_fn` does what
    torch's does.
    """

    def __init__(
        self,
        collate_fn: Callable[[Any], Any],
        auto_collation: bool,
        policy: Policy,
        words: Words,
        catch: Callable[[], Caught],
        *,
        default: bool,
        spares: Callable[[int, Draw], Iterator[Spare]] | None = None,
    ) -> None:
        self._collate = collate_fn
        self._auto_collation = auto_collation
        self._bad_sample = policy.bad_sample
        self._words = words
        self._catch = catch
        self._kind: type[BaseException] = BaseException if catch is everything else Exception
        self._default = default and auto_collation
        self._spares = spares

    def batch(self, samples: Any, troubles: list[Trouble], draw: Draw | None = None) -> Any:
        """`troubles`: what went wrong with the samples so far; those that are left out or replaced now come to it.
        `draw`: what was asked for; None of a stream.
        """
        words = self._words
        words[STAGE] = _COLLATE
        words[SINCE] = time.monotonic_ns()
        try:
            return self._collate(samples)
        except self._catch() as error:
            failed = error
        try:
            return self._without_misfits(failed, samples, troubles, draw)
        finally:
            del failed  # its traceback holds on to this frame

    def _note_stage(self) -> None:
        words = self._words
        words[STAGE] = _COLLATE
        words[SINCE] = time.monotonic_ns()

    def _without_misfits(self, error: BaseException, samples: Any, troubles: list[Trouble], draw: Draw | None) -> Any:
        members, facts = self._members(error, samples, troubles, draw), Facts()
        told: list[Trouble] = []  # only if there is a batch without them
        for _ in members:
            compared, guilty, seen = self._compared(members)
            facts = facts if told else seen  # of the whole batch
            if 2 * (len(told) + len(guilty)) >= len(samples):
                break  # they are no minority
            changed: dict[int, Member | None] = {}
            for place, why in guilty.items():
                settled = self._settled(why, place, members, compared, draw)
                if settled is None:
                    raise self._failed(error, facts)
                trouble, changed[place] = settled
                told.append(trouble)
            if not changed:
                break
            members = [new for place, old in enumerate(members) if (new := changed.get(place, old)) is not None]
            self._note_stage()
            try:
                batch = self._collate([member.sample for member in members])
            except self._catch() as another:
                error = another
            else:
                troubles += told
                return batch
        raise self._failed(error, facts)

    def _failed(self, error: BaseException, facts: Facts) -> SampleFailed:
        if facts.texts:
            with suppress(self._kind):  # notes of the user's that are no list, attributes that cannot be set
                BaseException.add_note(error, "\n".join(facts.texts))
        failed = SampleFailed(error, -1, None, Stage.COLLATE, 1, facts)
        failed.__cause__ = error
        return failed

    def _members(
        self, error: BaseException, samples: Any, troubles: Sequence[Trouble], draw: Draw | None
    ) -> list[Member]:
        """None where no sample can be to blame."""
        if not self._auto_collation or not isinstance(samples, list | tuple) or self._is_for_want(error):
            return []
        if draw is None:
            return [Member(f"item {place} of the batch", place, None, item) for place, item in enumerate(samples)]
        try:
            asked = _places(draw, troubles)
        except self._catch():  # user code: an index may be anything
            asked = []
        if len(asked) != len(samples):  # __getitems__ gave more, or fewer
            return [Member(f"sample {at} of the batch", -1, None, sample) for at, sample in enumerate(samples)]
        return [Member(f"index {shown(i)}", at, i, sample) for (at, i), sample in zip(asked, samples, strict=True)]

    def _compared(self, members: list[Member]) -> tuple[Comparison, dict[int, BaseException], Facts]:
        """How they differ, which of them broke the batch and why, and what there is to say of that."""
        samples, names = [member.sample for member in members], [member.name for member in members]
        try:
            compared = compare(samples, names)
            if not self._default:
                return compared, {}, Facts(compared.told(names))
            compared, guilty = blame(samples, compared, self._why_not)
            texts = compared.told(names)
            if texts:
                return compared, guilty, Facts(texts, frozenset({Sign.UNLIKE}))
            return compared, {}, Facts(unknown_in(samples, self._why_not))
        except self._catch():  # user code: `shape`, `__len__`, `items`. The error itself is what counts
            return Comparison(), {}, Facts()

    def _settled(
        self, error: BaseException, place: int, members: list[Member], compared: Comparison, draw: Draw | None
    ) -> tuple[Trouble, Member | None] | None:
        """What is told of one that broke its batch, and what takes its place; None where the policy has nothing."""
        odd = members[place]
        if self._bad_sample == "raise" or odd.position < 0:
            return None
        ways = tuple(f"{odd.name}{way}" for way in compared.odd[place])
        raised = capture(error, Facts(ways, frozenset({Sign.UNLIKE})), self._kind)
        trouble = Trouble(odd.position, odd.index, 1, 0.0, raised, "skipped", None, Stage.COLLATE)
        if self._bad_sample == "skip":
            return trouble, None
        assert self._spares is not None and draw is not None and compared.usual is not None
        usual = members[compared.usual].sample
        for spare, sample, failed in self._spares(odd.position, draw):
            self._note_stage()
            if failed is None and self._why_not(_pair(sample, place, usual, compared.usual)) is None:
                told = replace(trouble, fate="replaced", replaced_by=spare)
                return told, Member(f"index {shown(spare)}", odd.position, spare, sample)
        return None

    def _why_not(self, samples: list[Any]) -> BaseException | None:
        """If the process lacks something, that says nothing of the samples."""
        try:
            torch_collate.default_collate(samples)  # type: ignore[no-untyped-call]
        except self._catch() as error:
            return None if self._is_for_want(error) else error
        return None

    def _is_for_want(self, error: BaseException) -> bool:
        """The system refused something to this process: memory, descriptors, threads."""
        lacks = issubclass(type(error), MemoryError | OSError)  # (`__class__` may be user code)
        return lacks or any(word in text_of(error, self._kind)[:200] for word in _LACKS)


def _places(draw: Draw, troubles: Sequence[Trouble]) -> list[tuple[int, Any]]:
    """Position and index of each sample that was loaded."""
    positions = range(len(draw.indices)) if draw.positions is None else draw.positions
    gone = {trouble.position for trouble in troubles if trouble.fate == "skipped"}
    given = {trouble.position: trouble.replaced_by for trouble in troubles if trouble.fate in ("replaced", GIVEN)}
    asked = zip(positions, draw.indices, strict=True)
    return [(position, given.get(position, index)) for position, index in asked if position not in gone]
