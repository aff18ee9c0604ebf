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
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from linecache import getline
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from holdfast.core.host import Reply, ReplyKind
from holdfast.errors import HoldfastError, RemoteTraceback, SampleError, legible
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


def what_raised(error: BaseException) -> str:
    """For what comes out of the trainer's own code: type, text, and the line of the user's, in one line."""
    text = text_of(error).partition("\n")[0]
    at = users_line(_traceback_of(error, Exception)).partition("\n")[0].strip()
    return f"{type(error).__name__}{f': {text}' if text else ''}{f', at {at}' if at else ''}"


def _traceback_of(error: BaseException, catch: type[BaseException]) -> str:
    """Without the frames through which it was called: they are ours or torch's, and the same each time."""
    try:
        whole = traceback.TracebackException.from_exception(error)
        _leave_out_callers(whole)
        return "".join(whole.format())
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


def told(error: BaseException, note: str, cause: RemoteTraceback | None) -> BaseException:
    """The exception, with what the trainer knows of it. Its class has no say in that: it may have attributes that
    cannot be set, or notes that are no list; the note then stands before the traceback.
    """
    note = legible(note)
    try:
        BaseException.add_note(error, note)
    except BaseException as worse:
        if raised_by_handler(worse):  # a Ctrl-C, say
            raise
        cause = RemoteTraceback(f"{note}\n{cause or ''}")
    return _with_cause(error, cause)


def _with_cause(error: BaseException, cause: RemoteTraceback | None) -> BaseException:
    vars(BaseException)["__cause__"].__set__(error, cause)
    return error


def to_raise(raised: Raised, where: str, index: object, worker: int, finding: str = "") -> BaseException:
    """The exception to raise in the trainer; `where` tells sample, stage and worker. Python prints the traceback first,
    and last what is said here: the user's own line, and the finding.
    """
    error = rebuild(raised)
    cause = RemoteTraceback(raised.traceback)
    ours = issubclass(type(error), HoldfastError)
    at = users_line(raised.traceback, of_libraries=not ours)
    said = "".join(f"\n{text}" for text in (at, finding) if text)
    if error is None:
        why = "its class cannot be sent to the trainer"
    elif not issubclass(type(error), Exception) or issubclass(type(error), StopIteration | StopAsyncIteration):
        why = "it would end the epoch, or the program, without a word if it were raised as itself"
    else:
        # Of what Holdfast raised by itself, its own frames tell nothing.
        return told(error, where + said, None if ours and not at else cause)
    text = f"{where} raised {raised.type_name}{f': {raised.text}' if raised.text else ''}"
    wrapped = SampleError(f"{text}\n  ({why}){said}", index, worker)
    wrapped.__cause__ = cause if error is None else _with_cause(error, cause)
    return wrapped


# Which line of the user's is it? A stack is Python's traceback, or a dump of faulthandler, which begins innermost.


_FRAME = re.compile(r'\s*(File "(.+)", line (\d+),? in .+)')
_HOLDFAST, _TORCH = f"{Path(__file__).parent}/", "/torch/"
_USED_AS_A_USER_WOULD = (f"{_HOLDFAST}testing/", f"{_HOLDFAST}cli/")
_LIBRARIES_AT = re.compile(rf"/(site|dist)-packages/|{re.escape(str(Path(os.__file__).parent))}/|<frozen ")


def _is_ours(file: str) -> bool:
    return file.startswith(_HOLDFAST) and not file.startswith(_USED_AS_A_USER_WOULD)


def _leave_out_callers(error: traceback.TracebackException) -> None:
    """Down to the user's first frame, here and in what it comes from; one frame stays in any case."""
    todo, seen = [error], set()
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        callers = [_is_ours(frame.filename) or _TORCH in frame.filename for frame in each.stack]
        del each.stack[: ([*callers, False].index(False) if not all(callers) else len(callers) - 1)]
        if each.__context__ is not None and all(_is_ours(frame.filename) for frame in each.__context__.stack):
            each.__context__ = None  # we had tried it in another way
        todo += [other for other in (each.__cause__, each.__context__) if other is not None]


def without_ours(stack: str) -> str:
    """A dump, with the user's frames and those of libraries."""
    return "\n".join(line for line in stack.splitlines() if not ((frame := _FRAME.match(line)) and _is_ours(frame[2])))


def users_line(stack: str, of_libraries: bool = True) -> str:
    """The innermost line that is the user's own, as Python shows it, on two lines; else that of a library; or ""."""
    dump = "(most recent call first)" in stack
    lines = (stack.rpartition("Current thread")[2] if dump else stack).splitlines()
    frames = [(below, frame) for below, line in enumerate(lines, 1) if (frame := _FRAME.match(line))]
    others = [each for each in (frames if dump else reversed(frames)) if not _is_ours(each[1][2])]
    own = [each for each in others if not _LIBRARIES_AT.search(each[1][2])]
    for below, frame in own or (others if of_libraries else []):
        there = not dump and below < len(lines) and lines[below].startswith("    ")
        text = (lines[below] if there else getline(frame[2], int(frame[3]))).strip()
        return f"  {frame[1]}" + (f"\n    {text}" if text else "")
    return ""


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
