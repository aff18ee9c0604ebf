"""Exceptions on their way from a worker to the trainer, where they are raised as themselves.

`capture` runs in the worker, while the exception is handled; the `Raised` it makes is plain data. `rebuild` runs in
the trainer. An exception that pickles keeps its type, args, attributes and notes. One that does not is built from its
parts; if its class cannot be found in the trainer either, it arrives as a SampleError with its text.

What is not an Exception (KeyboardInterrupt, SystemExit, GeneratorExit), and StopIteration, must not be raised as
itself: it would end the epoch silently, or the trainer with status 0. It becomes the cause of a SampleError.
"""

import functools
import inspect
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from holdfast.core.host import Reply, ReplyKind
from holdfast.errors import RemoteTraceback, SampleError, legible
from holdfast.shm import main_module
from holdfast.shm.memory_file import new_file
from holdfast.system.evidence import Facts, Sign, error_number, facts_of
from holdfast.system.signal_origin import raised_by_handler

if TYPE_CHECKING:
    from holdfast.shm.pack import Packer
    from holdfast.shm.slot_writer import SlotSpace

T = TypeVar("T")
# Letters of a text, and of a traceback, that fit the smallest slot many times.
_BRIEF = 20_000
_FACTS = 8
_NO_FACTS = Facts()


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
    """What was seen around it, for people: descriptors, limits, free space."""
    signs: frozenset[Sign] = frozenset()
    """The same for the rules."""
    transform: str = ""
    """The dataset's transform that it came out of, if it came out of one."""

    def brief(self) -> "Raised":
        """Without the exception itself, for where there is no room for it. A file's name may be long, or a class's."""
        return replace(
            self,
            type_name=self.type_name[:_BRIEF],
            text=self.text[:_BRIEF],
            traceback=self.traceback[-_BRIEF:],
            pickled=None,
            parts=None,
            facts=tuple(fact[:_BRIEF] for fact in self.facts[:_FACTS]),
            transform=self.transform[:_BRIEF],
        )


def capture(error: BaseException, known: Facts = _NO_FACTS, catch: type[BaseException] = BaseException) -> Raised:
    """Which process: the worker, in the except clause. `known`: what its user knows of it.

    An exception is an object of the user's: whatever it is asked may raise. `catch`: what is caught then; in the
    trainer a Ctrl-C is not.
    """
    seen = _asked(lambda: facts_of(error), _NO_FACTS, catch)
    return Raised(
        type_name=_asked(lambda: _plain(type(error).__name__), "an exception", catch),
        text=text_of(error, catch),
        traceback=_traceback_of(error, catch),
        pickled=_pickled(error, catch),
        parts=_asked(lambda: _parts(error, catch), None, catch),
        errno=_asked(lambda: error_number(error), 0, catch),
        facts=known.texts + seen.texts,
        signs=known.signs | seen.signs,
        transform=_asked(lambda: transform_in(error.__traceback__), "", catch),
    )


def _asked(question: Callable[[], T], otherwise: T, catch: type[BaseException]) -> T:
    """The answer; `otherwise` where user code raises on the way to it."""
    try:
        return question()
    except catch:
        return otherwise


def _plain(text: str) -> str:
    """A str and no subclass of it, which might not pickle."""
    return "".join([text])


def text_of(error: BaseException, catch: type[BaseException] = Exception) -> str:
    """str(error), whatever its class makes of that."""
    try:
        return _plain(str(error))
    except catch as worse:
        return f"<its __str__ raised {type(worse).__name__}>"


def shown(value: object) -> str:
    """repr(value), whatever its class makes of that: an index may be any object."""
    try:
        return _plain(repr(value))
    except Exception as worse:
        return f"<a {type(value).__name__}, whose __repr__ raised {type(worse).__name__}>"


def _traceback_of(error: BaseException, catch: type[BaseException]) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except catch:  # user code: properties of it, or of what it comes from
        trace = vars(BaseException)["__traceback__"].__get__(error)
        lines = _asked(lambda: "".join(traceback.format_tb(trace)), "", catch)
        return f"Traceback (most recent call last):\n{lines}{type(error).__name__}: {text_of(error, catch)}\n"


def _pickled(error: BaseException, catch: type[BaseException]) -> bytes | None:
    """The pickle, if it comes out as what went in."""
    for dumps in (pickle.dumps, main_module.dumps):
        try:
            data = dumps(error)
            again = pickle.loads(data)
        except catch:
            continue  # the next way; with none left, the parts travel
        if type(again) is type(error) and text_of(again, catch) == text_of(error, catch):
            return data
    return None


def _parts(error: BaseException, catch: type[BaseException]) -> bytes | None:
    """Class, args and attributes, each as far as it pickles: __init__ is not called again."""
    attributes = {k: v for k, v in vars(error).items() if _can_pickle(v, catch)}
    args = tuple(a if _can_pickle(a, catch) else _asked(partial(repr, a), type(a).__name__, catch) for a in error.args)
    try:
        data = main_module.dumps((type(error), args, attributes))
        pickle.loads(data)
    except catch:
        return None  # a class that cannot be sent; its text goes
    return data


def _can_pickle(value: object, catch: type[BaseException]) -> bool:
    try:
        main_module.dumps(value)
    except catch:
        return False
    return True


def rebuild(raised: Raised) -> BaseException | None:
    """Which process: the trainer. The exception, or None when its class does not exist here."""
    try:
        return _rebuilt(raised)
    except BaseException as error:
        if raised_by_handler(error):  # a Ctrl-C, say
            raise
        return None  # said so in the SampleError that is raised instead


def _rebuilt(raised: Raised) -> BaseException | None:
    if raised.pickled is not None:
        error = pickle.loads(raised.pickled)
        return error if isinstance(error, BaseException) else None
    if raised.parts is not None:
        kind, args, attributes = pickle.loads(raised.parts)
        error = kind.__new__(kind, *args)
        error.args = args
        error.__dict__.update(attributes)
        return error if isinstance(error, BaseException) else None
    return None


def told(error: BaseException, note: str, cause: RemoteTraceback) -> BaseException:
    """The exception, with what the trainer knows of it. Its class has no say in that: it may have attributes that
    cannot be set, or notes that are no list; the note then stands before the traceback.
    """
    note = legible(note)
    try:
        BaseException.add_note(error, note)
    except BaseException as worse:
        if raised_by_handler(worse):  # a Ctrl-C, say
            raise
        cause = RemoteTraceback(f"{note}\n{cause}")
    vars(BaseException)["__cause__"].__set__(error, cause)
    return error


def to_raise(raised: Raised, where: str, index: object, worker: int) -> BaseException:
    """The exception to raise in the trainer; `where` tells sample, stage and worker."""
    error = rebuild(raised)
    cause = RemoteTraceback(raised.traceback)
    if error is None:
        why = "its class cannot be sent to the trainer"
    elif not issubclass(type(error), Exception) or issubclass(type(error), StopIteration | StopAsyncIteration):
        why = "it would end the epoch, or the program, without a word if it were raised as itself"
    else:
        return told(error, where, cause)
    wrapped = SampleError(
        f"{where} raised {raised.type_name}: {raised.text}\n  ({why})\n{raised.traceback}",
        index,
        worker,
    )
    wrapped.__cause__ = error if error is not None else cause
    return wrapped


# Was it a transform that raised? The frames of a traceback know: below a dataset whose `transform` was called.
#
# Which process: the one that raised, while the exception is handled; later the frames are gone.


# Where torchvision's datasets, and those written after them, keep what is applied to a sample.
_ATTRIBUTES = ("transform", "target_transform", "transforms")
_LIBRARIES = (
    "torchvision.transforms",
    "albumentations",
    "kornia.augmentation",
    "monai.transforms",
    "torchio.transforms",
)
# A Compose holds those that it applies in one of these.
_PARTS = ("transforms", "transform", "fn", "lambd", "func")
_DEEP = 4


def transform_in(trace: TracebackType | None) -> str:
    """The transform that an exception came out of, innermost: "Compose > Resize"; "" when it came out of none."""
    known: dict[int, Any] = {}  # callables by id; and code objects, which a function's frames have
    path: list[str] = []
    for frame in _frames(trace):
        found = _callable_of(frame, known)
        if found:
            path = [*path, found] if path[-1:] != [found] else path
        elif path:
            continue  # what a transform calls, or is called through
        owner = _owner(frame)
        for name in _ATTRIBUTES:
            applied = _attribute(owner, name)
            if callable(applied):
                _learn(applied, known, _DEEP)
    return " > ".join(path)


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _owner(frame: FrameType) -> Any:
    """The object whose method a frame is; None for a function."""
    code = frame.f_code
    return frame.f_locals.get("self") if code.co_varnames[:1] == ("self",) else None


def _callable_of(frame: FrameType, known: dict[int, Any]) -> str:
    """The name of the transform whose own frame this is."""
    owner = _owner(frame)
    if id(frame.f_code) in known:
        return frame.f_code.co_name
    if owner is not None and known.get(id(owner)) is owner:
        return type(owner).__name__
    if str(frame.f_globals.get("__name__", "")).startswith(_LIBRARIES):
        return type(owner).__name__ if owner is not None and not isinstance(owner, type) else frame.f_code.co_name
    return ""


def _learn(applied: Any, known: dict[int, Any], deep: int) -> None:
    """A transform, and those inside it."""
    if deep == 0 or id(applied) in known:
        return
    while isinstance(applied, functools.partial):
        applied = applied.func
    code = getattr(getattr(applied, "__func__", applied), "__code__", None)
    if code is not None:
        known[id(code)] = code
        return
    known[id(applied)] = applied
    for name in _PARTS:
        inner = _attribute(applied, name)
        for part in inner if isinstance(inner, list | tuple) else [inner]:
            if callable(part):
                _learn(part, known, deep - 1)


def _attribute(owner: Any, name: str) -> Any:
    """Without running user code: a property may do anything."""
    return inspect.getattr_static(owner, name, None)


# Sending -------------------------------------------------------------------------------------------------------------


class Failing(Protocol):
    """How a task failed."""

    def brief(self) -> object:
        """What always finds room in a slot, and always pickles."""


def error_reply(packer: "Packer", failure: Failing, space: "SlotSpace", bad: int = 0, mark: int = 0) -> Reply:
    """Which process: the worker. A task ends in this: in the slot, or in a file of its own if that is too small."""
    from holdfast.shm.slot_writer import Full  # here: it needs torch, and commands that only read do not wait for it

    try:
        return Reply(ReplyKind.ERROR, *packer.pack(failure, space), bad, mark=mark)
    except Full:
        reply = _error_in_file(packer, failure)
    except BaseException:  # user code: an index that pickles no more
        reply = None
    if reply is None:
        space.clear()
        reply = Reply(ReplyKind.ERROR, *packer.pack(failure.brief(), space))
    return reply._replace(bad=bad, mark=mark)


def _error_in_file(packer: "Packer", failure: Failing) -> Reply | None:
    """None where the system refuses the file."""
    from holdfast.shm.slot_writer import FileSpace

    fd = -1
    try:
        fd = new_file("error", 0)
        return Reply(ReplyKind.ERROR_IN_FILE, *packer.pack(failure, FileSpace(fd)), file=fd)
    except OSError:
        if fd >= 0:
            os.close(fd)
        return None
