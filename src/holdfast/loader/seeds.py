"""Random numbers that depend on (base seed, batch) and on nothing else: not on the worker, not on its life.

So a run with kills, retries or another number of workers gives the same bytes. torch, numpy and `random` are seeded
for each task; before a retry of a sample they are put back to where they were.
"""

import _random
import random
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.random  # numpy leaves that to whoever asks first: each worker, for 10 ms
import torch

# The generator behind `random.random()` and the others.
_THE_ONE: Any = random.random.__self__  # type: ignore[attr-defined]
_MASK = (1 << 64) - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(seed: int, number: int) -> int:
    """64 well-mixed bits of two numbers (splitmix64)."""
    z = (seed + (number + 1) * _STEP) & _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


class Seeder:
    """Seeds the three generators of a worker for each task.

    A worker_init_fn that seeds a generator itself is obeyed: that generator's numbers then depend on (its seed,
    batch) instead of (base seed, batch).
    """

    def __init__(self) -> None:
        self._own: list[int | None] = [None, None, None]

    def watching(self, call: Callable[[], Any]) -> None:
        """Calls worker_init_fn: which generators does it touch?"""
        before = _prints()
        call()
        self._own = [after if after != was else None for was, after in zip(before, _prints(), strict=True)]

    def seed(self, base_seed: int, number: int) -> None:
        """For one task: 7 us."""
        own_torch, own_random, own_numpy = self._own
        bits = mix(base_seed, number)
        # torch.manual_seed would go round every accelerator: 99 us instead of 1. (63 bits: users put
        # torch.initial_seed() into tensors.)
        torch.default_generator.manual_seed((bits if own_torch is None else mix(own_torch, number)) >> 1)
        _seed_random(bits if own_random is None else mix(own_random, number))
        np.random.seed((bits if own_numpy is None else mix(own_numpy, number)) >> 32)


def _seed_random(seed: int) -> None:
    """`random.seed(seed)`, without its questions of what kind of seed that is."""
    _random.Random.seed(_THE_ONE, seed)
    _THE_ONE.gauss_next = None


def _prints() -> list[int]:
    """A fingerprint of the state of torch's, Python's and numpy's generator."""
    state: Any = np.random.get_state()
    return [
        zlib.crc32(torch.default_generator.get_state().numpy().tobytes()),
        zlib.crc32(repr(random.getstate()).encode()),
        zlib.crc32(repr((state[1].tolist(), state[2:])).encode()),
    ]


def save() -> tuple[Any, ...]:
    """Where the three generators are."""
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state()


def restore(state: tuple[Any, ...]) -> None:
    """Back to where they were."""
    torch.default_generator.set_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])
