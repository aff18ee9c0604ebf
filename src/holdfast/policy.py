"""Policy: all that a user may set, frozen, checked when made.

Nothing here acts. The ledger reads `bad_sample`, `strikes`, `max_bad` and `restarts`; the worker reads the retry
fields; the keeper reads `sample_timeout` and `worker_memory`; the iterator reads `shared_files` before it forks.
"""

import difflib
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
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
    """What to do when loading goes wrong. The defaults change nothing that torch users rely on.

    A policy cannot be changed after it is made. A value that is not accepted raises a PolicyError. Each field except
    `retry_on` and `auto_workers` can also be set by an environment variable, such as HOLDFAST_BAD_SAMPLE=skip.
    Fields, with their defaults:

    bad_sample="raise": what to do with a sample that cannot be loaded. "raise": next() raises for its batch. "skip":
        leave the sample out. "replace": another sample of this epoch takes its place (not for iterable datasets).
    retries=0: how many more attempts a sample gets that raised one of `retry_on`.
    retry_on=(OSError,): exception class, or a tuple of them, worth another attempt.
    retry_delay=0.1: seconds before the first retry. They double with each further one, with jitter.
    retry_delay_max=5.0: seconds between two retries, at most.
    strikes=2: how many workers one sample may end before it counts as bad.
    sample_timeout=None: seconds for one sample, and for one collate. After that the keeper dumps the stack, kills the
        worker and counts a strike. None: it kills nothing.
    worker_memory=None: what a worker may allocate beyond what it had when it was ready: bytes, or a size like "4GiB".
        "auto": a worker's share of four fifths of what is free. None: no limit.
    max_bad=0.1: the share of bad samples, from 0 to 1, above which the run ends. For "skip" and "replace", once 20
        samples were seen.
    restarts=20: how many times in a row a worker may die without any progress before the loader gives up. For `spawn`:
        how often all ranks start again; never, unless you set it.
    shared_files="warn": what to do if the dataset holds a file open for reading when workers are forked: they all move
        one position in it. "warn": an incident with the attribute's path. "error": iter() raises FileShared. "ignore".
    auto_workers=False: the loader sets it for num_workers="auto". You need not set it.
    """

    bad_sample: BadSample = "raise"
    retries: int = 0
    retry_on: tuple[type[BaseException], ...] = (OSError,)
    retry_delay: float = 0.1
    retry_delay_max: float = 5.0
    strikes: int = 2
    sample_timeout: float | None = None
    worker_memory: int | str | None = None
    max_bad: float = 0.1
    restarts: int = _Unset(20)
    shared_files: SharedFiles = "warn"
    auto_workers: bool = False

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
        warn_of_misspelt(environment)
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

# What else Holdfast reads from the environment, and what it sets there for ranks.
_OTHER_VARIABLES = ("RUN_DIR", "ATTEMPT")
# Less alike is another program's own: HOLDFAST_TEST_MARK is 0.59 to RESTARTS, HOLDFAST_TIMEOUT 0.67 to SAMPLE_TIMEOUT.
_ALIKE = 0.66


def warn_of_misspelt(environment: Mapping[str, str]) -> None:
    """A variable that looks like one of ours would change nothing, silently."""
    known = [name.upper() for name in PARSERS] + list(_OTHER_VARIABLES)
    for variable in environment:
        name = variable.removeprefix("HOLDFAST_")
        if name != variable and name not in known and (near := difflib.get_close_matches(name, known, 1, _ALIKE)):
            _warn_once(variable, f"HOLDFAST_{near[0]}")


@cache
def _warn_once(variable: str, near: str) -> None:
    logging.getLogger("holdfast").warning("%s does nothing: did you mean %s?", variable, near)
