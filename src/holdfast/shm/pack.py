"""A nested batch <-> (spec, buffers): pickle protocol 5, with the bulk out of band.

The worker packs: the structure becomes a pickle, the *spec*; the bytes of tensors and arrays are put into a `Space`
(a slot, or a file of their own) and remembered in a table of (offset, size). The trainer unpacks: small leaves are
copied out, so that a kept label does not hold on to its batch; large ones are views, without a copy.

Everything that pickles crosses. Plain dense tensors have a short way of their own; other kinds (sparse, quantized,
subclasses, those that require grad) go torch's way, with their storages out of band.
"""

import io
import math
import os
import pickle
import struct
from collections import ChainMap
from collections.abc import Callable, Iterator
from copyreg import dispatch_table
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
import numpy as np
import torch

# Leaves below this are copied out of the slot.
SMALL = 256 << 10
ALIGN = 64


class Full(Exception):
    """The slot's stride is too small for this batch."""


class SlotSpace:
    """A slot, filled from its start. `reserve` gives room that the caller fills in place."""

    def __init__(self, view: memoryview, address: int) -> None:
        self._view = view
        self._address = address
        self.end = 0
        self._in_place: dict[int, tuple[int, int]] = {}

    def _room(self, size: int) -> int:
        start = -(-self.end // ALIGN) * ALIGN
        if start + size > len(self._view):
            raise Full
        self.end = start + size
        return start

    def put(self, raw: memoryview) -> int:
        start = self._room(raw.nbytes)
        self._view[start : self.end] = raw
        return start

    def reserve(self, size: int) -> memoryview:
        """Room for `size` bytes that the caller writes itself."""
        start = self._room(size)
        self._in_place[self._address + start] = (start, size)
        return self._view[start : self.end]

    def lies_at(self, address: int, size: int) -> int | None:
        """The offset of bytes that were written in place; None for any others."""
        found = self._in_place.get(address)
        return found[0] if found is not None and found[1] == size else None


class FileSpace:
    """A file of its own, for what no slot can hold; it grows as it is written."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.size = 0

    def put(self, raw: memoryview) -> int:
        start = -(-self.size // ALIGN) * ALIGN
        done = 0
        while done < raw.nbytes:
            done += os.pwrite(self._fd, raw[done:], start + done)
        self.size = start + raw.nbytes
        return start

    def lies_at(self, address: int, size: int) -> int | None:
        return None


# Leaves -----------------------------------------------------------------------------------------------------------

_NUMPY_TWIN: dict[torch.dtype, Any] = {
    torch.float32: np.dtype(np.float32),
    torch.int64: np.dtype(np.int64),
    torch.uint8: np.dtype(np.uint8),
    torch.float64: np.dtype(np.float64),
    torch.int32: np.dtype(np.int32),
    torch.float16: np.dtype(np.float16),
    torch.bool: np.dtype(np.bool_),
    torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
}
TORCH_TWIN = {twin: dtype for dtype, twin in _NUMPY_TWIN.items()}
_CODES = {dtype: code for code, dtype in enumerate(_NUMPY_TWIN)}
_TWINS = list(_NUMPY_TWIN.values())


def _tensor(raw: Any, code: int, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> torch.Tensor:
    return torch.from_numpy(np.ndarray(shape, _TWINS[code], raw, 0, strides))


def _odd_tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A dense tensor of a dtype that numpy does not know (bfloat16, float8, ...)."""
    if not memoryview(raw).nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(shape)


def _storage(raw: Any, dtype: torch.dtype | None) -> object:
    size = memoryview(raw).nbytes
    plain = torch.frombuffer(raw, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    untyped = plain.untyped_storage()
    if dtype is None:
        return untyped
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The tensor's memory as a numpy array of bytes."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()


def _array(raw: Any, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Any:
    return np.ndarray(shape, dtype, raw, 0, strides)


# Stands for a leaf whose bytes are in the slot already.
_IN_PLACE = pickle.PickleBuffer(bytearray())

AnySpace = SlotSpace | FileSpace

# Batches of ever new shapes (variable length text) must not fill the memory.
_MOST_SPECS = 512


def _is_plain(tensor: torch.Tensor) -> bool:
    """Dense numbers in this machine's memory, and nothing else to it."""
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
    """True for one whose memory other processes see; a sparse or nested one is asked by its parts."""
    dense = tensor.layout is torch.strided and not tensor.is_nested
    return dense and bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _buffer(array: Any) -> pickle.PickleBuffer:
    return pickle.PickleBuffer(array)


class Packer:
    """Packs one batch after another; one per worker. Which process: the worker, in its main thread."""

    def __init__(self, *, spawning: bool = False) -> None:
        """`spawning`: for a job that goes to a new process; what is shared already stays shared."""
        self._space: AnySpace
        self._spawning = spawning
        self._table: list[int] = []
        self._specs: dict[tuple[Any, ...], bytes] = {}
        own: dict[type, Callable[[Any], Any]] = {
            torch.Tensor: self._reduce_tensor,
            np.ndarray: self._reduce_array,
            torch.UntypedStorage: lambda s: self._reduce_storage(s, s, None),
            torch.storage.TypedStorage: lambda s: self._reduce_storage(s, s._untyped_storage, s.dtype),
        }
        self._shared: dict[type, Callable[[Any], Any]] = {}
        if spawning:
            self._shared = dict(ForkingPickler._extra_reducers)  # type: ignore[attr-defined]
            own = {**self._shared, **own}
        self._plain = {**dispatch_table, **own}
        self._cloud = ChainMap(own, cloudpickle.Pickler.dispatch_table)

    def pack(self, batch: object, space: AnySpace) -> tuple[int, int, int]:
        """Put `batch` into `space`: (where its table lies, buffers in it, bytes of the spec behind it).

        Raises `Full`, or whatever pickling the batch raises.
        """
        self._space = space
        spec = None
        shape_key = self._known_shape(batch)
        if shape_key is not None:
            spec = self._specs.get(shape_key)
        if spec is None:
            spec = self._pickle(batch)
            if shape_key is not None and len(self._table) == 2 * len(shape_key[2]):
                self._remember(shape_key, spec)
        table = self._table
        where = space.put(memoryview(struct.pack(f"<{len(table)}Q", *table) + spec))
        return where, len(table) // 2, len(spec)

    def _pickle(self, batch: object) -> bytes:
        try:
            return self._dump(pickle.Pickler, self._plain, batch)
        except (pickle.PicklingError, AttributeError, TypeError):
            return self._dump(cloudpickle.Pickler, self._cloud, batch)

    # Most batches are one tensor, or a flat list or dict of some, of the same shapes again and again. Their spec is
    # the same bytes each time, so it is pickled once: that is half of the cost of a small batch.

    def _known_shape(self, batch: object) -> tuple[Any, ...] | None:
        """What the spec of a flat batch depends on, if its bytes are placed already or fit; None for any other."""
        if type(batch) is not tuple or len(batch) != 2 or batch[0] is not None:
            return None
        content = batch[1]
        kind = type(content)
        keys = None
        if kind is torch.Tensor:
            leaves: Any = (content,)
        elif kind is list or kind is tuple:
            leaves = content
        elif kind is dict:
            leaves, keys = content.values(), tuple(content)
            if not all(type(key) is str for key in keys):
                return None
        else:
            return None
        shapes = []
        table: list[int] = []
        for leaf in leaves:
            if type(leaf) is not torch.Tensor or not _is_plain(leaf):
                return None
            code = _CODES.get(leaf.dtype)
            if code is None or not leaf.is_contiguous():
                return None
            shapes.append((code, *leaf.shape))
            table += self._place(leaf)
        self._table = table
        return kind, keys, tuple(shapes)

    def _place(self, tensor: torch.Tensor) -> tuple[int, int]:
        """(offset, size) of a contiguous tensor's bytes, which are copied unless they are in the slot already."""
        size = tensor.nbytes
        offset = self._space.lies_at(tensor.data_ptr(), size)
        if offset is None:
            offset = self._space.put(_buffer(tensor.numpy()).raw())
        return offset, size

    def _remember(self, shape_key: tuple[Any, ...], spec: bytes) -> None:
        if len(self._specs) >= _MOST_SPECS:
            self._specs.clear()
        self._specs[shape_key] = spec

    def _dump(self, pickler_class: Any, reducers: Any, batch: object) -> bytes:
        file = io.BytesIO()
        self._table = []
        pickler = pickler_class(file, protocol=5, buffer_callback=self._put)
        pickler.dispatch_table = reducers
        pickler.dump(batch)
        return file.getvalue()

    def _put(self, buffer: pickle.PickleBuffer) -> None:
        if buffer is not _IN_PLACE:  # that one's reducer has made the table entry
            raw = buffer.raw()
            self._table += (self._space.put(raw), raw.nbytes)

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if self._spawning and (tensor.device.type != "cpu" or _is_shared(tensor)):
            return self._shared[torch.Tensor](tensor)
        if not _is_plain(tensor):
            return tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        shape = tuple(tensor.shape)
        code = _CODES.get(tensor.dtype)
        if code is None:
            raw = _buffer(_bytes_of(tensor))
            return _odd_tensor, (raw, tensor.dtype, shape)
        if not tensor.is_contiguous():
            array = tensor.numpy()
            order = _order_of_dense(array)
            if order is not None:
                raw = _buffer(array.transpose(order))
                return _tensor, (raw, code, shape, array.strides)
            tensor = tensor.contiguous()
        offset = self._space.lies_at(tensor.data_ptr(), tensor.nbytes)
        if offset is not None:
            self._table += (offset, tensor.nbytes)
            return _tensor, (_IN_PLACE, code, shape)
        return _tensor, (_buffer(tensor.numpy()), code, shape)

    def _reduce_array(self, array: Any) -> Any:
        dtype = array.dtype
        if dtype.kind not in "biufcSU" or dtype.isbuiltin == 2:
            return array.__reduce_ex__(5)
        if not array.flags.writeable:
            array = array.copy()  # or it would arrive as one that cannot be written
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


def _order_of_dense(array: Any) -> tuple[int, ...] | None:
    """How to transpose an array that is dense but permuted (channels_last); None where its strides have gaps."""
    order = sorted(range(array.ndim), key=lambda d: -array.strides[d])
    return tuple(order) if array.transpose(order).flags.c_contiguous else None


def unpack(
    view: memoryview,
    where: int,
    buffers: int,
    spec_bytes: int,
    lend: Callable[[], memoryview | None],
) -> Any:
    """The batch whose bytes lie in `view`. `lend()` is asked once, if there is a leaf worth not copying."""
    table = struct.unpack_from(f"<{2 * buffers}Q", view, where)
    start = where + 16 * buffers
    return pickle.loads(view[start : start + spec_bytes], buffers=_leaves(view, table, lend))


def _leaves(view: memoryview, table: tuple[int, ...], lend: Callable[[], memoryview | None]) -> Iterator[Any]:
    shared: memoryview | None = None
    asked = False
    for i in range(0, len(table), 2):
        start, size = table[i], table[i + 1]
        if size >= SMALL and not asked:
            shared, asked = lend(), True
        if size >= SMALL and shared is not None:
            yield shared[start : start + size]
        else:
            yield bytearray(view[start : start + size])


def tensor_in(space: SlotSpace, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
    """A tensor in the slot, to be filled in place; None for a dtype without a numpy twin. Raises `Full`."""
    twin = _NUMPY_TWIN.get(dtype)
    size = math.prod(shape)
    if twin is None or not size:
        return None
    return torch.from_numpy(np.ndarray(shape, twin, space.reserve(size * twin.itemsize)))
