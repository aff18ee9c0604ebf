"""Turns a nested batch into (spec, buffers) and back: pickle protocol 5, with large contents out of band.

The worker packs. The structure becomes a pickle, the *spec*. The worker puts the bytes of tensors and arrays into a
space (see shm/slot_writer.py), and notes them in a table of (offset, size). The trainer unpacks. It copies small leaves
out, so that a label that the user keeps does not hold on to its batch. Large leaves are views, without a copy.

Most batches are one tensor, or a flat list or dict of tensors, with the same shapes each time. Their spec holds just
types and shapes. The worker makes it once, and the trainer reads it once.

Everything that can be pickled can be sent. Plain dense tensors have a short way of their own. Sparse tensors go as
their parts. Other kinds (quantized, subclasses, tensors that require grad) are pickled as torch does it, with their
storages out of band.
"""

import io
import pickle
import struct
from collections import ChainMap
from collections.abc import Callable, Iterator
from copyreg import dispatch_table
from functools import lru_cache
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any, NamedTuple, TypeGuard

import cloudpickle
import numpy as np
import torch

from holdfast.shm.main_module import LARGE, MainModule, MainPickler, warn_of_large_globals
from holdfast.shm.slot_writer import CODES, TWINS, AnySpace, FileSpace, is_same

# The trainer copies leaves below this size out of the slot.
SMALL = 256 << 10
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


# Leaves -----------------------------------------------------------------------------------------------------------


def _tensor(raw: Any, code: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> torch.Tensor:
    return torch.from_numpy(np.ndarray(shape, TWINS[code], raw, 0, strides))


def _odd_tensor(
    raw: Any, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A dense tensor of a dtype that numpy does not know (bfloat16, float8, ...)."""
    if not memoryview(raw).nbytes:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype)
    return flat.view(shape) if strides is None else flat.as_strided(shape, strides)


def _sparse(
    layout: torch.layout, parts: tuple[torch.Tensor, ...], shape: tuple[int, ...], coalesced: bool, grad: bool
) -> torch.Tensor:
    """torch's own function to load one also keeps it in a list for ever, for a torch.load that never comes."""
    if layout is torch.sparse_coo:
        indices, values = parts
        made = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=coalesced)
    else:
        outer, inner, values = parts
        made = torch.sparse_compressed_tensor(outer, inner, values, shape, layout=layout, check_invariants=False)
    return made.requires_grad_(grad)


def _parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def _storage(raw: Any, dtype: torch.dtype | None) -> object:
    size = memoryview(raw).nbytes
    plain = torch.frombuffer(raw, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    untyped = plain.untyped_storage()
    if dtype is None:
        return untyped
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _rebuilt(
    storage: torch.UntypedStorage, at: int, shape: Any, strides: Any, wants_gradient: bool, *rest: Any
) -> torch.Tensor:
    """For newer dtypes (float8, uint16, ...) torch writes an untyped storage, but reads a typed one. And it cannot put
    memory into a tensor that requires grad.
    """
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)  # type: ignore[no-untyped-call]
    made = torch._utils._rebuild_tensor_v3(typed, at, shape, strides, False, *rest)  # type: ignore[no-untyped-call]
    return made.requires_grad_(wants_gradient)  # type: ignore[no-any-return]


def _as_torch_reduces(tensor: torch.Tensor) -> Any:
    """A tensor that is not plain: it requires grad, has a mark (conjugated, negated), or has attributes."""
    function, parts = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
    if function is torch._utils._rebuild_tensor_v3:
        return _rebuilt, parts
    if parts[0] is torch._utils._rebuild_tensor_v3:  # with attributes
        return function, (_rebuilt, *parts[1:])
    return function, parts


def bytes_of(tensor: torch.Tensor) -> Any:
    """The tensor's memory as a numpy array of bytes."""
    dense = tensor.detach().contiguous()  # a tensor of one element may have any stride, and counts as contiguous
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()


def _array(raw: Any, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Any:
    return np.ndarray(shape, dtype, raw, 0, strides)


# Stands for a leaf whose bytes are in the slot already.
_IN_PLACE = pickle.PickleBuffer(bytearray())

# If each batch has new shapes (variable length text), these must not fill the memory.
_MOST_SPECS = 512
# The first byte of the spec of a flat batch. A pickle of a batch begins with 0x80.
_FLAT = ord("F")
# A batch of more leaves does not count as flat: what we keep about it would be large too.
_MOST_LEAVES = 64


class _Flat(NamedTuple):
    """A batch of plain dense tensors: one, or a list, a tuple or a dict of several."""

    kind: type
    keys: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # each begins with the code of its dtype


def _is_clean(batch: object) -> TypeGuard[tuple[None, Any]]:
    """A batch of the loader without any trouble, and so without notes."""
    return type(batch) is tuple and len(batch) == 2 and batch[0] is None


def is_plain(tensor: torch.Tensor) -> bool:
    """True for plain dense numbers in this machine's memory."""
    return not (
        tensor.requires_grad
        or tensor.is_nested
        or tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.__dict__
    )


def _is_shared(tensor: torch.Tensor) -> bool:
    """True for a tensor whose memory other processes see. For a sparse or nested tensor its parts are asked."""
    dense = tensor.layout is torch.strided and not tensor.is_nested
    return dense and bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _buffer(array: Any) -> pickle.PickleBuffer:
    return pickle.PickleBuffer(array)


class Scales(FileSpace):
    """Keeps nothing of what is put there but its size."""

    def __init__(self) -> None:
        super().__init__(-1)

    def put(self, raw: memoryview) -> int:
        self.size += raw.nbytes
        return 0


class Packer:
    """Packs one batch after another; one per worker. Which process: the worker, in its main thread."""

    # What the reader knows of `__main__`; None in a worker: the trainer has all that is there.
    main: MainModule | None = None

    def __init__(self, *, spawning: bool = False) -> None:
        """`spawning`: it packs a job for a new process. Tensors that are shared already stay shared."""
        self._space: AnySpace
        self._spawning = spawning
        self._table: list[int] = []
        self._specs: dict[_Flat, bytes] = {}
        own: dict[type, Callable[[Any], Any]] = {
            torch.Tensor: self._reduce_tensor,
            np.ndarray: self._reduce_array,
            torch.UntypedStorage: lambda s: self._reduce_storage(s, s, None),
            torch.storage.TypedStorage: lambda s: self._reduce_storage(s, s._untyped_storage, s.dtype),
        }
        self._shared: dict[type, Callable[[Any], Any]] = {}
        if spawning:
            self.main = MainModule(fork=False)
            self._shared = dict(ForkingPickler._extra_reducers)  # type: ignore[attr-defined]
            own = {**self._shared, **own}
        self._plain = {**dispatch_table, **own}
        self._cloud = ChainMap(own, cloudpickle.Pickler.dispatch_table)

    def pack(self, batch: object, space: AnySpace) -> tuple[int, int, int]:
        """Put `batch` into `space`: (where its table lies, buffers in it, bytes of the spec behind it).

        Raises `Full`, or whatever pickling the batch raises.
        """
        self._space = space
        content: Any = batch[1] if _is_clean(batch) else None
        placed = space.placed.get(id(content))
        if placed is not None and not is_same(content, placed.looks):
            placed = space.forget(content)
        if placed is not None and placed.alone is not None:
            return space.put(memoryview(placed.alone)), 1, len(placed.alone) - 16
        flat = self._flattened(batch)
        spec = self._pickle(batch) if flat is None else self._specs.get(flat) or self._remember(flat)
        table = self._table
        written = struct.pack(f"<{len(table)}Q", *table) + spec
        if placed is not None and flat is not None:
            placed.alone = written
        return space.put(memoryview(written)), len(table) // 2, len(spec)

    def _pickle(self, batch: object) -> bytes:
        if self.main is None or self.main.all:
            try:
                return self._dump(pickle.Pickler, self._plain, batch)
            except (pickle.PicklingError, AttributeError, TypeError):
                pass  # a lambda, a closure: by value
        return self._by_value(batch)

    def _by_value(self, batch: object) -> bytes:
        functions: list[FunctionType] = []
        spec = self._dump(MainPickler, self._cloud, batch, functions)
        table, space = self._table, self._space
        if functions and isinstance(space, FileSpace) and len(spec) + space.size > LARGE:
            warn_of_large_globals(functions, self._weight)
            self._table, self._space = table, space
        return spec

    def _weight(self, value: object) -> int:
        self._space = Scales()
        return len(self._dump(MainPickler, self._cloud, value)) + self._space.size

    def _flattened(self, batch: object) -> _Flat | None:
        """Describes a flat batch, and puts its leaves into the space. None for any other batch."""
        if not _is_clean(batch):
            return None
        content = batch[1]
        kind = type(content)
        keys: tuple[str, ...] = ()
        if kind is torch.Tensor:
            leaves: Any = (content,)
        elif kind not in (list, tuple, dict) or len(content) > _MOST_LEAVES:
            return None
        elif kind is dict:
            leaves, keys = content.values(), tuple(content)
            if not all(type(key) is str for key in keys):
                return None
        else:
            leaves = content
        placed = self._space.placed
        shapes = []
        table: list[int] = []
        for leaf in leaves:
            there = placed.get(id(leaf))
            if there is not None and not is_same(leaf, there.looks):
                there = self._space.forget(leaf)
            if there is not None:
                shape, offset, size = there.shape, there.offset, there.size
            elif type(leaf) is torch.Tensor and is_plain(leaf) and leaf.is_contiguous() and leaf.dtype in CODES:
                shape, size = (CODES[leaf.dtype], *leaf.shape), leaf.nbytes
                offset = self._space.put(_buffer(leaf.numpy()).raw())
            else:
                return None
            shapes.append(shape)
            table += (offset, size)
        if len({*map(id, leaves)}) < (len(shapes) or 1):
            return None  # nothing; or the same tensor twice, which must stay one tensor
        self._table = table
        return _Flat(kind, keys, tuple(shapes))

    def _remember(self, flat: _Flat) -> bytes:
        if len(self._specs) >= _MOST_SPECS:
            self._specs.clear()
        spec = self._specs[flat] = bytes([_FLAT]) + pickle.dumps(tuple(flat), 5)
        return spec

    def _dump(
        self, pickler_class: Any, reducers: Any, batch: object, functions: list[FunctionType] | None = None
    ) -> bytes:
        """`functions`: gets those of `__main__` that went by value."""
        file = io.BytesIO()
        self._table = []
        pickler = pickler_class.__new__(pickler_class)
        pickler.dispatch_table = reducers  # only __init__ reads this; cloudpickle's class has a table of its own
        pickler.__init__(file, protocol=5, buffer_callback=self._put)
        if self.main is None or pickler_class is not MainPickler:
            pickler.dump(batch)
        else:
            pickler.dump_for_adoption(batch, self.main)
            if functions is not None:
                functions += pickler.sent_functions
        return file.getvalue()

    def _put(self, buffer: pickle.PickleBuffer) -> None:
        if buffer is not _IN_PLACE:  # the reducer of that tensor has made the table entry
            raw = buffer.raw()
            self._table += (self._space.put(raw), raw.nbytes)

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        placed = self._space.placed.get(id(tensor))
        if placed is not None and not is_same(tensor, placed.looks):
            placed = self._space.forget(tensor)
        if placed is not None:
            self._table += (placed.offset, placed.size)
            return _tensor, (_IN_PLACE, placed.shape[0], placed.shape[1:])
        if self._spawning and (tensor.device.type != "cpu" or _is_shared(tensor)):
            return self._shared[torch.Tensor](tensor)
        if tensor.layout in _SPARSE and not tensor.__dict__:
            coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
            parts = _parts_of_sparse(tensor.detach())
            return _sparse, (tensor.layout, parts, tuple(tensor.shape), coalesced, tensor.requires_grad)
        if not is_plain(tensor):
            return _as_torch_reduces(tensor)
        shape = tuple(tensor.shape)
        code = CODES.get(tensor.dtype)
        if code is None:
            dense = tensor if tensor.is_contiguous() else _in_order(tensor)
            strides = None if dense is tensor else tensor.stride()
            try:
                raw = bytes_of(dense)
            except RuntimeError:  # torch cannot copy it: a dtype of a few bits
                return _as_torch_reduces(tensor)
            return _odd_tensor, (_buffer(raw), tensor.dtype, shape, strides)
        if not tensor.is_contiguous():
            array = tensor.numpy()
            order = _order_of_dense(array)
            if order is not None:
                raw = _buffer(array.transpose(order))
                return _tensor, (raw, code, shape, array.strides)
            tensor = tensor.contiguous()
        return _tensor, (_buffer(tensor.numpy()), code, shape)

    def _reduce_array(self, array: Any) -> Any:
        dtype = array.dtype
        if dtype.kind not in "biufcSU" or dtype.isbuiltin == 2:
            return array.__reduce_ex__(5)
        if not array.flags.writeable:
            array = array.copy()  # otherwise it would arrive as an array that cannot be written
        if not array.flags.c_contiguous:
            order = _order_of_dense(array)
            if order is not None:
                raw = _buffer(array.transpose(order))
                return _array, (raw, dtype.str, array.shape, array.strides)
            array = np.ascontiguousarray(array)
        return _array, (_buffer(array), dtype.str, array.shape)

    def _reduce_storage(self, storage: Any, untyped: Any, dtype: torch.dtype | None) -> Any:
        if self._spawning and (untyped.is_shared() or untyped.device.type != "cpu"):
            return self._shared[type(storage)](storage)
        raw = torch.empty(0, dtype=torch.uint8).set_(untyped).numpy()
        return _storage, (_buffer(raw), dtype)


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, transposed if it is dense but permuted (channels_last); unchanged if its strides have gaps."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda d: -strides[d])
    dense = tensor.permute(order)
    return dense if dense.is_contiguous() else tensor


def _order_of_dense(array: Any) -> tuple[int, ...] | None:
    """How to transpose an array that is dense but permuted (channels_last); None if its strides have gaps."""
    order = sorted(range(array.ndim), key=lambda d: -array.strides[d])
    return tuple(order) if array.transpose(order).flags.c_contiguous else None


def unpack(
    view: memoryview,
    where: int,
    buffers: int,
    spec_bytes: int,
    lend: Callable[[], memoryview | None],
    small: int = SMALL,
) -> Any:
    """The batch whose bytes lie in `view`. If there is a large leaf, this calls `lend()` once, for memory to keep.

    `small`: it copies leaves below that many bytes out.
    """
    start = where + 16 * buffers
    if view[start] == _FLAT:
        return None, _unflattened(view, *_read_flat(bytes(view[where : start + spec_bytes]), buffers), lend, small)
    table = struct.unpack_from(f"<{2 * buffers}Q", view, where)
    return pickle.loads(view[start : start + spec_bytes], buffers=_leaves(view, table, lend, small))


class _Look(NamedTuple):
    """How to build one leaf of a flat batch."""

    shape: tuple[int, ...]
    dtype: Any
    start: int
    size: int


@lru_cache(_MOST_SPECS)
def _read_flat(written: bytes, leaves: int) -> tuple[type, tuple[str, ...], list[_Look], int]:
    """Reads a table and the spec behind it: the kind of flat batch, its keys, its leaves, the size of the largest."""
    table = struct.unpack_from(f"<{2 * leaves}Q", written)
    kind, keys, shapes = pickle.loads(memoryview(written)[16 * leaves + 1 :])
    looks = [
        _Look(shape[1:], TWINS[shape[0]], start, size)
        for shape, start, size in zip(shapes, table[::2], table[1::2], strict=True)
    ]
    return kind, keys, looks, max(table[1::2])


def _unflattened(
    view: memoryview,
    kind: type,
    keys: tuple[str, ...],
    looks: list[_Look],
    largest: int,
    lend: Callable[[], memoryview | None],
    small: int,
) -> Any:
    shared = lend() if largest >= small else None
    array, tensor = np.ndarray, torch.from_numpy
    tensors = [
        tensor(
            array(shape, dtype, bytearray(view[start : start + size]))
            if shared is None or size < small
            else array(shape, dtype, shared, start)
        )
        for shape, dtype, start, size in looks
    ]
    if kind is torch.Tensor:
        return tensors[0]
    if kind is dict:
        return dict(zip(keys, tensors, strict=True))
    return tensors if kind is list else tuple(tensors)


def _leaves(
    view: memoryview, table: tuple[int, ...], lend: Callable[[], memoryview | None], small: int
) -> Iterator[Any]:
    shared: memoryview | None = None
    asked = False
    for i in range(0, len(table), 2):
        start, size = table[i], table[i + 1]
        if size >= small and not asked:
            shared, asked = lend(), True
        if size >= small and shared is not None:
            yield shared[start : start + size]
        else:
            yield bytearray(view[start : start + size])
