"""num_workers=0: the same policy, in the trainer itself. Deaths excepted: there is no other process to die."""

import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch.utils.data._utils.collate as torch_collate
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from holdfast.core.restart_budget import BadSampleBreaker
from holdfast.diagnose.incident import where
from holdfast.diagnose.narrator import Record
from holdfast.errors import SampleError
from holdfast.loader.batch_requests import Spares, lasting
from holdfast.loader.collate_guard import is_torchs
from holdfast.loader.collation import Collator
from holdfast.loader.device import Unpacked, checked, present
from holdfast.loader.fetch import Draw, MapFetcher, SampleFailed, Trouble, Unwatched, bad_of, errors, uncollated
from holdfast.loader.iterator import InterruptibleNext
from holdfast.loader.loader_narrator import LoaderNarrator
from holdfast.loader.stream import StreamFetcher
from holdfast.loader.tree import moved
from holdfast.policy import Policy
from holdfast.system.signal_origin import raised_by_handler

__all__ = ["InlineIterator"]


class InlineIterator(InterruptibleNext, _SingleProcessDataLoaderIter):
    """Loads in this process. It never touches the trainer's random generators.

    If a signal handler raises while samples of a map-style dataset are loaded, the next call loads them again. A stream
    has gone on: it is torn.
    """

    def __init__(self, loader: Any, policy: Policy, record: Record) -> None:
        super().__init__(loader)
        self._policy = policy
        self._record = record
        self._narrator = LoaderNarrator(
            record, policy, None, "none", lambda task, position: (None, None), lambda worker: os.getpid()
        )
        device = checked(loader._holdfast_device)
        self._device = None if device is None else present(device)
        self._batch = -1
        self._spares = Spares(int(self._base_seed))
        self._breaker = BadSampleBreaker(policy)
        self._last_words: BaseException | None = None  # too many samples are bad: every later call says so
        self._asked: tuple[Any, list[Any]] | None = None  # what the sampler gave, and spares, until it is delivered
        self._iterable = self._dataset_kind == _DatasetKind.Iterable
        if self._iterable:
            self._stream = StreamFetcher(self._dataset, self._auto_collation, self._drop_last, policy, lambda n: None)
        else:
            self._map = MapFetcher(self._dataset, self._auto_collation, policy)
        self._collator = Collator(
            self._collate_fn,
            self._auto_collation,
            policy,
            Unwatched().words,
            errors,
            default=self._collate_fn is torch_collate.default_collate and is_torchs(self._collate_fn),
            spares=None if self._iterable else self._map.spares,
        )

    def _next_batch(self) -> Unpacked | None:
        while self._last_words is None:
            if self._asked is None and not self._draw():
                return None
            assert self._asked is not None
            try:
                unpacked = self._load(*self._asked)
            except StopIteration:  # of the stream
                return None
            if unpacked is not None and unpacked.error is None:
                unpacked = self._placed(unpacked)
            self._asked = None
            if unpacked is not None:
                return self._delivered(unpacked)
        return Unpacked(error=self._last_words)

    def _delivered(self, unpacked: Unpacked) -> Unpacked:
        if unpacked.error is None:
            self._record.counts["batches"] += 1
            self._record.counts["samples"] += unpacked.samples
            self._num_yielded += 1
            if self._iterable and self._IterableDataset_len_called is not None:
                self._warn_of_length()
        return unpacked

    def _draw(self) -> bool:
        """What the next batch consists of; False at the end."""
        try:
            asked = next(self._sampler_iter)
        except StopIteration:
            return False
        if self._auto_collation and not hasattr(asked, "__len__"):
            asked = list(asked)  # of an iterator, say
        self._batch += 1
        spares: list[Any] = []
        if self._policy.bad_sample == "replace" and not self._iterable:
            spares = self._spares.draw(self._batch, _lasting([*asked] if self._auto_collation else [asked]))
        self._asked = asked, spares
        return True

    def _load(self, asked: Any, spares: list[Any]) -> Unpacked | None:
        """The batch, or what is to be raised for it; None where nothing is left of it."""
        size = len(asked) if self._auto_collation else 1
        draw = Draw(-1, asked, spares=spares)
        try:
            if self._iterable:
                batch, samples = self._stream_batch(size, draw.troubles)
            else:
                self._again = True  # user code: the same samples can be loaded again
                batch, samples = self._map_batch(draw, size)
        except SampleFailed as failed:
            self._again = False
            return Unpacked(error=self._account(size, draw.troubles) or self._failed(failed))
        self._again = False
        error = self._account(size, draw.troubles)
        if error is not None:
            return Unpacked(error=error)
        return None if batch is None and not samples else Unpacked(batch, samples)

    def _map_batch(self, draw: Draw, size: int) -> tuple[Any, int]:
        """The batch, and how many samples are in it."""
        samples, troubles = self._map.load(draw, lambda: None)
        if self._map.left_out(samples, draw, troubles):
            return None, 0
        batch = self._collator.batch(samples, troubles, draw)
        return batch, size - sum(trouble.fate == "skipped" for trouble in troubles)

    def _stream_batch(self, size: int, troubles: list[Trouble]) -> tuple[Any, int]:
        """The same of a stream; StopIteration at its end."""
        try:
            items, _ = self._stream.take(size, troubles=troubles)
        except StopIteration:
            if not troubles:
                raise
            return None, 0  # its end is said next time
        batch = self._collator.batch(items, troubles)
        return batch, (len(items) if self._auto_collation else 1) - uncollated(troubles)

    def _account(self, size: int, troubles: list[Trouble]) -> BaseException | None:
        """What ledger and narrator do when a worker's batch comes; the error if too many samples are bad."""
        breaker, bad = self._breaker, bad_of(troubles)
        breaker.seen += size
        breaker.bad += bad
        self._narrator.troubles(map(_kept, troubles), self._batch, 0)
        if bad and breaker.is_open:
            self._last_words = self._narrator.too_many(breaker.bad, breaker.seen)
        return self._last_words

    def _placed(self, batch: Unpacked) -> Unpacked:
        """On its device, or in pinned memory."""
        try:
            if self._device is not None:
                return Unpacked(moved(batch.batch, self._device), batch.samples)
            if self._pin_memory:
                pinned = pin_memory(batch.batch, self._pin_memory_device)  # type: ignore[no-untyped-call]
                return Unpacked(pinned, batch.samples)
        except Exception as error:  # no memory there, say
            if raised_by_handler(error):
                raise
            return Unpacked(error=error)
        return batch

    def _failed(self, failed: SampleFailed) -> BaseException:
        """As itself; but a StopIteration of the dataset's would end the epoch without a word."""
        error = failed.error
        failure = failed.to_failure(catch=Exception)
        (index,) = _lasting([failure.index])
        case = self._narrator.failed(replace(failure, index=index), self._batch, 0)
        told = f"in the trainer (num_workers=0) {where(case)}"
        if issubclass(type(error), StopIteration | StopAsyncIteration):
            told = f"{told} raised {type(error).__name__}, which would end the epoch without a word"
            ended = SampleError(told, index)
            ended.__cause__ = error
            return ended
        with suppress(Exception):  # notes of the user's that are no list, attributes that cannot be set
            BaseException.add_note(error, told)
        return error


def _kept(trouble: Trouble) -> Trouble:
    """Its indices as they are now: the sampler may fill the same list again."""
    index, spare = _lasting([trouble.index, trouble.replaced_by])
    return replace(trouble, index=index, replaced_by=spare)


def _lasting(indices: list[Any]) -> list[Any]:
    """As they are now; but what cannot be pickled, which here nothing has to be, as the sampler keeps it."""
    try:
        return lasting(indices)
    except Exception as error:  # user code: __reduce__
        if raised_by_handler(error):
            raise
        return indices
