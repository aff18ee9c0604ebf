"""num_workers=0: the same policy, in the trainer itself. Deaths excepted: there is no other process to die."""

import os
import random
import time
from contextlib import suppress
from typing import Any

from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from holdfast.core.breaker import BREAKER_LEAST
from holdfast.core.task import SPARES
from holdfast.diagnose.finding import Case
from holdfast.diagnose.report import BadSample, Record, incident_of, where
from holdfast.errors import SampleError
from holdfast.loader import seeds
from holdfast.loader.device import checked, present
from holdfast.loader.fetch import Draw, Failed, MapFetcher, Trouble
from holdfast.loader.leaves import moved
from holdfast.loader.stream import StreamFetcher
from holdfast.loader.tell import Teller
from holdfast.local.raised import capture
from holdfast.policy import Policy

__all__ = ["InlineIterator"]


class InlineIterator(_SingleProcessDataLoaderIter):
    """Loads in this process. It never touches the trainer's random generators."""

    def __init__(self, loader: Any, policy: Policy, record: Record) -> None:
        super().__init__(loader)
        self._policy = policy
        self._record = record
        self._teller = Teller(
            record, policy, None, "none", lambda task, position: (None, None), lambda worker: os.getpid()
        )
        device = checked(loader._holdfast_device)
        self._device = None if device is None else present(device)
        self._batch = -1
        self._seen = 0
        self._bad = 0
        self._given: list[Any] = []
        self._iterable = self._dataset_kind == _DatasetKind.Iterable
        if self._iterable:
            self._stream = StreamFetcher(
                self._dataset, self._collate_fn, self._auto_collation, self._drop_last, policy, lambda n: None
            )
        else:
            self._map = MapFetcher(self._dataset, self._collate_fn, self._auto_collation, policy)

    def _next_data(self) -> Any:
        while True:
            asked = next(self._sampler_iter)
            if self._auto_collation and not hasattr(asked, "__len__"):
                asked = list(asked)  # of an iterator, say
            self._batch += 1
            try:
                batch = self._load(asked)
            except Failed as failed:
                self._raise(failed)
            if batch is not None:
                if self._device is not None:
                    return moved(batch[0], self._device)
                if self._pin_memory:
                    return pin_memory(batch[0], self._pin_memory_device)  # type: ignore[no-untyped-call]
                return batch[0]

    def _load(self, asked: Any) -> tuple[Any] | None:
        """The batch in a 1-tuple; None where nothing is left of it."""
        if self._iterable:
            troubles: list[Trouble] = []
            try:
                samples, _ = self._stream.take(len(asked) if self._auto_collation else 1, troubles=troubles)
            except (Failed, StopIteration):
                self._account(len(troubles), troubles, 0)
                raise
            self._account(len(troubles) + (len(samples) if self._auto_collation else 1), troubles)
            return (self._stream.collate(samples),)
        spares: list[Any] = []
        if self._policy.bad_sample == "replace":
            self._given += asked if self._auto_collation else (asked,)
            chooser = random.Random(seeds.mix(int(self._base_seed), -5 - self._batch))
            spares = chooser.choices(self._given, k=SPARES) if self._given else []
        draw = Draw(-1, asked, spares=spares)
        try:
            samples, troubles = self._map.load(draw, lambda: None)
        except Failed:
            self._account(0, draw.troubles, 0)
            raise
        self._account(len(asked) if self._auto_collation else 1, troubles)
        if self._map.left_out(samples, draw, troubles):
            return None
        return (self._map.collate(samples, asked if self._auto_collation else None),)

    def _account(self, samples: int, troubles: list[Trouble], batches: int = 1) -> None:
        self._seen += samples
        self._record.counts["batches"] += batches
        self._record.counts["samples"] += samples
        for trouble in troubles:
            self._teller.trouble(trouble, self._batch, 0)
            self._bad += trouble.fate != "retried"
            self._record.counts["samples"] -= trouble.fate == "skipped"
        if troubles and self._seen >= BREAKER_LEAST and self._bad > self._policy.max_bad * self._seen:
            raise self._teller.too_many(self._bad, self._seen)

    def _raise(self, failed: Failed) -> None:
        """As itself; but a StopIteration of the dataset's would end the epoch without a word."""
        error = failed.error
        captured = capture(error, catch=Exception)
        case = Case(
            what="raised",
            worker=0,
            task=self._batch,
            index=failed.index,
            stage=failed.stage,
            attempt=failed.attempts,
            raised=captured,
            did="raised it from next()",
            at=time.time(),
        )
        self._record.add(incident_of(case))
        if failed.position >= 0:
            text = f"{captured.type_name}: {captured.text}"
            self._record.add_bad(BadSample(failed.index, self._batch, text, failed.attempts))
        told = f"in the trainer (num_workers=0) {where(case)}"
        if issubclass(type(error), StopIteration | StopAsyncIteration):
            raise SampleError(
                f"{told} raised {type(error).__name__}, which would end the epoch without a word", failed.index
            ) from error
        with suppress(Exception):  # notes of the user's that are no list, attributes that cannot be set
            BaseException.add_note(error, told)
        raise error
