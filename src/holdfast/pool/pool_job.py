"""What a worker of a pool does: open the letter, call the function, put the result into the slot."""

import logging
import os
import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from holdfast.core.host import ALLOWED, RETRIES, JobContext, Output, Reply, ReplyKind
from holdfast.core.messages import Stage
from holdfast.pool.call_codec import Head, head_of, open_letter
from holdfast.pool.mapping import UNOPENED, Results
from holdfast.remote_exception import Raised, capture, error_reply
from holdfast.shm.memory_file import new_file
from holdfast.shm.pack import Packer
from holdfast.shm.slot_writer import FileSpace, Full, SlotSpace
from holdfast.system import linux
from holdfast.system.evidence import Facts, Sign


@dataclass(frozen=True, slots=True)
class CallFailure:
    """A task that ends in an exception. `unopened`: opening its letter raised. `unknown`: for a name of `__main__`."""

    raised: Raised
    stage: Stage
    attempts: int
    unopened: bool = False
    unknown: bool = False

    def brief(self) -> "CallFailure":
        """The part of it that always fits."""
        return replace(self, raised=self.raised.brief())


class PoolJob:
    """See core/host.py for who calls what when."""

    def __init__(
        self,
        initializer: Callable[..., object] | None,
        initargs: tuple[Any, ...],
        retry_on: tuple[type[BaseException], ...],
        retry_delay: float,
    ) -> None:
        self._initializer = initializer
        self._initargs = initargs
        self._retry_on = retry_on
        self._retry_delay = retry_delay
        self._context: JobContext[SlotSpace]
        self._output: Output[SlotSpace]
        self._packer: Packer

    def boot(self, worker: int, life: int, context: JobContext[SlotSpace]) -> None:
        self._context, self._output = context, context.output
        self._packer = Packer()
        # Threads of OpenMP do not survive a fork. With as many workers as processors, one thread each is enough.
        torch.set_num_threads(1)
        context.enter(Stage.INIT)
        if self._initializer is not None:
            try:
                self._initializer(*self._initargs)
            except BaseException:
                # The standard library's pool logs it there too, and people look for it there.
                logging.getLogger("concurrent.futures").critical("Exception in initializer:", exc_info=True)
                raise

    def run(self, payload: memoryview, saved: memoryview, count: int) -> Reply:
        head = head_of(payload)
        if head.items:
            return self._run_chunk(head, payload, self._output.space())
        attempt = head.attempt
        while True:
            self._context.words[ALLOWED] = head.allowed_ns
            self._context.enter(Stage.FETCH)
            attempt += 1
            done = self._attempt(head, payload, attempt)
            if isinstance(done, Reply):
                return done
            failure, again = done
            if not again or attempt >= head.attempts:
                space = self._output.space()
                space.clear()
                return error_reply(self._packer, failure, space)
            self._rest(attempt)

    def _rest(self, attempt: int) -> None:
        self._context.words[RETRIES] += 1
        time.sleep(self._retry_delay * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))

    def _run_chunk(self, head: Head, payload: memoryview, space: SlotSpace) -> Reply:
        """Run a chunk. Each item has its own deadline, attempts and outcome. See pool/mapping.py."""
        pulse = self._context
        pulse.words[ALLOWED] = head.allowed_ns
        pulse.enter(Stage.FETCH, UNOPENED)
        try:
            fn, (items,), _ = open_letter(head, payload)
        except BaseException as error:  # user code: __setstate__, modules that are imported
            return error_reply(self._packer, _unopened(error, head, 1), space)
        try:
            results = Results(self._packer, space, pulse.words, head.items)
        except Full as error:  # so many items that their table does not fit: they are sent again as two halves
            return error_reply(self._packer, CallFailure(capture(error), Stage.BOOT, 1), space)
        for position, args in enumerate(items):
            pulse.enter(Stage.FETCH, position)
            results.begin(position)
            try:
                result, retries = fn(*args), 0
            except BaseException as error:  # user code
                result, retries = self._item_again(head, payload, position, error)
            try:
                results.add(result, retries)
            except BaseException as error:  # user code again: __reduce__, __getstate__
                results.add(CallFailure(capture(error), Stage.SEND, retries + 1), -1)
        return results.reply()

    def _item_again(self, head: Head, payload: memoryview, position: int, error: BaseException) -> tuple[Any, int]:
        """An item has raised. Gives its result after a retry, and the number of retries; or a CallFailure, and -1."""
        attempt = 1
        while issubclass(type(error), self._retry_on) and attempt < head.attempts:
            self._rest(attempt)
            attempt += 1
            self._context.enter(Stage.FETCH, position)
            try:
                fn, (items,), _ = open_letter(head, payload)  # with its arguments as they were at first
                return fn(*items[position]), attempt - 1
            except BaseException as other:  # user code
                error = other
        return CallFailure(capture(error), Stage.FETCH, attempt), -1

    def _attempt(self, head: Head, payload: memoryview, attempt: int) -> Reply | tuple[CallFailure, bool]:
        """The reply; or what went wrong, and whether another attempt may help."""
        try:
            fn, args, kwargs = open_letter(head, payload)
        except BaseException as error:  # user code: __setstate__, modules that are imported
            return _unopened(error, head, attempt), False
        try:
            result = _limited(head.memory, partial(fn, *args, **kwargs)) if head.memory else fn(*args, **kwargs)
        except BaseException as error:  # user code
            known = Facts()
            if head.memory and issubclass(type(error), MemoryError):
                text = f"RLIMIT_DATA was its growth by {head.memory >> 20} MiB"
                known = Facts((text,), frozenset({Sign.DATA_LIMITED}))
            return CallFailure(capture(error, known), Stage.FETCH, attempt), issubclass(type(error), self._retry_on)
        self._context.enter(Stage.SEND)
        content = (attempt - 1 or None, result)
        fd = -1
        try:
            try:
                return Reply(ReplyKind.BATCH, *self._packer.pack(content, self._output.space()))
            except Full:
                fd = new_file("result", 0)
                return Reply(ReplyKind.BATCH_IN_FILE, *self._packer.pack(content, FileSpace(fd)), 0, fd)
        except BaseException as error:  # user code again: __reduce__, __getstate__; or there is no room for a file
            if fd >= 0:
                os.close(fd)
            return CallFailure(capture(error), Stage.SEND, attempt), False


def _unopened(error: BaseException, head: Head, attempt: int) -> CallFailure:
    captured = capture(error)
    unknown = issubclass(type(error), AttributeError) and "_main__'" in captured.text and not head.by_value
    return CallFailure(captured, Stage.BOOT, attempt, True, unknown)


def _limited(size: int, call: Callable[[], Any]) -> Any:
    """An allocation fails once the process has `size` bytes more than now."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    linux.limit_growth(size)
    try:
        return call()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
