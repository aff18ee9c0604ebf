"""Exceptions on their way from a worker to the trainer, where they are raised as themselves.

`capture` runs in the worker, while the exception is handled; the `Raised` it makes is plain data. `rebuild` runs in
the trainer. An exception that pickles keeps its type, args, attributes and notes. One that does not is built from its
parts; if its class cannot be found in the trainer either, it arrives as a SampleError with its text.

What is not an Exception (KeyboardInterrupt, SystemExit, GeneratorExit), and StopIteration, must not be raised as
itself: it would end the epoch silently, or the trainer with status 0. It becomes the cause of a SampleError.
"""

import pickle
import traceback
from dataclasses import dataclass

import cloudpickle

from holdfast.errors import RemoteTraceback, SampleError
from holdfast.local.evidence import facts_of
from holdfast.local.handlers import raised_by_handler
from holdfast.local.transforms import transform_in


@dataclass(frozen=True, slots=True)
class Raised:
    """One exception as plain data."""

    type_name: str
    text: str
    traceback: str
    pickled: bytes | None
    parts: bytes | None
    errno: int = 0
    facts: tuple[str, ...] = ()
    """What was seen around it: descriptors, limits, free space."""
    transform: str = ""
    """The dataset's transform that it came out of, if it came out of one."""


def capture(error: BaseException, facts: tuple[str, ...] = ()) -> Raised:
    """Which process: the worker, in the except clause. `facts`: what its user knows of it."""
    return Raised(
        type_name=type(error).__name__,
        text=_text_of(error),
        traceback="".join(traceback.format_exception(error)),
        pickled=_pickled(error),
        parts=_parts(error),
        errno=(error.errno or 0) if isinstance(error, OSError) else 0,
        facts=(*facts, *facts_of(error)),
        transform=transform_in(error.__traceback__),
    )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as worse:
        return f"<its __str__ raised {type(worse).__name__}>"


def _pickled(error: BaseException) -> bytes | None:
    """The pickle, if it comes out as what went in."""
    for dumps in (pickle.dumps, cloudpickle.dumps):
        try:
            data: bytes = dumps(error)
            again = pickle.loads(data)
        except Exception:
            continue  # the next way; with none left, the parts travel
        if type(again) is type(error) and _text_of(again) == _text_of(error):
            return data
    return None


def _parts(error: BaseException) -> bytes | None:
    """Class, args and attributes, each as far as it pickles: __init__ is not called again."""
    attributes = {k: v for k, v in vars(error).items() if _can_pickle(v)}
    args = tuple(a if _can_pickle(a) else repr(a) for a in error.args)
    try:
        data: bytes = cloudpickle.dumps((type(error), args, attributes))
        pickle.loads(data)
    except Exception:
        return None  # a class that cannot be sent; its text goes
    return data


def _can_pickle(value: object) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def rebuild(raised: Raised) -> BaseException | None:
    """Which process: the trainer. The exception, or None when its class does not exist here."""
    try:
        if raised.pickled is not None:
            error = pickle.loads(raised.pickled)
            return error if isinstance(error, BaseException) else None
        if raised.parts is not None:
            kind, args, attributes = pickle.loads(raised.parts)
            error = kind.__new__(kind, *args)
            error.args = args
            error.__dict__.update(attributes)
            return error if isinstance(error, BaseException) else None
    except Exception as error:
        if raised_by_handler(error):
            raise
        return None  # said so in the SampleError that is raised instead
    return None


def to_raise(raised: Raised, where: str, index: object, worker: int) -> BaseException:
    """The exception to raise in the trainer; `where` tells sample, stage and worker."""
    error = rebuild(raised)
    cause = RemoteTraceback(raised.traceback)
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        error.add_note(where)
        error.__cause__ = cause
        return error
    why = (
        "it would end the epoch, or the program, without a word if it were raised as itself"
        if error is not None
        else "its class cannot be sent to the trainer"
    )
    wrapped = SampleError(
        f"{where} raised {raised.type_name}: {raised.text}\n  ({why})\n{raised.traceback}",
        index,
        worker,
    )
    wrapped.__cause__ = error if error is not None else cause
    return wrapped
