"""Arguments of ours as public attributes of a loader whose subclasses do not know of us.

A subclass that was written for torch's loader may use any name for itself, `self.device` above all. So what we go by is
private (`_holdfast_...`), and what a subclass sets is what it reads. But frameworks rebuild a loader from its `vars()`:
there, `policy` and `device` are ours, unless the subclass has arguments of these names. What the user did not give is
no attribute, as with torch's loader: a subclass may ask `hasattr`, or `getattr` with a default of its own.
"""

import inspect
from collections.abc import Callable
from typing import Any

from holdfast.policy import Policy


class Argument:
    """A public attribute that shows an argument of ours, until the user sets it to something of theirs."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name, self._theirs = owner, name, f"_users_{name}"

    def __get__(self, loader: Any, owner: type | None = None) -> Any:
        if loader is None:
            return self
        known = vars(loader)
        for name in (self._theirs, self._name):
            if name in known:
                return known[name]
        raise AttributeError(f"{type(loader).__name__!r} object has no attribute {self._name!r}")

    def __set__(self, loader: Any, value: Any) -> None:
        known = vars(loader)
        if isinstance(value, Policy) and self._name == "policy":  # it can mean nothing else
            known.pop(self._theirs, None)
            known[self._name] = known[f"_holdfast_{self._name}"] = value
        else:
            known[self._name if self._is_theirs(loader) else self._theirs] = value

    def __delete__(self, loader: Any) -> None:
        self.__get__(loader)
        known = vars(loader)
        del known[self._theirs if self._theirs in known else self._name]

    def keep(self, loader: Any, value: Any, given: bool) -> None:
        """This is ours. `given`: by the user, so that it is shown."""
        known = vars(loader)
        known[f"_holdfast_{self._name}"] = value
        if not given or inspect.getattr_static(type(loader), self._name) is not self:
            return  # or a subclass has something else there
        if not self._is_theirs(loader):
            known[self._name] = value
        else:
            known.setdefault(self._name, value)  # if it hands the argument on

    def _is_theirs(self, loader: Any) -> bool:
        """A subclass has an argument of this name."""
        made = type(loader).__init__
        if made is vars(self._owner)["__init__"]:
            return False
        try:
            return self._name in inspect.signature(made).parameters
        except (TypeError, ValueError):  # it is compiled
            return False


class Readable:
    """A property that a subclass may set to something of its own."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    def __get__(self, loader: Any, owner: type | None = None) -> Any:
        return self if loader is None else self._read(loader)
