"""What we call of CUDA's driver, and torch does not offer.

The driver is called directly, not through the CUDA runtime: an error of the runtime stays behind, and torch's next
check would find it. Who may call when, and why, is in loader/cuda_slots.py.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# CUDA's numbers.
_SUCCESS = 0
_PORTABLE = 1  # for every device
_NO_TIMING = 2
_RELAXED = 2
# Streams in torch's pool.
_POOL = 32

Mark = tuple[int, int]  # a context, and an event in it


class Driver:
    """libcuda, as far as it is called here. Raises OSError or AttributeError where it is missing or before 12.5."""

    def __init__(self) -> None:
        quick, slow = ctypes.PyDLL("libcuda.so.1"), ctypes.CDLL("libcuda.so.1")  # `slow`: without the GIL
        handle, number = ctypes.c_void_p, ctypes.c_int
        self._record = _declared(quick.cuCtxRecordEvent, handle, handle)
        self._query = _declared(quick.cuEventQuery, handle)
        self._create = _declared(quick.cuEventCreate, ctypes.POINTER(handle), ctypes.c_uint)
        self._push = _declared(quick.cuCtxPushCurrent_v2, handle)
        self._pop = _declared(quick.cuCtxPopCurrent_v2, ctypes.POINTER(handle))
        self._retain = _declared(slow.cuDevicePrimaryCtxRetain, ctypes.POINTER(handle), number)
        self._state = _declared(
            quick.cuDevicePrimaryCtxGetState, number, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(number)
        )
        self._register = _declared(slow.cuMemHostRegister_v2, handle, ctypes.c_size_t, ctypes.c_uint)
        self._unregister = _declared(slow.cuMemHostUnregister, handle)
        self._exchange = _declared(quick.cuThreadExchangeStreamCaptureMode, ctypes.POINTER(number))
        self._capturing = _declared(quick.cuStreamIsCapturing, handle, ctypes.POINTER(number))
        self._name = _declared(quick.cuGetErrorName, number, ctypes.POINTER(ctypes.c_char_p))
        self._contexts: dict[int, int] = {}  # device -> its primary context
        self._pools: dict[int, set[int]] = {}  # device -> streams
        self._spare: dict[int, list[int]] = {}  # context -> events that have passed

    def capturing(self) -> bool:
        """True while a graph is being captured: in this thread, or by `torch.cuda.graph` in any."""
        if torch.cuda.is_current_stream_capturing():
            return True
        stream = torch.cuda.graph.default_capture_stream
        return stream is not None and self._is_capturing(stream.cuda_stream)

    def _is_capturing(self, stream: int) -> bool:
        status = ctypes.c_int()
        return bool(self._capturing(stream, status) == _SUCCESS and status.value)

    def _pool(self) -> set[int]:
        """torch's streams of usual priority: it has so many, and hands them out in turns."""
        device = torch.cuda.current_device()
        if device not in self._pools:
            self._pools[device] = {torch.cuda.Stream(device).cuda_stream for _ in range(_POOL)}  # type: ignore[no-untyped-call]
        return self._pools[device]

    def mark(self) -> list[Mark] | None:
        """An event in each context behind all that its streams were given so far; None where that is refused.

        Of all calls this one spoils a capture in another thread whatever we do; so it is not made during one.
        """
        if threading.active_count() > 1 and any(self._is_capturing(stream) for stream in self._pool()):
            return None
        marks: list[Mark] = []
        for context in self._active():
            with self._inside(context):
                event = self._event(context)
                if event is None or self._record(context, event) != _SUCCESS:
                    return None
            marks.append((context, event))
        return marks

    def passed(self, mark: Mark) -> bool:
        """True once the device is past it; not to be asked again after that."""
        context, event = mark
        with self._inside(context):
            if self._query(event) != _SUCCESS:
                return False
        self._spare[context].append(event)
        return True

    def register(self, address: int, size: int) -> str:
        """Empty, or why not."""
        with self._inside(self._context(torch.cuda.current_device())):
            return self._words(self._register(address, size, _PORTABLE))

    def unregister(self, address: int) -> str:
        """Empty, or why not."""
        with self._inside(self._context(torch.cuda.current_device())):
            return self._words(self._unregister(address))

    def _event(self, context: int) -> int | None:
        spare = self._spare.setdefault(context, [])
        if spare:
            return spare.pop()
        event = ctypes.c_void_p()
        return event.value if self._create(event, _NO_TIMING) == _SUCCESS else None

    def _active(self) -> list[int]:
        """The contexts of all devices in use: a batch may be copied to any of them."""
        flags, active = ctypes.c_uint(), ctypes.c_int()
        found = []
        for device in range(torch.cuda.device_count()):
            if self._state(device, flags, active) == _SUCCESS and active.value:
                found.append(self._context(device))
        return found

    def _context(self, device: int) -> int:
        context = self._contexts.get(device)
        if context is None:
            handle = ctypes.c_void_p()
            failed = self._words(self._retain(handle, device))
            if failed or handle.value is None:
                raise RuntimeError(f"CUDA gives no context for device {device}: {failed}")
            context = self._contexts[device] = handle.value
        return context

    def relaxed(self) -> "Relaxed":
        """What asks or registers inside does not spoil a capture that some other thread has begun."""
        return Relaxed(self._exchange)

    @contextmanager
    def _inside(self, context: int) -> Iterator[None]:
        try:
            self._push(context)  # inside: a signal handler may raise right after it
            yield
        finally:
            self._pop(ctypes.c_void_p())

    def _words(self, code: int) -> str:
        if code == _SUCCESS:
            return ""
        name = ctypes.c_char_p()
        self._name(code, name)
        return f"{(name.value or b'an error that it does not name').decode()} ({code})"


class Relaxed:
    """Of this thread: CUDA's `relaxed` mode for captures. A class, because a generator takes longer than the calls."""

    __slots__ = ("_exchange", "_mode")

    def __init__(self, exchange: Callable[..., int]) -> None:
        self._exchange = exchange
        self._mode = ctypes.c_int(_RELAXED)

    def __enter__(self) -> None:
        self._exchange(self._mode)

    def __exit__(self, *error: object) -> None:
        self._exchange(self._mode)


def _declared(function: Callable[..., int], *arguments: type) -> Callable[..., int]:
    function.argtypes = arguments  # type: ignore[attr-defined]
    function.restype = ctypes.c_int  # type: ignore[attr-defined]
    return function
