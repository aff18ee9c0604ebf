"""What a hit of CachedDataset costs, against a copy of the bytes, pickle, and decoding; and what an epoch gains.

python benchmarks/cache.py      half a minute; medians of interleaved rounds
"""

import io
import pickle
import statistics
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from holdfast import CachedDataset, DataLoader

ROUNDS = 7
# 224 x 224 and 448 x 448 pixels of three bytes: 150 KB and 602 KB decoded.
SIDES = (224, 448)
SAMPLES = 200


class Jpegs(Dataset[Any]):
    """Decodes the same few pictures again and again."""

    def __init__(self, side: int, length: int = SAMPLES) -> None:
        self.length = length
        rough = np.random.default_rng(0).integers(0, 255, (16, side // 8, side // 8, 3), dtype=np.uint8)
        self.files = []
        for pixels in rough:
            file = io.BytesIO()
            Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.open(io.BytesIO(self.files[index % 16])).convert("RGB")
        return torch.from_numpy(np.array(image)), index


def per_call_us(work: Callable[[int], Any], calls: int) -> float:
    began = time.perf_counter()
    for i in range(calls):
        work(i)
    return (time.perf_counter() - began) / calls * 1e6


def hits() -> None:
    for side in SIDES:
        dataset = Jpegs(side)
        cached = CachedDataset(dataset, "1GiB")
        samples = [cached[i] for i in range(SAMPLES)]
        raw = [bytes(memoryview(image.numpy()).cast("B")) for image, _ in samples]
        pickled = [pickle.dumps(sample, protocol=5) for sample in samples]
        ways: dict[str, Callable[[int], Any]] = {
            "hit": lambda i, cached=cached: cached[i],
            "copy of the bytes": lambda i, raw=raw: bytearray(raw[i]),
            "pickle.loads": lambda i, pickled=pickled: pickle.loads(pickled[i]),
            "crc32 of the bytes": lambda i, raw=raw: zlib.crc32(raw[i]),
            "decode": lambda i, dataset=dataset: dataset[i],
        }
        rounds = [{name: per_call_us(way, SAMPLES) for name, way in ways.items()} for _ in range(ROUNDS)]
        print(f"\n{len(raw[0]) // 1000} KB samples, us each, median (lowest, highest)")
        for name in ways:
            times = [each[name] for each in rounds]
            print(f"  {name:20} {statistics.median(times):8.0f}  ({min(times):.0f}, {max(times):.0f})")


def epochs() -> None:
    dataset = Jpegs(224, 2000)
    cached = CachedDataset(dataset, "1GiB")
    loaders = {
        "decoded": DataLoader(dataset, batch_size=32, num_workers=2, shuffle=True),
        "cached": DataLoader(cached, batch_size=32, num_workers=2, shuffle=True),
    }
    times: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(4):
        for name, loader in loaders.items():
            began = time.perf_counter()
            for _ in loader:
                pass
            times[name].append(time.perf_counter() - began)
    print("\nEpochs of 2,000 such samples of 150 KB, two workers, seconds; the first fills the cache")
    for name, taken in times.items():
        print(f"  {name:20} " + "  ".join(f"{seconds:5.2f}" for seconds in taken))
    print(f"  {cached.figures()}")


if __name__ == "__main__":
    hits()
    epochs()
