"""What the benchmarks load. A module of its own, so that spawned workers can import it.

All but `Jpegs` and `Slow` give one prepared sample again and again: loading it costs nothing, and what is measured is
the way of a batch from worker to trainer.
"""

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

# No measurement gets to the end of it.
ENDLESS = 1 << 40
# Different pictures, so that a decoder does not find everything in the cache; few, so that making them is quick.
PICTURES = 16
PICTURE_SIDE = 256


class Prepared(Dataset[Any]):
    """The same sample for each index."""

    def __init__(self, sample: Any) -> None:
        self._sample = sample

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        return self._sample


class Jpegs(Dataset[Any]):
    """JPEG files in memory; a sample is decoded by PIL and made a float tensor, as torchvision's `to_tensor` does."""

    def __init__(self) -> None:
        self._files = [jpeg(seed) for seed in range(PICTURES)]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        from PIL import Image

        with Image.open(io.BytesIO(self._files[index % PICTURES])) as picture:
            pixels = np.array(picture.convert("RGB"))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous().float().div_(255)


class Slow(Dataset[int]):
    """Its own index, after `seconds`."""

    def __init__(self, length: int, seconds: float) -> None:
        self._length = length
        self._seconds = seconds

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        time.sleep(self._seconds)
        return index


def jpeg(seed: int) -> bytes:
    """A picture with large shapes and some grain: noise alone would be a file that no camera makes."""
    from PIL import Image

    random = np.random.default_rng(seed)
    shapes = Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8)).resize((PICTURE_SIDE, PICTURE_SIDE))
    grain = random.normal(0, 6, (PICTURE_SIDE, PICTURE_SIDE, 3))
    pixels = np.clip(np.asarray(shapes) + grain, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


@dataclass(frozen=True, slots=True)
class Load:
    """A dataset and how it is batched; `goal` is how many times as fast as torch we want to be."""

    name: str
    goal: float
    batch_size: int
    make: Callable[[], Dataset[Any]]


LARGE_IMAGES = Load("38 MB images", 6, 64, lambda: Prepared(torch.rand(3, 224, 224)))
SMALL_IMAGES = Load("1.5 MB images", 12, 32, lambda: Prepared(torch.rand(3, 64, 64)))
VECTORS = Load("vectors", 5, 256, lambda: Prepared(torch.rand(16)))
LOADS = (
    LARGE_IMAGES,
    SMALL_IMAGES,
    Load("uint8 images", 8, 32, lambda: Prepared(np.full((224, 224, 3), 7, np.uint8))),
    VECTORS,
    Load("batches of 1", 12, 1, lambda: Prepared(torch.rand(16))),
    Load("dicts of 20", 12, 8, lambda: Prepared({f"field {i}": torch.rand(16) for i in range(20)})),
    Load("lists of ints", 10, 8, lambda: Prepared(list(range(20)))),
    Load("JPEG decoding", 1.2, 32, Jpegs),
)
