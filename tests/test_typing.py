"""What a type checker knows of a user's script: as much as with torch and concurrent.futures, and what is ours."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SCRIPT = """
from collections.abc import Iterator

from torch.utils.data import DataLoader as TorchsLoader
from torch.utils.data import Dataset, IterableDataset

import torch
import holdfast
from holdfast import DataLoader, Policy, Pool


class Pairs(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(3), index


class Words(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        return iter("ab")


def add(a: int, b: float = 0.0) -> float:
    return a + b


def train(loader: TorchsLoader[tuple[torch.Tensor, int]]) -> None:
    for batch in loader:
        reveal_type(batch)  # Any


reveal_type(DataLoader(Pairs()))  # DataLoader[tuple[Tensor, int]]
reveal_type(DataLoader(Words(), num_workers="auto", device="cuda", policy=Policy(retries=2)))  # DataLoader[str]
loader = DataLoader(Pairs(), 4, True, num_workers=2, collate_fn=lambda samples: samples[0], timeout=5)
reveal_type(loader.dataset)  # Dataset[tuple[Tensor, int]]
reveal_type(next(iter(loader)))  # Any
reveal_type(loader.incidents[0].finding)  # str
train(loader)
DataLoader(3)  # error: arg-type
DataLoader(Pairs(), num_workers="many")  # error: arg-type
DataLoader(Pairs(), worker_init_fn=lambda: None)  # error: arg-type misc
Policy(bad_sample="ignore")  # error: arg-type
with Pool(2) as pool:
    reveal_type(pool)  # Pool
    reveal_type(pool.submit(add, 1, b=2.5))  # Future[float]
    reveal_type(pool.submit_with(add, 1, 2.5, timeout=3, retries=2).result())  # float
    reveal_type(pool.map(add, [1, 2]))  # Iterator[float]
    reveal_type(pool.map(add, [1, 2], return_exceptions=True))  # Iterator[float | Exception]
    pool.submit(add)  # error: call-arg
    pool.submit(add, "1")  # error: arg-type
    pool.submit(add, 1, c=2)  # error: call-arg
"""


@pytest.mark.timeout(600)
def test_a_users_script_under_mypy_strict(tmp_path):
    """Each comment says what mypy finds there. The cache is that of `make lint-check`: torch alone takes a minute."""
    script = tmp_path / "users_script.py"
    script.write_text(SCRIPT)
    words = ["--strict", "--no-error-summary", "--hide-error-context", "--no-pretty", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=550
    )
    found: dict[int, set[str]] = {}
    for line in done.stdout.splitlines():
        _, number, kind, text = line.split(":", 3)
        if "Revealed type is" in text:
            text = text.partition('"')[2].rstrip('"')
            found.setdefault(int(number), set()).add(re.sub(r"\w+(\.\w+)*\.(?=\w)", "", text))
        elif kind.strip() == "error":
            found.setdefault(int(number), {"error:"}).add(text.rpartition("[")[2].rstrip("]"))
    wanted = {}
    for number, line in enumerate(SCRIPT.splitlines(), 1):
        _, mark, comment = line.partition("  # ")
        if mark:
            wanted[number] = set(comment.split()) if comment.startswith("error:") else {comment}
    assert found == wanted, done.stdout + done.stderr
