"""Exceptions of the user's that raise when they are asked anything, and those that no `except Exception` catches."""

import threading

from torch.utils.data import Dataset


class Worse(Exception):
    """What the objects here raise when they are asked."""


class Beyond(BaseException):
    """The same, past every `except Exception`."""


def refuse(*args, **kwargs):
    raise Worse("asked")


def exit_(*args, **kwargs):
    raise Beyond("asked")


class BadStr(ValueError):
    __str__ = refuse


class BadStrBeyond(ValueError):
    __str__ = exit_


class BadRepr(ValueError):
    __repr__ = refuse


class BadReduce(ValueError):
    __reduce_ex__ = __reduce__ = refuse


class BadReduceBeyond(ValueError):
    __reduce_ex__ = __reduce__ = exit_


class BadLoad(ValueError):
    def __reduce__(self):
        return exit_, ()


class BadArgs(ValueError):
    args = property(refuse)


class BadAttributes(ValueError):
    __dict__ = property(exit_)


class BadCause(ValueError):
    __cause__ = property(refuse)


class BadContext(ValueError):
    __context__ = property(exit_)


class BadNotes(ValueError):
    __notes__ = property(refuse)


class BadNotesBeyond(ValueError):
    __notes__ = property(exit_)


class BadAddNote(ValueError):
    add_note = exit_


class BadSetattr(ValueError):
    __setattr__ = refuse


class BadGetattribute(ValueError):
    def __getattribute__(self, name):
        raise Worse(name)


class BadClass(ValueError):
    __class__ = property(refuse)


class OddText(str):
    __reduce_ex__ = __reduce__ = refuse


class OddStr(ValueError):
    def __str__(self):
        return OddText("odd")


class BadFilename(OSError):
    filename = property(refuse)


class BadErrno(OSError):
    errno = property(exit_)


class BadEqual(ValueError):
    __eq__ = __hash__ = __bool__ = refuse


class WantsMore(ValueError):
    def __init__(self, one, two):
        super().__init__(one)


class Sulks:
    """An argument of an exception."""

    __repr__ = __str__ = refuse
    __reduce_ex__ = __reduce__ = exit_


def notes_are_no_list():
    error = ValueError("odd")
    error.__notes__ = 5
    return error


def caused():
    error = ValueError("odd")
    error.__cause__ = BadGetattribute("odd")
    return error


ERRORS = {
    **{
        kind.__name__: (lambda kind=kind: kind("odd"))
        for kind in ValueError.__subclasses__()
        if kind.__module__ == __name__ and kind is not WantsMore
    },
    "BadFilename": lambda: BadFilename(2, "odd", "name"),
    "BadErrno": lambda: BadErrno(2, "odd"),
    "WantsMore": lambda: WantsMore(1, 2),
    "argument": lambda: ValueError(Sulks(), 1),
    "lock": lambda: ValueError(threading.Lock()),
    "errno is no number": lambda: OSError(threading.Lock(), "odd"),
    "syntax error": lambda: SyntaxError("odd", (Sulks(), "line", Sulks(), 5)),
    "notes are no list": notes_are_no_list,
    "caused by one": caused,
    "group": lambda: ExceptionGroup("odd", [BadStr("odd"), BadNotes("odd")]),
    "large": lambda: ValueError("x" * (8 << 20)),
    "stop": lambda: StopAsyncIteration(Sulks()),
}

PAST_EXCEPTION = {
    "BadStrBeyond",
    "BadReduceBeyond",
    "BadLoad",
    "BadAttributes",
    "BadNotesBeyond",
    "BadContext",
    "BadErrno",
    "argument",
    "stop",
    "syntax error",
}

LENGTH, BAD = 8, 3


class Samples(Dataset):
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        if index == BAD:
            raise ERRORS[self.error]()
        return index


def outcomes(loader):
    """Each batch as a list, or the type of what it raised; no worker has ended."""
    batches = iter(loader)
    found = []
    for _ in range(2 * LENGTH):
        try:
            found.append(next(batches).tolist())
        except StopIteration:
            break
        except BaseException as error:
            found.append(type(error))
    assert loader.stats()["restarts"] == 0
    return found


def raises(error):
    raise ERRORS[error]()
