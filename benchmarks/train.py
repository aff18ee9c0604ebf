"""A small training whose data goes wrong: `python train.py FAILURE`. failures.py runs it, and changes one import.

Image number i has the value i everywhere, so the training can tell a wrong one. How many came right is in the file
`right`, which outlives a training that is killed.
"""

import ctypes
import sys
import time
from pathlib import Path
from typing import IO, Any

import torch
from torch.utils import data
from torch.utils.data import DataLoader

SAMPLES = 512
# The index of the sample that goes wrong; the 18 batches of 16 before it are good.
BAD = 300


class Images(data.Dataset[Any]):
    """Nothing goes wrong here."""

    side = 32

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == BAD:
            self.go_wrong()
        return self.image(index), index

    def image(self, index: int) -> torch.Tensor:
        return torch.full((3, self.side, self.side), float(index))

    def go_wrong(self) -> None:
        """What happens at one index."""


class Memory(Images):
    def go_wrong(self) -> None:
        bytearray(b"x") * (4 << 30)


class Segfault(Images):
    def go_wrong(self) -> None:
        ctypes.string_at(0)


class Hang(Images):
    def go_wrong(self) -> None:
        while True:
            time.sleep(3600)


class SharedFile(Images):
    """Opened once, here; each worker seeks and reads."""

    side = 8

    def __init__(self) -> None:
        self.file: IO[bytes] = open("images.bin", "w+b")
        self.file.writelines(super(SharedFile, self).image(index).numpy().tobytes() for index in range(SAMPLES))
        self.file.write(bytes(1 << 20))  # or a read at another worker's position might meet the end of the file
        self.file.flush()

    def image(self, index: int) -> torch.Tensor:
        size = 3 * self.side * self.side * 4
        self.file.seek(index * size)
        pixels = bytearray(self.file.read(size))
        time.sleep(0.001)  # what decoding takes
        return torch.frombuffer(pixels, dtype=torch.float32).reshape(3, self.side, self.side)


class Descriptors(Images):
    """Each sample opens a file, and nobody closes it."""

    def __init__(self) -> None:
        self.kept: list[IO[bytes]] = []

    def image(self, index: int) -> torch.Tensor:
        self.kept.append(open("train.py", "rb"))
        return super().image(index)


class Slow(Images):
    """Takes so long that a signal meets it half-way."""

    def image(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return super().image(index)


class Shapes(Images):
    """One image is narrower than the others."""

    def image(self, index: int) -> torch.Tensor:
        image = super().image(index)
        return image[:, :, :24] if index == BAD else image


class Large(Images):
    """A batch has 12 MB."""

    side = 256


FAILURES: dict[str, type[Images]] = {
    "memory": Memory,
    "segfault": Segfault,
    "shared-file": SharedFile,
    "descriptors": Descriptors,
    "hang": Hang,
    "sigterm": Slow,
    "shapes": Shapes,
    "shared-memory": Large,
}


def main(failure: str) -> None:
    torch.manual_seed(0)
    dataset = FAILURES[failure]()
    loader = DataLoader(dataset, batch_size=16, num_workers=2)
    model = torch.nn.Linear(3 * dataset.side**2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    right = 0
    for step, (images, labels) in enumerate(loader):
        loss = (model(images.flatten(1)).squeeze(1) - labels).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right += int((images.flatten(1) == labels[:, None]).all(1).sum())
        Path("right").write_text(str(right))
        if step % 4 == 0:
            print(f"step {step:3d}  loss {loss.item():10.1f}")
    print("the epoch is complete")


if __name__ == "__main__":
    main(sys.argv[1])
