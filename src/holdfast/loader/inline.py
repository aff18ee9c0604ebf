"""num_workers=0: the same policy, in the trainer itself. Deaths excepted: there is no other process to die."""

import os
import random
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from holdfast.core.messages import What
from holdfast.core.restart_budget import BREAKER_LEAST
from holdfast.core.roster import SPARES
from holdfast.diagnose.finding import Case
from holdfast.diagnose.incident import BadSample, incident_of, where
from holdfast.diagnose.report import Record
from holdfast.errors import SampleError
from holdfast.loader import seeds
from holdfast.loader.batch_requests import lasting
from holdfast.loader.device import Unpacked, checked, present
from holdfast.loader.fetch import Draw, MapFetcher, SampleFailed, Trouble
from holdfast.loader.interruptible_next import InterruptibleNext
from holdfast.loader.narrator import LoaderNarrator
from holdfast.loader.stream import StreamFetcher
from holdfast.loader.tree import moved
from holdfast.policy import Policy
from holdfast.remote_exception import capture
from holdfast.system.signals import raised_by_handler

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
        self._seen = 0
        self._bad = 0
        self._given: list[Any] = []
        self._asked: tuple[Any] | None = None  # what the sampler gave, until its batch is delivered
        self._counted = False  # this batch is
        self._iterable = self._dataset_kind == _DatasetKind.Iterable
        if self._iterable:
            self._stream = StreamFetcher(
                self._dataset, self._collate_fn, self._auto_collation, self._drop_last, policy, lambda n: None
            )
        else:
            self._map = MapFetcher(self._dataset, self._collate_fn, self._auto_collation, policy)

    def _next_batch(self) -> Unpacked | None:
        while True:
            if self._asked is None and not self._draw():
                return None
            assert self._asked is not None
            (asked,) = self._asked
            try:
                batch = self._load(asked)
            except SampleFailed as failed:
                batch = Unpacked(error=self._failed(failed))
            except StopIteration:  # of the stream
                return None
            if batch is not None and batch.error is None:
                batch = self._placed(batch)
            self._asked = None
            if batch is not None:
                self._num_yielded += batch.error is None
                if self._iterable and self._IterableDataset_len_called is not None:
                    self._warn_of_length()
                return batch

    def _draw(self) -> bool:
        """What the next batch consists of; False at the end."""
        try:
            asked = next(self._sampler_iter)
        except StopIteration:
            return False
        if self._auto_collation and not hasattr(asked, "__len__"):
            asked = list(asked)  # of an iterator, say
        self._batch += 1
        if self._policy.bad_sample == "replace":
            self._given += _lasting([*asked] if self._auto_collation else [asked])
        self._asked, self._counted = (asked,), False
        return True

    def _load(self, asked: Any) -> Unpacked | None:
        """The batch; None where nothing is left of it."""
        size = len(asked) if self._auto_collation else 1
        if self._iterable:
            return self._load_stream(size)
        spares: list[Any] = []
        if self._policy.bad_sample == "replace":
            chooser = random.Random(seeds.mix(int(self._base_seed), -5 - self._batch))
            spares = chooser.choices(self._given, k=SPARES) if self._given else []
        draw = Draw(-1, asked, spares=spares)
        self._again = True  # user code: the same samples can be loaded again
        try:
            samples, troubles = self._map.load(draw, lambda: None)
        except SampleFailed:
            self._again = False
            error = self._account(0, draw.troubles, 0)
            if error:
                return Unpacked(error=error)
            raise
        self._again = False
        error = self._account(size, troubles)
        if error:
            return Unpacked(error=error)
        if self._map.left_out(samples, draw, troubles):
            return None
        self._again = True
        batch = self._map.collate(samples, asked if self._auto_collation else None)
        self._again = False
        return Unpacked(batch)

    def _load_stream(self, size: int) -> Unpacked:
        troubles: list[Trouble] = []
        try:
            samples, _ = self._stream.take(size, troubles=troubles)
        except (SampleFailed, StopIteration):
            error = self._account(len(troubles), troubles, 0)
            if error:
                return Unpacked(error=error)
            raise
        error = self._account(len(troubles) + (len(samples) if self._auto_collation else 1), troubles)
        return Unpacked(error=error) if error else Unpacked(self._stream.collate(samples))

    def _placed(self, batch: Unpacked) -> Unpacked:
        """Where batches shall be."""
        try:
            if self._device is not None:
                return Unpacked(moved(batch.batch, self._device))
            if self._pin_memory:
                return Unpacked(pin_memory(batch.batch, self._pin_memory_device))  # type: ignore[no-untyped-call]
        except Exception as error:  # no memory there, say
            if raised_by_handler(error):
                raise
            return Unpacked(error=error)
        return batch

    def _account(self, samples: int, troubles: list[Trouble], batches: int = 1) -> BaseException | None:
        """Once for each batch; what is to be raised, if too many samples are bad."""
        if self._counted:
            return None
        self._counted = True
        self._seen += samples
        self._record.counts["batches"] += batches
        self._record.counts["samples"] += samples
        for trouble in troubles:
            index, spare = _lasting([trouble.index, trouble.replaced_by])
            self._narrator.trouble(replace(trouble, index=index, replaced_by=spare), self._batch, 0)
            self._bad += trouble.fate != "retried"
            self._record.counts["samples"] -= trouble.fate == "skipped"
        if troubles and self._seen >= BREAKER_LEAST and self._bad > self._policy.max_bad * self._seen:
            return self._narrator.too_many(self._bad, self._seen)
        return None

    def _failed(self, failed: SampleFailed) -> BaseException:
        """As itself; but a StopIteration of the dataset's would end the epoch without a word."""
        self._again = False
        error = failed.error
        captured = capture(error, catch=Exception)
        (index,) = _lasting([failed.index])
        case = Case(
            what=What.RAISED,
            worker=0,
            task=self._batch,
            index=index,
            stage=failed.stage,
            attempt=failed.attempts,
            raised=captured,
            did="raised it from next()",
            at=time.time(),
        )
        self._record.add(incident_of(case))
        if failed.position >= 0:
            text = f"{captured.type_name}: {captured.text}"
            self._record.add_bad(BadSample(index, self._batch, text, failed.attempts))
        told = f"in the trainer (num_workers=0) {where(case)}"
        if issubclass(type(error), StopIteration | StopAsyncIteration):
            told = f"{told} raised {type(error).__name__}, which would end the epoch without a word"
            ended = SampleError(told, index)
            ended.__cause__ = error
            return ended
        with suppress(Exception):  # notes of the user's that are no list, attributes that cannot be set
            BaseException.add_note(error, told)
        return error


def _lasting(indices: list[Any]) -> list[Any]:
    """As they are now; but what cannot be pickled, which here nothing has to be, as the sampler keeps it."""
    try:
        return lasting(indices)
    except Exception as error:  # user code: __reduce__
        if raised_by_handler(error):
            raise
        return indices
