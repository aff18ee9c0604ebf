"""Orders: what each task asks for, from its drawing until its batch is taken, and what a worker is told of it.

A worker that takes a task up again, or in another's place, gets the same seed and the same indices, less those that
kill: so the same bytes come, whoever loads them. Nothing here knows the iterator: it may go while its workers run.
"""

import pickle
import random
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.core.messages import Send
from holdfast.diagnose.finding import Again
from holdfast.loader import seeds
from holdfast.loader.stream import Left, Place, Snapshot
from holdfast.policy import Policy

# Indices a worker may try in the place of a bad one.
SPARES = 8


class Orders:
    """Of one iterator. `begin` starts an epoch."""

    def __init__(self, policy: Policy, marks: Sequence[int], *, iterable: bool, auto_collation: bool) -> None:
        """`marks`: how far each worker's stream has come; the host keeps them."""
        self._marks = marks
        self._iterable = iterable
        self._auto_collation = auto_collation
        self._skips = policy.bad_sample == "skip"
        self._replaces = policy.bad_sample == "replace"
        self._spares_wanted = self._replaces and not iterable
        self.snapshots: dict[int, Snapshot] = {}  # worker -> the last state of its stream that it sent in this epoch
        self._left: dict[int, list[Left]] = {}  # worker -> epochs that were left since its stream came to an end

    def leave(self, streams: Mapping[int, int]) -> None:
        """An epoch is over. `streams`: worker -> batches it has given, where its stream has not come to an end."""
        for worker in [worker for worker in self._left if worker not in streams]:
            del self._left[worker]
        for worker, number in streams.items():
            snapshot = self.snapshots.get(worker)
            left: Left = (self._seed, number, self._marks[worker], snapshot)
            if snapshot is not None:
                self._left[worker] = [left]
            elif worker in self._left:
                self._left[worker].append(left)

    def begin(self, seed: int, epoch: int, first_task: int, shared_seed: int | None) -> None:
        self._seed = seed
        self._epoch = epoch
        self._first_task = first_task
        self._shared_seed = shared_seed
        self._asked: dict[int, Any] = {}  # task -> index or indices
        self._given: list[Any] = []  # all indices so far, for "replace"
        self._given_by: dict[int, int] = {}  # task -> how many they were when it was drawn
        self._missing: dict[int, int] = {}  # task -> samples that are left out because they kill
        self._at_hand: tuple[int, Any] = (-1, None)  # the task that was taken last: it may still be told of
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
        self._asked[task] = asked
        if self._spares_wanted:
            self._given += asked if self._auto_collation else (asked,)
            self._given_by[task] = len(self._given)
        return samples

    def take(self, task: int) -> int:
        """Its batch has come: how many samples are in it, if the worker left none out."""
        asked = self._asked.pop(task)
        self._at_hand = (task, asked)
        if self._given_by:
            self._given_by.pop(task, None)
        samples = len(asked) if self._auto_collation else 1
        return samples - self._missing.pop(task, 0) if self._missing else samples

    def sample_of(self, task: int, position: int) -> tuple[object, Again | None]:
        """Which sample that is, and how to load it again; None where there is none to name."""
        asked = self._at_hand[1] if task == self._at_hand[0] else self._asked.get(task)
        if asked is None or self._iterable or position < 0:
            return None, None
        indices = tuple(asked) if self._auto_collation else (asked,)
        if position >= len(indices):
            return None, None
        return indices[position], Again(self._seed, task - self._first_task, indices[: position + 1], position)

    # What a worker is told -----------------------------------------------------------------------------------------

    def payload(self, send: Send) -> bytes:
        asked = self._asked[send.task]
        if self._iterable:
            size = len(asked) if self._auto_collation else 1
            place = self._place_of(send)
            return pickle.dumps((self._seed, self._epoch, send.number, size, self._shared_seed, place), 5)
        spares = self._spares(send.task) if self._replaces else ()
        positions = None
        if send.bad:
            asked, positions = self._without(asked, send.bad, spares)
            if self._skips:
                self._missing[send.task] = len(set(send.bad))
        number = send.task - self._first_task
        return pickle.dumps((self._seed, number, send.attempt, send.stay, asked, positions, send.alone, spares), 5)

    def _place_of(self, send: Send) -> Place | None:
        """Where its stream is, for a life that does not know."""
        worker = send.worker
        if self._placed.get(worker) == send.life:
            return None
        self._placed[worker] = send.life
        return self._marks[worker], self.snapshots.get(worker), self._left.get(worker, ())

    def _spares(self, task: int) -> list[Any]:
        """Indices given in this epoch before or with this batch, chosen by the seed: the same in every run."""
        chooser = random.Random(seeds.mix(self._seed, -5 - (task - self._first_task)))
        count = self._given_by[task]
        return [self._given[chooser.randrange(count)] for _ in range(SPARES)]

    def _without(self, asked: Any, bad: tuple[int, ...], spares: Any) -> tuple[Any, Any]:
        """The indices less those that kill, or with others in their place; and the positions they stand at."""
        if not self._auto_collation:
            return (spares[(len(bad) - 1) % len(spares)] if spares else asked), None
        asked = list(asked)
        if self._replaces:
            for position in set(bad):
                asked[position] = spares[(bad.count(position) - 1) % len(spares)]
            return asked, None
        positions = [i for i in range(len(asked)) if i not in bad]
        return [asked[i] for i in positions], positions
