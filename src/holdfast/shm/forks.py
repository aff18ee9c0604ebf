"""What happens when the trainer forks while loaders, pools or ranks are open.

A child cannot use them. It must not keep our descriptors, or workers would never see the end of their pipes. It must
not end our workers, nor write into the pages that it shares with them. And the batches that the user had at the fork
must stay as they were. So the child closes everything that is open, before anything else runs there. If the child uses
it later, it gets `WrongProcess`.

`os.register_at_fork` passes no arguments, so this module holds the package's only state at module level: what is open.
Any thread may fork while the others are in the middle of something. So nothing here relies on what they have finished.
"""

import os
import threading
import weakref
from collections.abc import Iterable
from typing import Protocol, TypeVar

from holdfast.errors import WrongProcess
from holdfast.shm.slots import ForkGuard, Slots

T = TypeVar("T")


class Forkable(Protocol):
    """What everything that is open must be able to do in a forked child."""

    def close_in_child(self) -> None:
        """The child has its own descriptors and shares all else. Another thread may be anywhere in this object."""


class _Fork:
    """A fork that is under way."""

    def __init__(self, guard: ForkGuard | None) -> None:
        self.guard = guard
        self.done = False  # in the parent


# (Plain sets: a copy is one step. A WeakSet is copied in Python, step by step, and other threads add to it meanwhile.)
_open: "set[weakref.ref[Forkable]]" = set()
_slots: "set[weakref.ref[Slots]]" = set()  # also of hosts that are closed: users keep batches
_guards: dict[int, list[_Fork]] = {}  # by thread, between `before` and `after` of its forks
_hooked: list[bool] = []
# A signal handler has raised in `before` and cut it short.
_NONE = [_Fork(None)]


def watch(opened: Forkable) -> None:
    """From now on, forks call it."""
    if not _hooked:
        _hooked.append(True)
        os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
        # If a signal handler raises in the first one, Python ends that one and goes on with the next.
        os.register_at_fork(after_in_parent=_surely_in_parent)
    _open.add(weakref.ref(opened, _open.discard))


def watch_slots(slots: Slots) -> None:
    """From now on, forked children see the lent slots of these unchanged."""
    _slots.add(weakref.ref(slots, _slots.discard))


def forget(opened: Forkable) -> None:
    """It is closed: forks need not call it any more."""
    _open.discard(weakref.ref(opened))


def wrong_process(what: str, owner: int, instead: str) -> WrongProcess:
    """The error for a child that uses what it inherited. `instead`: what to do."""
    return WrongProcess(
        f"this {what} belongs to process {owner}: process {os.getpid()} inherited it by a fork and cannot use it\n"
        f"    why    its workers and their memory answer to the process that made it, which may be using them now\n"
        f"    try    {instead}"
    )


def _living(refs: "Iterable[weakref.ref[T]]") -> list[T]:
    return [here for ref in list(refs) if (here := ref()) is not None]


def _before() -> None:
    forks = _guards.setdefault(threading.get_ident(), [])
    while forks and forks[-1].done:  # nobody can have removed it
        forks.pop()
    slots = _living(_slots)
    guard = ForkGuard() if slots else None
    forks.append(_Fork(guard))
    if guard is not None:
        for each in slots:
            each.guard(guard)


def _in_parent() -> None:
    fork = (_guards.get(threading.get_ident()) or _NONE)[-1]
    if fork.done:
        return
    if fork.guard is not None:
        for slots in _living(_slots):
            slots.guarded(fork.guard)
        fork.guard.in_parent()
    fork.done = True


def _surely_in_parent() -> None:
    _in_parent()
    forks = _guards.get(threading.get_ident(), [])
    if forks:
        forks.pop()
    if not forks:
        _guards.pop(threading.get_ident(), None)


def _in_child() -> None:
    guard = (_guards.get(threading.get_ident()) or _NONE)[-1].guard
    if guard is not None:
        guard.in_child()
    _guards.clear()  # of threads that do not exist in the child
    for slots in _living(_slots):
        slots.disarm()
    opened = _living(_open)
    _open.clear()
    troubles = []
    for each in opened:
        try:
            each.close_in_child()
        except Exception as trouble:  # the others are closed all the same
            troubles.append(trouble)
    if troubles:
        raise troubles[0]
