"""InterruptibleNext: `__next__` of both iterators, and what an exception leaves behind that nobody here raised.

A signal handler may raise wherever Python looks for signals: at the start of a function, after a call, at the end of a
loop's round. What it raises leaves next() out of any line, also when a batch is in our hands, or an index. So next()
knows three cases:

    it comes to its end      with a batch, or with an error that is meant: those travel as values up to `__next__`
    it waits (`_again`)      nothing is half done: the next call begins anew, and gives the very batch that was due
    all else                 the iterator is torn, and every later call says so

Between the last statements of `__next__` nothing is called. Python does not look for signals there, nor when a Python
function returns: whoever gets no exception has the batch.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from holdfast.errors import LoaderTorn
from holdfast.loader.device import Unpacked


class InterruptibleNext:
    """In front of torch's iterator. `_next_batch` gives the batch, or what is to be raised; None at the end."""

    _dataset: Any
    _num_yielded: int
    _profile_name: str
    _IterableDataset_len_called: Any
    _inside = False  # from the beginning of a call to its end; for ever in a torn one
    _torn = False
    _again = False
    _profiled: Callable[[], bool] = staticmethod(torch.autograd._profiler_enabled)  # type: ignore[attr-defined]

    def _next_batch(self) -> Unpacked | None:
        raise NotImplementedError

    def __next__(self) -> Any:
        if self._inside:
            raise self._refusal()
        self._inside = True
        try:
            if self._profiled():
                with torch.autograd.profiler.record_function(self._profile_name):
                    unpacked = self._next_batch()
            else:
                unpacked = self._next_batch()
        except BaseException:
            self._torn = True
            if self._repeatable():
                self._torn = self._inside = False
            raise
        self._inside = False
        if unpacked is None:
            raise StopIteration
        if unpacked.error is not None:
            try:
                raise unpacked.error
            finally:
                del unpacked  # or the error would hold on to itself, and to this iterator
        return unpacked.batch

    def _repeatable(self) -> bool:
        """True where nothing was half done."""
        again, self._again = self._again, False
        return again

    def _refusal(self) -> RuntimeError:
        if not self._torn:
            return RuntimeError("next() of this iterator runs already: in another thread, or below a signal handler")
        return LoaderTorn(
            "an exception from outside (Ctrl-C, a signal handler that raised) left this loader in the middle of its "
            "bookkeeping, or passed through its sampler\n    try    make a new iterator: iter(loader)"
        )

    def _warn_of_length(self) -> None:
        if self._num_yielded <= (self._IterableDataset_len_called or 0):
            return
        warnings.warn(
            f"Length of IterableDataset {self._dataset} was reported to be {self._IterableDataset_len_called}"
            f"(when accessing len(dataloader)), but {self._num_yielded} samples have been fetched. "
            "For multiprocessing data-loading, this could be caused by not properly configuring the "
            "IterableDataset replica at each worker. Please see "
            "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples.",
            stacklevel=4,
        )
