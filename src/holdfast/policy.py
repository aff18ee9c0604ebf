"""Policy: all that a user may set, frozen, checked when made.

Nothing here acts. The ledger reads `bad_sample`, `strikes`, `max_bad` and `restarts`; the worker reads the retry
fields; the keeper reads `sample_timeout` and `worker_memory`; the iterator reads `shared_files` before it forks.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from holdfast.errors import PolicyError

BadSample = Literal["raise", "skip", "replace"]
SharedFiles = Literal["warn", "error", "ignore"]

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "kib": 1 << 10,
    "m": 1000**2,
    "mb": 1000**2,
    "mib": 1 << 20,
    "g": 1000**3,
    "gb": 1000**3,
    "gib": 1 << 30,
    "t": 1000**4,
    "tb": 1000**4,
    "tib": 1 << 40,
}


def parse_bytes(text: str) -> int:
    """Bytes of a size as people write it: "4GiB", "512 MB", "1e9"."""
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text.strip()[len(number) :].lower()
    try:
        size = int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise PolicyError(f"not a size: {text!r}; write bytes as a number or like '4GiB', '512MB'") from None
    return size


def _refuse(name: str, value: object, accepted: str) -> PolicyError:
    return PolicyError(f"Policy({name}={value!r}): {name} must be {accepted}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Unset(int):
    """A default that can be told from the same number when somebody has set it."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What to do when loading goes wrong. The defaults change nothing that torch users rely on."""

    bad_sample: BadSample = "raise"
    """A sample that cannot be loaded: "raise" from its batch, "skip" it, or "replace" it by one already seen."""
    retries: int = 0
    """More attempts for a sample that raised one of `retry_on`."""
    retry_on: tuple[type[BaseException], ...] = (OSError,)
    """Exception types worth another attempt."""
    retry_delay: float = 0.1
    """Seconds before the first retry; doubled each time, with jitter."""
    retry_delay_max: float = 5.0
    """Seconds between two retries, at most."""
    strikes: int = 2
    """How many worker lives one sample may end before it is bad."""
    sample_timeout: float | None = None
    """Seconds for one sample, and for one collate. Past it: stack dump, kill, strike."""
    worker_memory: int | str | None = None
    """What a worker may allocate beyond what it had when ready: bytes, "4GiB" or "auto"."""
    max_bad: float = 0.1
    """Circuit breaker of skip and replace: a larger share of bad samples than this ends the run."""
    restarts: int = _Unset(20)
    """Deaths in a row, without any progress between them, before the loader gives up. For `spawn`: see below."""
    shared_files: SharedFiles = "warn"
    """Files that the dataset holds open when workers are forked, at one position for all: "warn", "error", "ignore"."""
    auto_workers: bool = False
    """`num_workers="auto"` was asked for; kept here so that frameworks which rebuild loaders keep it."""

    def __post_init__(self) -> None:
        if self.bad_sample not in ("raise", "skip", "replace"):
            raise _refuse("bad_sample", self.bad_sample, "'raise', 'skip' or 'replace'")
        if self.shared_files not in ("warn", "error", "ignore"):
            raise _refuse("shared_files", self.shared_files, "'warn', 'error' or 'ignore'")
        for name, least in (("retries", 0), ("strikes", 1), ("restarts", 0)):
            value = getattr(self, name)
            if not _is_count(value) or value < least:
                raise _refuse(name, value, f"a whole number, {least} or more")
        kinds = self.retry_on
        if isinstance(kinds, type) and issubclass(kinds, BaseException):
            kinds = (kinds,)
            object.__setattr__(self, "retry_on", kinds)
        if not isinstance(kinds, tuple) or not all(isinstance(k, type) and issubclass(k, BaseException) for k in kinds):
            raise _refuse("retry_on", kinds, "an exception class or a tuple of them")
        for name in ("retry_delay", "retry_delay_max"):
            value = getattr(self, name)
            if not _is_number(value) or value < 0:
                raise _refuse(name, value, "seconds, 0 or more")
        if self.sample_timeout is not None and (not _is_number(self.sample_timeout) or self.sample_timeout <= 0):
            raise _refuse("sample_timeout", self.sample_timeout, "None or seconds above 0")
        if not _is_number(self.max_bad) or not 0 <= self.max_bad <= 1:
            raise _refuse("max_bad", self.max_bad, "a share from 0 to 1")
        if not isinstance(self.auto_workers, bool):
            raise _refuse("auto_workers", self.auto_workers, "True or False")
        self._check_memory()

    def _check_memory(self) -> None:
        wanted = self.worker_memory
        accepted = "None, 'auto', bytes above 0 or a size like '4GiB'"
        if wanted is None or wanted == "auto":
            return
        if isinstance(wanted, str):
            if parse_bytes(wanted) <= 0:
                raise _refuse("worker_memory", wanted, accepted)
        elif not _is_count(wanted) or wanted <= 0:
            raise _refuse("worker_memory", wanted, accepted)

    @property
    def group_restarts(self) -> int:
        """How often `spawn` starts all ranks again: never, unless `restarts` was set."""
        return 0 if isinstance(self.restarts, _Unset) else self.restarts

    @property
    def worker_bytes(self) -> int | Literal["auto"] | None:
        """`worker_memory` in bytes; None where there is no limit, "auto" where it is to be measured."""
        if self.worker_memory is None:
            return None
        if self.worker_memory == "auto":
            return "auto"
        if isinstance(self.worker_memory, str):
            return parse_bytes(self.worker_memory)
        return self.worker_memory

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "Policy":
        """The policy that HOLDFAST_* variables ask for, e.g. HOLDFAST_BAD_SAMPLE=skip, HOLDFAST_RETRIES=3."""
        environment = os.environ if environment is None else environment
        wanted: dict[str, Any] = {}
        for field in fields(cls):
            text = environment.get(f"HOLDFAST_{field.name.upper()}")
            if text is None:
                continue
            try:
                wanted[field.name] = PARSERS[field.name](text)
            except (KeyError, ValueError) as error:
                raise PolicyError(f"HOLDFAST_{field.name.upper()}={text!r} is not understood: {error}") from None
        return cls(**wanted)


def _optional_seconds(text: str) -> float | None:
    return None if text.lower() in ("", "none") else float(text)


def _memory(text: str) -> int | str | None:
    if text.lower() in ("", "none"):
        return None
    return int(text) if text.isdigit() else text


# What an environment variable or an option may set, and how its text is read.
PARSERS: dict[str, Callable[[str], Any]] = {
    "bad_sample": str,
    "retries": int,
    "retry_delay": float,
    "retry_delay_max": float,
    "strikes": int,
    "sample_timeout": _optional_seconds,
    "worker_memory": _memory,
    "max_bad": float,
    "restarts": int,
    "shared_files": str,
}
