"""The size of the house, and how far an index and a death walk through it: `python -m tests.house`.

An index: from the sampler to the batch in the user's hands, in the trainer and in the worker. A death: from the SIGKILL
of a worker until the incident is told, in the trainer and in the keeper; what the next life does is not counted. Files
of src/ with a frame, recorded by `sys.setprofile` in all processes.
"""

import ast
import logging
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import holdfast

SOURCE = Path(holdfast.__file__).parent
# The index of the sample at which the worker is killed.
SLOW = 20
# Not counted as modules of the package: faults for users' tests, and the second host.
APART = "testing"


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != APART)


def statements(path: Path) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(path.read_text())))


def functions() -> Iterator[tuple[int, str]]:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.end_lineno - node.lineno + 1, f"{path.relative_to(SOURCE)}: {node.name}"


def shared_names() -> dict[str, list[str]]:
    """Classes and modules of one name, and where they are. Rooms have an `__init__` each."""
    places = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        if path.stem not in ("__init__", "__main__"):
            places[f"module {path.stem}"].append(str(path.relative_to(SOURCE)))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[f"class {node.name}"].append(str(path.relative_to(SOURCE)))
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


class Ways:
    """Which files have a frame in which process, while `recording`."""

    def __init__(self) -> None:
        self._on = mmap.mmap(-1, 1)
        self._file = tempfile.TemporaryFile()
        self._seen: set[tuple[int, str]] = set()

    def profile(self, frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not self._on[0] or not name.startswith(str(SOURCE)):
            return
        if (os.getpid(), name) not in self._seen:
            self._seen.add((os.getpid(), name))
            os.write(self._file.fileno(), f"{os.getpid()} {name}\n".encode())

    def __enter__(self) -> "Ways":
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._on[0] = 1
        try:
            yield
        finally:
            self.stop()

    def start_and_kill(self, pid: int) -> None:
        self._on[0] = 1
        os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        self._on[0] = 0

    def files(self, *pids: int) -> list[str]:
        self._file.seek(0)
        lines = [line.split(" ", 1) for line in self._file.read().decode().splitlines()]
        return sorted({str(Path(name).relative_to(SOURCE)) for pid, name in lines if int(pid) in pids})


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)  # so that a window holds one batch
        return torch.full((4,), index)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def way_of_an_index() -> list[str]:
    with Ways() as ways:
        loader = holdfast.DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="fork")
        iterator = iter(loader)
        for _ in range(8):
            next(iterator)
        worker = iterator._workers[0].pid
        with ways.recording():
            for _ in range(6):  # the ones that were asked for before are among the first of them
                next(iterator)
        return ways.files(os.getpid(), worker)


class OneSlow(Numbers):
    def __getitem__(self, index: int) -> Any:
        time.sleep(1.0 if index == SLOW else 0.0)
        return super().__getitem__(index)


class Told(logging.Handler):
    """Ends the recording when the incident is told."""

    def __init__(self, ways: Ways) -> None:
        super().__init__()
        self._ways = ways

    def emit(self, record: logging.LogRecord) -> None:
        self._ways.stop()


def way_of_a_death() -> list[str]:
    """The trainer waits for a batch, and its worker is killed."""
    with Ways() as ways:
        loader = holdfast.DataLoader(OneSlow(), batch_size=2, num_workers=1, multiprocessing_context="fork")
        iterator = iter(loader)
        for _ in range(SLOW // 2):
            next(iterator)
        worker = iterator._workers[0].pid
        keeper = parent_of(worker)
        logger, told = logging.getLogger("holdfast"), Told(ways)
        logger.addHandler(told)
        killer = threading.Timer(0.5, ways.start_and_kill, (worker,))
        killer.start()
        next(iterator)
        killer.join()
        logger.removeHandler(told)
        return ways.files(os.getpid(), keeper)


def main() -> None:
    counted = modules()
    print(f"modules (without {APART}/)  {len(counted)}")
    print(f"statements                 {sum(map(statements, counted)):,}")
    lines, name = max((len(path.read_text().splitlines()), str(path.relative_to(SOURCE))) for path in counted)
    print(f"longest module             {lines} lines, {name}")
    print("longest function           {} lines, {}".format(*max(functions())))
    shared = shared_names()
    print(f"shared names               {len(shared) or 'none'}")
    for name, where in shared.items():
        print(f"  {name}: {', '.join(where)}")
    for what, way in (("an index", way_of_an_index()), ("a death", way_of_a_death())):
        print(f"files on the way of {what}: {len(way)}")
        print("  " + "\n  ".join(way))


if __name__ == "__main__":
    main()
