"""What happens when the trainer forks while loaders are open.

The child must not keep our descriptors (workers would never see the end of their pipes), must not end our workers,
and must go on seeing the batches that were out at that moment as they were. `os.register_at_fork` knows no context,
so this module holds the one piece of state that the package has at module level: which hosts are open.
"""

import os
import weakref
from typing import Protocol

from holdfast.shm.slots import ForkGuard, Slots


class Forkable(Protocol):
    """What an open host must do in a forked child."""

    def close_in_child(self) -> None: ...


_open_hosts: "weakref.WeakSet[Forkable]" = weakref.WeakSet()
_slots: "weakref.WeakSet[Slots]" = weakref.WeakSet()  # also of hosts that are closed: users keep batches
_guards: list[ForkGuard] = []  # between `before` and `after` of one fork
_hooked: list[bool] = []


def watch(host: Forkable) -> None:
    """From now on the host is told of forks."""
    if not _hooked:
        _hooked.append(True)
        os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
    _open_hosts.add(host)


def watch_slots(slots: Slots) -> None:
    """From now on, what is lent of these stays as it is for a forked child."""
    _slots.add(slots)


def forget(host: Forkable) -> None:
    """The host is closed."""
    _open_hosts.discard(host)


def _before() -> None:
    lent = [slots for slots in list(_slots) if slots.lent]
    if lent:
        guard = ForkGuard()
        _guards.append(guard)
        for slots in lent:
            slots.guard(guard)


def _in_parent() -> None:
    while _guards:
        _guards.pop().in_parent()


def _in_child() -> None:
    while _guards:
        _guards.pop().in_child()
    for slots in list(_slots):
        slots.disarm()
    for host in list(_open_hosts):
        host.close_in_child()
    _open_hosts.clear()
