"""BatchRequests: what each task asks for, from its drawing until its batch is taken, and what a worker is told of it.

A worker that takes a task up again, or in another's place, gets the same seed and the same indices, less those that
kill: so the same bytes come, whoever loads them. Nothing here knows the iterator: it may go while its workers run.

What the sampler gave is pickled as it is drawn, once, into what a worker is told first; for all else it is read from
there. A sampler may fill one list again and again, and a retry must ask for what it held then.
"""

import pickle
import random
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.core.dispatch import SPARES
from holdfast.core.host import StreamEnd
from holdfast.core.messages import Send, Short
from holdfast.diagnose.finding import Again
from holdfast.errors import HoldfastError, LoaderTorn, StreamBroken
from holdfast.loader import seeds
from holdfast.loader.stream import WHOLE, Left, Moved, Place, Snapshot, Sure
from holdfast.policy import Policy

# Where in what a worker is told the index or the indices stand, and what may be tried in the place of bad ones.
_ASKED, _SPARES = 4, 7
# Indices of these types cannot change after they were given.
_FIXED = {int, str, bytes, float, bool}


def lasting(indices: list[Any]) -> list[Any]:
    """As they are now, whatever the sampler makes of them later. Raises what pickling them raises."""
    return indices if {*map(type, indices)} <= _FIXED else pickle.loads(pickle.dumps(indices, 5))


class Spares:
    """What may be tried in the place of bad samples, in one epoch: the same for one seed, with workers and without."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._given: list[Any] = []  # all indices so far

    def draw(self, number: int, indices: list[Any]) -> list[Any]:
        """For batch `number`, which asks for these: some that were given before or with it, chosen by the seed."""
        self._given += indices
        chooser = random.Random(seeds.mix(self._seed, -5 - number))
        count = len(self._given)
        return [self._given[chooser.randrange(count)] for _ in range(SPARES)] if count else []


class BatchRequests:
    """Of one iterator. `begin` starts an epoch."""

    def __init__(self, policy: Policy, marks: Sequence[int], *, iterable: bool, auto_collation: bool) -> None:
        """`marks`: how far each worker's stream has come; the host keeps them."""
        self._marks = marks
        self._iterable = iterable
        self._auto_collation = auto_collation
        self._skips = policy.bad_sample == "skip"
        self._replaces = policy.bad_sample == "replace"
        self.snapshots: dict[int, Snapshot] = {}  # worker -> the last state of its stream that it sent in this epoch
        self._moved: dict[int, bytes] = {}  # worker -> what whole epochs have made of its dataset
        self._settled: set[int] = set()  # workers whose dataset a whole epoch leaves as it found it
        self._left: dict[int, list[Left]] = {}  # worker -> epochs since then that have moved it

    def leave(self, streams: Mapping[int, int], ends: Mapping[int, bytes | StreamEnd]) -> None:
        """An epoch is over. `streams`: worker -> batches it has given, where its stream has not come to an end.
        `ends`: what has become of the dataset where it has; nothing if it is as before, or why that is not said.
        """
        for worker in range(len(self._marks)):
            end = ends.get(worker)
            if worker in streams:
                self._leave(worker, streams[worker])
            elif end is StreamEnd.LOST or (end is StreamEnd.NOT_KNOWN and worker not in self._settled):
                self._left.setdefault(worker, []).append((self._seed, WHOLE, 0, None))
            else:
                self._left.pop(worker, None)
                self._end(worker, end if isinstance(end, bytes) else None)

    def began(self, worker: int, moved: Moved) -> None:
        """The first batch of an epoch has come, and with it what the ones before have made of the dataset."""
        if moved is None:
            return
        packed, sure = moved
        if sure is Sure.LOST:
            return  # a next life goes through all of them
        left = self._left.pop(worker, [])
        if sure is Sure.NOT_SEEN and any(snapshot for *_, snapshot in left):
            self._left[worker] = left[-1:]
        elif packed:
            self._moved[worker] = packed
            self._settled.discard(worker)

    def _leave(self, worker: int, number: int) -> None:
        left = (self._seed, number, self._marks[worker], self.snapshots.get(worker))
        self._left.setdefault(worker, []).append(left)

    def _end(self, worker: int, moved: bytes | None) -> None:
        if moved:
            self._moved[worker] = moved
            self._settled.discard(worker)
        elif moved is not None:
            self._settled.add(worker)

    def begin(self, seed: int, epoch: int, first_task: int, shared_seed: int | None) -> None:
        self._seed = seed
        self._epoch = epoch
        self._first_task = first_task
        self._shared_seed = shared_seed
        self._asked: dict[int, bytes] = {}  # task -> what a worker is told of it first; of a stream, nothing
        self._samples: dict[int, int] = {}  # task -> how many it asks for
        self._spares = Spares(seed)
        self._missing: dict[int, int] = {}  # task -> samples that are left out because they kill
        self._at_hand = (-1, b"")  # the task that was taken last: it may still be told of
        self.snapshots.clear()
        self._placed: dict[int, int] = {}  # worker -> the life that knows where its stream is
        # worker -> items of its stream that came; none where that is not known
        self.items = dict.fromkeys(range(len(self._marks)), 0) if self._iterable else {}

    def add(self, task: int, asked: Any) -> int:
        """How many samples that is."""
        samples = 1
        if self._auto_collation:
            try:
                samples = len(asked)
            except TypeError:  # an iterator, say
                asked = list(asked)
                samples = len(asked)
        if self._iterable:
            self._asked[task] = b""
        else:
            number = task - self._first_task
            spares: list[Any] = []
            if self._replaces:
                spares = self._spares.draw(number, lasting(list(asked) if self._auto_collation else [asked]))
            self._asked[task] = pickle.dumps((self._seed, number, 0, -1, asked, None, False, spares), 5)
        self._samples[task] = samples
        return samples

    def take(self, task: int) -> int:
        """Its batch has come: how many samples are in it, if the worker left none out."""
        self._at_hand = (task, self._asked.pop(task))
        samples = self._samples.pop(task)
        return samples - self._missing.pop(task, 0) if self._missing else samples

    def sample_of(self, task: int, position: int, spare: int = 0) -> tuple[object, Again | None]:
        """Which sample that is, and how to load it again; None where there is none to name.

        `spare`: which sample in its place it is, counted from 1; 0 for the sample itself.
        """
        told = self._at_hand[1] if task == self._at_hand[0] else self._asked.get(task)
        if not told or position < 0:
            return None, None
        try:
            head = pickle.loads(told)
        except Exception:  # user code: an index may be anything, and its worker has failed at it, too
            return None, None
        indices = tuple(head[_ASKED]) if self._auto_collation else (head[_ASKED],)
        if position >= len(indices):
            return None, None
        if spare:
            indices = (*indices[:position], head[_SPARES][spare - 1], *indices[position + 1 :])
        return indices[position], Again(self._seed, task - self._first_task, indices[: position + 1], position)

    # What a worker is told -----------------------------------------------------------------------------------------

    def payload(self, send: Send) -> bytes:
        if self._iterable:
            size = self._samples[send.task]
            place = self._place_of(send)
            return pickle.dumps((self._seed, self._epoch, send.number, size, self._shared_seed, place), 5)
        first = self._asked[send.task]
        if not send.attempt:
            return first
        seed, number, _, _, asked, positions, _, spares = pickle.loads(first)
        if send.bad and self._skips:
            asked = list(asked)
            positions = [i for i in range(len(asked)) if i not in send.bad]
            asked = [asked[i] for i in positions]
            self._missing[send.task] = len(set(send.bad))
        draw = send.stay, asked, positions, send.alone, spares, send.bad, send.deadly
        return pickle.dumps((seed, number, send.attempt, *draw), 5)

    def _place_of(self, send: Send) -> Place | None:
        """Where its stream is, for a life that does not know."""
        worker = send.worker
        if self._placed.get(worker) == send.life:
            return None
        self._placed[worker] = send.life
        return self._marks[worker], self.snapshots.get(worker), self._left.get(worker, ()), self._moved.get(worker, b"")


# Whole: is all of an epoch there that was asked for? If not, the error that says so: no epoch is short in silence.


_REPORT = "\n    try    please report this; a new iterator begins clean: iter(loader)"
_ANEW = "\n    try    make a new iterator: iter(loader)"


def torn(came: int, by: str) -> LoaderTorn:
    """`by`: the exception, and where it came from; "" if the epoch had not begun."""
    by = by or "iter() itself did not come to its end"
    return LoaderTorn(
        "an exception from outside (Ctrl-C, a signal handler that raised) left this loader in the middle of its "
        f"bookkeeping, or passed through its sampler, after {came} batches of this epoch\n    seen   {by}{_ANEW}"
    )


def shut_down(came: int) -> LoaderTorn:
    """From outside, while there was more to come."""
    return LoaderTorn(
        "the workers of this loader were shut down in the middle of an epoch: what was to come is lost\n"
        f"    seen   {came} batches of this epoch had come, and no worker is left{_ANEW}"
    )


def short(result: Short) -> StreamBroken:
    """Batches of a stream that were made did not come, or came twice."""
    made, came, worker = result.made, result.came, result.worker
    text = f"worker {worker}'s stream ended after {made} batches by its own count, and {came} came"
    return StreamBroken(text + _REPORT, worker)


def missing(asked: int, came: int, told: int, dropped: int) -> LoaderTorn | None:
    """`told`: next() raised for it, or nothing was left of it. `dropped`: a stream had no batch to give, or so."""
    if came + told + dropped == asked:
        return None
    return LoaderTorn(
        f"this epoch is not whole: of {asked} batches that were asked for, {came} came, {told} were told of as bad or "
        f"empty, and {dropped} had nothing in them{_REPORT}"
    )


def fewer_items(made: Mapping[int, int], came: Mapping[int, int]) -> HoldfastError | None:
    """By worker: items of its stream, by its own count and by ours, where that is known."""
    for worker, count in made.items():
        if came.get(worker, count) != count:
            text = f"worker {worker}'s stream gave {count} items by its own count, and {came[worker]} came"
            return StreamBroken(text + _REPORT, worker)
    return None
