"""Every error that Holdfast raises by itself.

    HoldfastError
    ├── PolicyError      (ValueError)     a Policy was made with a value that makes no sense
    ├── WorkerLost       (RuntimeError)   a sample or batch ended its workers too often, or workers cannot live here
    ├── SampleError      (RuntimeError)   a sample raised what cannot be raised as itself in the trainer
    ├── CannotSend       (TypeError)      a batch holds something that cannot cross a process boundary
    ├── TooManyBad       (RuntimeError)   the circuit breaker: too large a share of the samples is bad
    ├── StreamBroken     (RuntimeError)   an iterable dataset cannot be continued where it broke
    ├── TaskLost         (BrokenProcessPool)   a task of a pool ended its worker, or never got to one whole
    ├── TaskTimeout      (TimeoutError)   a task of a pool took longer than its timeout, and was killed
    ├── PoolBroken       (BrokenProcessPool)   the workers of a pool cannot live here: all its tasks fail
    ├── FileShared       (RuntimeError)   forked workers would share an open file, and the policy forbids that
    ├── BatchTimeout     (RuntimeError, TimeoutError)   the loader's own `timeout` ran out
    ├── LoaderTorn       (RuntimeError)   an interrupt tore the loader's bookkeeping; make a new iterator
    ├── WrongProcess     (RuntimeError)   a forked child uses what belongs to its parent; make another one there
    ├── RankExited       (torch's ProcessExitedException)   spawn: a rank was killed, crashed or exited
    └── RankRaised       (torch's ProcessRaisedException)   spawn: a rank raised

A user's own exception is raised as itself; `RemoteTraceback` is then its cause and shows where in the worker it
came from. The type says what a caller can do, the text says why it happened. All fields are positional and are
passed to `super().__init__`, so that each error survives pickling. The last two are in launch/cause.py.
"""

import re
from concurrent.futures.process import BrokenProcessPool

# What a terminal obeys, instead of showing it: control characters (0x80 to 0x9f, too), what turns the direction of
# writing or cannot be seen, other ends of a line; and halves of characters, which cannot even be printed. Tabs and
# ends of lines stay, and what joins letters and emoji.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def legible(text: str) -> str:
    """Text of others for a terminal or a log: what would be obeyed is written as Python writes it, `\\x1b`."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class HoldfastError(Exception):
    """Base of all; `str()` is the whole message, first line first."""

    def __str__(self) -> str:
        return legible(str(self.args[0])) if self.args else ""


class PolicyError(HoldfastError, ValueError):
    """A Policy field has a value that is not accepted; the text lists those that are."""


class WorkerLost(HoldfastError, RuntimeError):
    """Workers died, and going on would not help: `index`, `worker`, `stage`, `stack` say where."""

    def __init__(
        self,
        message: str,
        index: object = None,
        worker: int | None = None,
        stage: str | None = None,
        stack: str | None = None,
    ) -> None:
        super().__init__(message, index, worker, stage, stack)
        self.index = index
        self.worker = worker
        self.stage = stage
        self.stack = stack


class SampleError(HoldfastError, RuntimeError):
    """Carries an exception that must not, or cannot, be raised as itself."""

    def __init__(self, message: str, index: object = None, worker: int | None = None) -> None:
        super().__init__(message, index, worker)
        self.index = index
        self.worker = worker


class CannotSend(HoldfastError, TypeError):
    """Something inside a batch cannot be pickled; `path` leads to it, `index` names its sample."""

    def __init__(self, message: str, index: object = None, path: str = "") -> None:
        super().__init__(message, index, path)
        self.index = index
        self.path = path


class TooManyBad(HoldfastError, RuntimeError):
    """More than `Policy.max_bad` of the samples seen were bad."""

    def __init__(self, message: str, bad: int = 0, seen: int = 0) -> None:
        super().__init__(message, bad, seen)
        self.bad = bad
        self.seen = seen


class StreamBroken(HoldfastError, RuntimeError):
    """A worker's stream of an iterable dataset ended in an error and cannot go on."""

    def __init__(self, message: str, worker: int | None = None, diverged: bool = False) -> None:
        """`diverged`: it gave other items when it was replayed."""
        super().__init__(message, worker, diverged)
        self.worker = worker
        self.diverged = diverged


class TaskLost(HoldfastError, BrokenProcessPool):
    """One task is lost, and the pool goes on: `task` is its number, `call` the function, `stack` where it was."""

    def __init__(
        self,
        message: str,
        task: int | None = None,
        call: str | None = None,
        worker: int | None = None,
        stack: str | None = None,
    ) -> None:
        super().__init__(message, task, call, worker, stack)
        self.task = task
        self.call = call
        self.worker = worker
        self.stack = stack


class TaskTimeout(HoldfastError, TimeoutError):
    """One task was killed for its timeout; fields as in TaskLost."""

    def __init__(
        self,
        message: str,
        task: int | None = None,
        call: str | None = None,
        worker: int | None = None,
        stack: str | None = None,
    ) -> None:
        super().__init__(message, task, call, worker, stack)
        self.task = task
        self.call = call
        self.worker = worker
        self.stack = stack


class PoolBroken(HoldfastError, BrokenProcessPool):
    """No worker of this pool comes up, or none stays: the text says why. Make another pool."""


class FileShared(HoldfastError, RuntimeError):
    """The dataset holds a file open that forked workers would share, and Policy(shared_files="error") forbids it."""


class BatchTimeout(HoldfastError, RuntimeError, TimeoutError):
    """No batch came within the loader's `timeout`. `worker` was still on the sample `index`, if that is known."""

    def __init__(self, message: str, index: object = None, worker: int | None = None) -> None:
        super().__init__(message, index, worker)
        self.index = index
        self.worker = worker


class LoaderTorn(HoldfastError, RuntimeError):
    """An exception from outside (Ctrl-C, a signal handler) hit in the middle of the bookkeeping, or in the sampler."""


class WrongProcess(HoldfastError, RuntimeError):
    """A forked child used an iterator, a pool or ranks that its parent made: they answer to that process alone."""


class RemoteTraceback(Exception):
    """The worker's traceback as text; the cause of an exception that is raised again in the trainer."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + legible(self.text)
