"""What a worker of the DataLoader does: fetch, collate into the slot, pack. Runs in the worker only."""

import os
import pickle
import random
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.utils.data._utils.collate as torch_collate
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import IterDataPipe
from torch.utils.data.graph_settings import apply_random_seed

from holdfast.core.host import KEPT_APART, JobContext, Output, Reply, ReplyKind, Spent, StreamEnd
from holdfast.core.messages import Leave, Stage
from holdfast.errors import CannotSend, StreamBroken
from holdfast.loader import seeds
from holdfast.loader.collate_guard import CollateGuard, Functions, is_plain_torch, is_torchs
from holdfast.loader.collation import Collator
from holdfast.loader.dataset_changes import DatasetChanges
from holdfast.loader.fetch import Draw, MapFetcher, SampleFailed, Trouble, bad_of, everything
from holdfast.loader.journal import Journal
from holdfast.loader.stream import WHOLE, Left, Moved, Place, StreamFetcher, Sure
from holdfast.loader.tree import explain_unsendable
from holdfast.policy import Policy
from holdfast.remote_exception import error_reply
from holdfast.shm.memory_file import new_file
from holdfast.shm.pack import Packer
from holdfast.shm.slot_writer import TORCH_TWIN, FileSpace, Full, SlotSpace, stack_arrays, stack_tensors

# Looked up once: in Python 3.11 each time takes 100 ns.
_SEND, _BATCH = Stage.SEND, ReplyKind.BATCH


@dataclass(frozen=True)
class Recipe:
    """All that a worker needs to know of its loader."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    auto_collation: bool
    drop_last: bool
    iterable: bool
    worker_init_fn: Callable[[int], Any] | None
    num_workers: int
    persistent: bool
    base_seed: int
    shared_seed: int | None
    policy: Policy
    growth_bytes: int | None


class SlotStack:
    """Stacks samples straight into the slot while torch's default collate runs; plainly otherwise.

    It stands in for torch's own function in `default_collate_fn_map`, which would put each batch into /dev/shm.
    Only the default collate, where no code of the user's comes by what it makes, writes into the slot: the user may
    keep or change a batch, and the slot will be written again. Whoever else calls it meanwhile (a sample that is asked
    for its parts, another thread) finds what stacks plainly.
    """

    def __init__(self) -> None:
        self.space: SlotSpace | None = None
        self._functions: Functions | None = None
        self._torch_default = torch_collate.default_collate
        self._torch_tensors = torch_collate.collate_tensor_fn
        self._torch_arrays = torch_collate.collate_numpy_array_fn
        self._ours = self.tensors
        in_slot: dict[Any, Callable[..., Any]] = {self._ours: self.tensors_in_slot}
        if is_torchs(self._torch_arrays):
            in_slot[self._torch_arrays] = self.arrays_in_slot
        self._guard = CollateGuard(in_slot)

    def install(self) -> None:
        """From now on default_collate comes here, unless the user put a function of their own in this place."""
        functions = torch_collate.default_collate_fn_map
        present, own = functions.get(torch.Tensor), self._torch_tensors
        if (present is own and is_torchs(own)) or isinstance(getattr(present, "__self__", None), SlotStack):
            functions[torch.Tensor] = self._ours

    def open(self, output: Output[SlotSpace], samples: Any) -> None:
        """The batch of these samples may be stacked into the slot, until `close`."""
        self._functions = self._guard.functions_for(samples)
        self.space = None if self._functions is None else output.space()

    def close(self) -> None:
        self.space = self._functions = None

    def collate(self, samples: Any) -> Any:
        """default_collate; into the slot, if that is open."""
        if self._functions is None:
            return self._torch_default(samples)  # type: ignore[no-untyped-call]
        return torch_collate.collate(samples, collate_fn_map=self._functions)

    def tensors(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        return self._tensors(batch, collate_fn_map, None)

    def tensors_in_slot(self, batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        space = self.space
        out = None if space is None else space.stacked(batch)
        return self._tensors(batch, collate_fn_map, space) if out is None else out

    def _tensors(self, batch: Any, functions: Any, space: SlotSpace | None) -> torch.Tensor:
        first = batch[0]
        if first.is_nested or first.layout is not torch.strided:
            return self._torch_tensors(batch, collate_fn_map=functions)  # type: ignore[no-any-return]
        if not is_plain_torch(batch) or first.device.type != "cpu":
            return torch.stack(batch, 0)
        shape = len(batch), *first.shape
        try:
            out = space.tensor(first.dtype, shape) if space is not None else None
            if out is None:
                out = torch.empty(shape, dtype=first.dtype)  # the first one's, as torch has it in a worker
            stack_tensors(batch, out, space is not None and space.by_two)
            return out
        except (Full, RuntimeError):
            return torch.stack(batch, 0)  # works (mixed dtypes, grad), or raises what the user must see

    def arrays_in_slot(self, batch: Any, *, collate_fn_map: Any = None) -> Any:
        first = batch[0]
        dtype = TORCH_TWIN.get(first.dtype)
        space = self.space
        if space is not None and dtype is not None and type(first) is np.ndarray:
            try:
                out = space.tensor(dtype, (len(batch), *first.shape))
                if out is not None and stack_arrays(batch, out, space.by_two):
                    return out
            except Full:
                pass  # the plain way
        return self._torch_arrays(batch, collate_fn_map=collate_fn_map)


def _one_thread() -> None:
    """Workers times threads shall fit the processors. What the user set stays; what is not loaded yet reads it."""
    torch.set_num_threads(1)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    if "cv2" in sys.modules and sys.modules["cv2"].getNumThreads() > 1:
        # Not 1: that ends the threads of its pool at once, and waits for ever for those that the fork did not copy.
        sys.modules["cv2"].setNumThreads(0)


class LoaderJob:
    """See core/host.py for who calls what when."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._context: JobContext[SlotSpace]
        self._output: Output[SlotSpace]
        self._packer: Packer
        self._stack: SlotStack
        self._map: MapFetcher | None = None
        self._stream: StreamFetcher | None = None
        self._dataset_changes: DatasetChanges | None = None
        self._told_end = False
        self._began: Moved = None
        self._epoch = -1
        self._default_collate = recipe.collate_fn is torch_collate.default_collate and is_torchs(recipe.collate_fn)

    # Boot ----------------------------------------------------------------------------------------------------------

    def boot(self, worker: int, life: int, context: JobContext[SlotSpace]) -> None:
        recipe = self._recipe
        self._context, self._output = context, context.output
        self._worker = worker
        self._packer = Packer()
        self._stack = SlotStack()
        _one_thread()
        seed = recipe.base_seed + worker
        self._dataset = recipe.dataset
        self._shared_generator = torch.Generator()
        self._seed_datapipe(recipe.shared_seed)
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=worker, num_workers=recipe.num_workers, seed=seed, dataset=self._dataset
        )
        self._stack.install()
        self._seeder = seeds.Seeder()
        context.enter(Stage.INIT)
        if recipe.worker_init_fn is not None:
            random.seed(seed)  # as torch has it; whatever comes later is seeded by batch
            torch.default_generator.manual_seed(seed)
            np.random.seed(torch_worker._generate_state(recipe.base_seed, worker))  # type: ignore[no-untyped-call]
            self._seeder.watching(partial(recipe.worker_init_fn, worker))
        if recipe.iterable:
            if recipe.persistent and not isinstance(self._dataset, IterDataPipe):
                self._dataset_changes = DatasetChanges(self._dataset, everything)
        else:
            self._map = MapFetcher(
                self._dataset,
                recipe.auto_collation,
                recipe.policy,
                context=context,
                catch=everything,
                reseed=True,
                may_leave=True,
                growth_bytes=recipe.growth_bytes,
            )
        self._collator = Collator(
            self._collate_into_slot if self._default_collate else recipe.collate_fn,
            recipe.auto_collation,
            recipe.policy,
            context.words,
            everything,
            default=self._default_collate,
            spares=None if self._map is None else self._map.spares,
        )

    def _collate_into_slot(self, samples: Any) -> Any:
        """The default collate. What it wrote of a batch that failed is given back."""
        stack = self._stack
        stack.open(self._output, samples)
        try:
            return stack.collate(samples)
        except BaseException:
            if stack.space is not None:
                stack.space.clear()
            raise
        finally:
            stack.close()

    def _seed_datapipe(self, shared_seed: int | None) -> None:
        if isinstance(self._dataset, IterDataPipe) and shared_seed is not None:
            self._shared_generator.manual_seed(shared_seed)
            self._dataset = apply_random_seed(self._dataset, self._shared_generator)

    # Tasks ---------------------------------------------------------------------------------------------------------

    def run(self, payload: memoryview, saved: memoryview, count: int) -> Reply:
        asked = pickle.loads(payload)
        troubles: list[Trouble] = []
        try:
            if self._recipe.iterable:
                return self._stream_batch(asked, troubles)
            base_seed, number, attempt, *rest = asked
            draw = Draw(*rest)
            troubles = draw.troubles
            self._seeder.seed(base_seed, number)
            if attempt and self._recipe.auto_collation:
                left = memoryview(bytes(saved))  # samples may be kept; the letter box is written again
                draw.journal = Journal(self._packer, self._output.space(), self._context.words, len(draw.indices))
                draw.done = draw.journal.restore(left, count)
                troubles += draw.journal.troubles
            return self._map_batch(draw, base_seed, number)
        except SampleFailed as failed:
            failure = failed.to_failure(troubles)
        except (CannotSend, StreamBroken) as error:
            failure = SampleFailed(error, -1, None, Stage.SEND, 1).to_failure(troubles)
        space = self._output.space()
        space.clear()
        return error_reply(self._packer, failure, space, bad_of(troubles), self._mark())

    def _map_batch(self, draw: Draw, base_seed: int, number: int) -> Reply:
        fetcher = self._map
        assert fetcher is not None
        indices = draw.indices
        samples, troubles = fetcher.load(draw, lambda: self._seeder.seed(base_seed, number))
        if draw.journal is not None:
            draw.journal.discard()
        if fetcher.left_out(samples, draw, troubles):
            return self._send((troubles, None), samples, indices, len(troubles))
        try:
            batch = self._collator.batch(samples, troubles, draw)
        except SampleFailed as failed:
            fetcher.leave_if_spent(failed, draw)
            raise
        return self._send((troubles or None, batch), samples, indices, bad_of(troubles))

    def _stream_batch(self, asked: Any, troubles: list[Trouble]) -> Reply:
        base_seed, epoch, number, size, shared_seed, place = asked
        recipe = self._recipe
        if epoch != self._epoch:
            self._begin_stream(base_seed, epoch, number, size, shared_seed, place)
        stream = self._stream
        assert stream is not None
        stream.prepare(number)
        try:
            items, _ = stream.take(size, troubles=troubles)
        except StopIteration:
            if not troubles:
                return self._exhausted(stream)
            return self._send(((troubles, None, 0, None), None), [], None, len(troubles))  # that is said next time
        batch = self._collator.batch(items, troubles)
        notes = (troubles, stream.snapshot(), len(items) if recipe.auto_collation else 1, self._began)
        self._began = None
        return self._send((notes, batch), items, None, len(troubles))

    def _exhausted(self, stream: StreamFetcher) -> Reply:
        """The first time with what this epoch has made of the dataset."""
        reply = Reply(ReplyKind.EXHAUSTED, buffers=stream.items, bad=stream.number)
        dataset_changes = self._dataset_changes
        if dataset_changes is None or self._told_end:
            return reply
        self._told_end = True
        if stream.spoilt:
            return reply._replace(spec_bytes=StreamEnd.NOT_KNOWN)
        try:
            moved = dataset_changes.moved()
            if moved and not dataset_changes.lost:
                self._output.space().put(memoryview(moved))
        except BaseException:  # user code again, or more than a slot holds
            dataset_changes.lost = True
        if dataset_changes.lost:
            return reply._replace(spec_bytes=StreamEnd.LOST)
        return reply._replace(where=len(moved), spec_bytes=StreamEnd.KNOWN)

    def _begin_stream(
        self, base_seed: int, epoch: int, number: int, size: int, shared_seed: int | None, place: Place
    ) -> None:
        """An epoch begins for this life; at batch `number`, where another life was before."""
        if self._stream is not None and self._stream.spoilt:
            raise Spent(Leave.ASKED, ())  # a fresh life begins with the dataset as it was
        done, snapshot, left, moved = place
        fresh = self._stream is None
        self._epoch = epoch
        self._began = None if fresh else self._moved()
        self._told_end = False
        self._seed_datapipe(shared_seed)
        self._stream = self._new_stream(base_seed)
        if fresh:
            try:
                self._bring(moved)
                if snapshot is None and left:
                    self._go_through(left, size)
                    self._began = self._moved()
            except StreamBroken:
                self._stream.give_up(number)
                raise
        if number:
            self._stream.resume(number, done, snapshot, size)

    def _moved(self) -> Moved:
        """What the last epoch has made of the dataset, if that was left."""
        dataset_changes = self._dataset_changes
        if dataset_changes is None or self._told_end:
            return None
        try:
            moved = dataset_changes.moved()
        except BaseException:  # user code
            return b"", Sure.LOST
        return moved, Sure.LOST if dataset_changes.lost else Sure.SEEN if dataset_changes.sure else Sure.NOT_SEEN

    def _bring(self, moved: bytes) -> None:
        """The dataset to where whole epochs of an earlier life have brought it."""
        if moved and self._dataset_changes is not None:
            try:
                self._dataset_changes.restore(moved)
            except BaseException as error:  # user code: __setstate__
                raise StreamBroken(
                    "what earlier epochs have made of the dataset could not be given to a new worker: its attributes "
                    f"can be pickled, but not unpickled ({type(error).__name__})"
                ) from error

    def _go_through(self, left: Sequence[Left], size: int) -> None:
        """Epochs of an earlier life since it is known where the dataset was: they have moved it."""
        words = self._context.words
        apart = words[KEPT_APART]  # a state says nothing of where an epoch begins
        known = [] if apart else [at for at, (*_, snapshot) in enumerate(left) if snapshot is not None]
        for base_seed, number, done, snapshot in left[known[-1] if known else 0 :]:
            stream = self._new_stream(base_seed)
            if apart or number == WHOLE:
                stream.run_out(size, number)
                continue
            stream.resume(number, done, snapshot, size)
            if snapshot is not None and not stream.moves:
                words[KEPT_APART] = 1
                raise Spent(Leave.ASKED, ())  # the next life knows

    def _new_stream(self, base_seed: int) -> StreamFetcher:
        recipe = self._recipe
        return StreamFetcher(
            self._dataset,
            recipe.auto_collation,
            recipe.drop_last,
            recipe.policy,
            self._stream_seeder(base_seed),
            words=self._context.words,
            catch=everything,
        )

    def _stream_seeder(self, base_seed: int) -> Callable[[int], None]:
        """Random numbers of a stream depend on (base seed, worker, batch)."""
        own = seeds.mix(base_seed, -2 - self._worker)
        return lambda number: self._seeder.seed(own, number)

    # Sending -------------------------------------------------------------------------------------------------------

    def _send(self, content: Any, samples: Any, indices: Any, bad: int) -> Reply:
        space = self._output.space()
        self._context.enter(_SEND)
        try:
            try:
                where, buffers, spec_bytes = self._packer.pack(content, space)
                return Reply(_BATCH, where, buffers, spec_bytes, bad, -1, self._mark())
            except Full:
                return self._send_in_file(content, bad)
        except CannotSend:
            raise
        except BaseException as error:  # user code again: __reduce__, __getstate__
            if not self._recipe.auto_collation:
                samples, indices = [samples], [indices]
            raise explain_unsendable(error, content[1], samples, indices) from error

    def _send_in_file(self, content: Any, bad: int) -> Reply:
        fd = new_file("batch", 0)
        space = FileSpace(fd)
        try:
            return Reply(ReplyKind.BATCH_IN_FILE, *self._packer.pack(content, space), bad, fd, self._mark())
        except BaseException as error:
            os.close(fd)
            if not isinstance(error, OSError):
                raise
            raise CannotSend(
                f"the batch cannot be sent: the system refused its file more than {space.size} bytes\n"
                f"    seen   {error}; RLIMIT_FSIZE is {resource.getrlimit(resource.RLIMIT_FSIZE)[0]}\n"
                "    try    smaller batches, or a larger limit (ulimit -f)"
            ) from error

    def _mark(self) -> int:
        """Where a stream is: the next life must come to the same."""
        return self._stream.print if self._stream is not None else 0
