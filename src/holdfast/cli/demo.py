"""Train a small model while its workers are killed, crash, hang and raise, and prove that nothing was lost."""

import argparse
import fcntl
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from holdfast.cli import wrapped
from holdfast.loader.dataloader import DataLoader
from holdfast.policy import Policy
from holdfast.pool.progress import rewrite
from holdfast.testing import Saboteur

SAMPLES = 1536
BATCH = 32
# What the dataset does to its workers, once each, and how the name of the finding begins that must come of it. Besides,
# the demo kills a worker from outside every --every seconds. In the first epoch each is in a batch of its own: what a
# worker has survived it tells with its batch, and a batch that dies with its worker tells nothing.
_HUNG = ("hang-", "sample-hung")  # (how much is known of a hang depends on what may be looked at)
FAULTS: dict[int, tuple[str, str | tuple[str, ...]]] = {
    100: ("segfault", "worker-segfault"),
    333: ("sigkill", "worker-killed"),
    505: ("raise-os-error", "sample-retried"),
    640: ("hang", _HUNG),
    777: ("os-exit", "worker-exited"),
    901: ("raise-os-error", "sample-retried"),
    1024: ("abort", "worker-aborted"),
    1200: ("hang-holding-gil", _HUNG),
    1400: ("sigstop", "worker-stopped"),
}


class Images(Dataset[Any]):
    """Generated images of two classes: a bright square on the left or right, under noise. Each takes 1 ms to load."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, int]:
        label = index % 2
        image = torch.randn(1, 32, 32) * 1.5
        image[:, 8:24, 2 + 16 * label : 14 + 16 * label] += 1.0
        time.sleep(0.001)
        return index, image, label


class Sabotaged(Saboteur):
    """Each fault comes once. While one comes, its worker holds a lock, which the system frees if the worker dies."""

    def __init__(self, once: str) -> None:
        super().__init__(Images(), {index: fault for index, (fault, _) in FAULTS.items()}, once)

    def __getitem__(self, index: int) -> Any:
        if index not in self.at:
            return super().__getitem__(index)
        assert self.once is not None
        with locked(self.once, fcntl.LOCK_SH):
            return super().__getitem__(index)


@contextmanager
def locked(folder: str, how: int) -> Iterator[None]:
    """Raises BlockingIOError if it was not to wait, and somebody has it."""
    with open(os.path.join(folder, "lock"), "a") as file:
        fcntl.flock(file, how)
        yield


class Killer:
    """Kills a worker from outside, now and then; but not before the report has every fault that has come so far. Else a
    worker that hangs, or is about to tell what it has survived, might be killed before anybody knows.
    """

    def __init__(self, once: str, every_s: float) -> None:
        self._once = once
        self._every_s = every_s
        self._next = 0.0
        self._random = random.Random(0)
        self.kills = 0

    def look(self, loader: DataLoader[Any], pids: list[int]) -> None:
        """Between two batches."""
        if time.monotonic() < self._next or not pids:
            return
        try:
            with locked(self._once, fcntl.LOCK_EX | fcntl.LOCK_NB):
                come = {int(name.removeprefix("fault-")) for name in os.listdir(self._once) if name != "lock"}
                if come <= shown(loader).keys():
                    os.kill(self._random.choice(pids), signal.SIGKILL)
                    self._next = time.monotonic() + self._every_s
                    self.kills += 1
        except (BlockingIOError, ProcessLookupError):
            return  # a fault is coming right now, or that worker has just ended


def shown(loader: DataLoader[Any]) -> dict[int, str]:
    """The faults that the loader has reported, by index, each with its finding."""
    found = {}
    for incident in loader.incidents:
        index = incident.index
        if isinstance(index, int) and index in FAULTS and incident.finding.startswith(FAULTS[index][1]):
            found[index] = incident.finding
    return found


@dataclass
class Run:
    """What the trainer got from one training run."""

    ids: list[int]
    losses: list[float]
    seconds: float


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2, help="worker processes (2)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs of each run (3)")
    parser.add_argument("--every", type=float, default=0.4, help="seconds between kills from outside (0.4)")
    parser.add_argument("--json", action="store_true", help="print the proof and the report as JSON")


def run(chosen: argparse.Namespace) -> int:
    logging.getLogger("holdfast").addHandler(logging.NullHandler())  # the report at the end has all incidents
    quiet = chosen.json
    policy = Policy(retries=2, retry_delay=0.01, sample_timeout=1.0)
    _say(quiet, f"An undisturbed run: {SAMPLES} images, {chosen.epochs} epochs, {chosen.workers} workers")
    calm_loader = _loader(Images(), chosen.workers, policy)
    calm = _train(calm_loader, chosen.epochs, quiet, None)
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as once:
        _say(quiet, "The same run while workers segfault, abort, exit, stop, hang, raise, and are killed from outside")
        loader = _loader(Sabotaged(once), chosen.workers, policy)
        killer = Killer(once, chosen.every)
        rough = _train(loader, chosen.epochs, quiet, killer)
    named = shown(loader)
    expected = SAMPLES * chosen.epochs
    proof = {
        "samples_expected": expected,
        "samples_delivered": len(rough.ids),
        "duplicated": len(rough.ids) - sum(len(set(rough.ids[i : i + SAMPLES])) for i in range(0, expected, SAMPLES)),
        "same_order": rough.ids == calm.ids,
        "same_losses": rough.losses == calm.losses,
        "faults": {f"{fault} at index {index}": named.get(index) for index, (fault, _) in FAULTS.items()},
        "kills_from_outside": killer.kills,
        "workers_restarted": loader.stats()["restarts"],
        "seconds_calm": round(calm.seconds, 2),
        "seconds_rough": round(rough.seconds, 2),
        "first_loss": round(rough.losses[0], 4),
        "last_loss": round(rough.losses[-1], 4),
    }
    good = (
        proof["samples_delivered"] == expected
        and proof["duplicated"] == 0
        and bool(proof["same_order"] and proof["same_losses"])
        and len(named) == len(FAULTS)
    )
    if chosen.json:
        print(json.dumps({"proof": proof, "calm": asdict(calm), "report": loader.report().to_dict()}, default=repr))
        return 0 if good else 1
    print()
    print(loader.report())
    print()
    _tell(proof, rough.losses)
    return 0 if good else 1


def _loader(dataset: Any, workers: int, policy: Policy) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        generator=torch.Generator().manual_seed(7),
        policy=policy,
    )


def _train(loader: DataLoader[Any], epochs: int, quiet: bool, killer: Killer | None) -> Run:
    """Train a small convolutional net. The same batches give the same losses, bit for bit."""
    torch.manual_seed(1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Conv2d(1, 4, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.004)
    ids: list[int] = []
    losses: list[float] = []
    began = time.monotonic()
    for epoch in range(epochs):
        iterator: Any = iter(loader)
        for step, (index, images, labels) in enumerate(iterator):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            ids += index.tolist()
            losses.append(float(loss.detach()))
            if killer is not None:
                killer.look(loader, [worker.pid for worker in iterator._workers if worker.pid])
            kills = loader.stats()["restarts"]
            _progress(quiet, f"epoch {epoch + 1} of {epochs}, batch {step + 1}, loss {losses[-1]:.4f}, {kills} deaths")
        if not sys.stdout.isatty():
            _say(quiet, f"  epoch {epoch + 1} of {epochs}: loss {losses[-1]:.4f}, {loader.stats()['restarts']} deaths")
    torch.set_num_threads(threads)
    _say(quiet or not sys.stdout.isatty(), "")
    return Run(ids, losses, time.monotonic() - began)


def _say(quiet: bool, text: str) -> None:
    if not quiet:
        print(text, flush=True)


def _progress(quiet: bool, text: str) -> None:
    if not quiet and sys.stdout.isatty():
        rewrite(sys.stdout, f"  {text}")


def _tell(proof: dict[str, Any], losses: list[float]) -> None:
    print("Proof")
    print(f"  samples expected    {proof['samples_expected']}")
    print(f"  samples delivered   {proof['samples_delivered']}")
    print(f"  duplicated          {proof['duplicated']}")
    known = [f"{fault} ({finding})" for fault, finding in proof["faults"].items() if finding]
    missing = [fault for fault, finding in proof["faults"].items() if not finding]
    print(wrapped(f"  faults named        {len(known)} of {len(FAULTS)}: {', '.join(known)}", margin=" " * 22))
    if missing:
        print(wrapped(f"  NOT NAMED           {', '.join(missing)}", margin=" " * 22))
    print(f"  killed from outside {proof['kills_from_outside']}")
    print(f"  workers restarted   {proof['workers_restarted']}")
    print(f"  same order          {'yes' if proof['same_order'] else 'NO'}")
    same = "equal to the undisturbed run, bit for bit" if proof["same_losses"] else "NOT equal to the undisturbed run"
    print(f"  loss curve          {same}: {_curve(losses)} {proof['first_loss']} to {proof['last_loss']}")
    print(f"  seconds             {proof['seconds_calm']} undisturbed, {proof['seconds_rough']} disturbed")


def _curve(losses: list[float]) -> str:
    """The losses as a line of blocks."""
    blocks = " ▁▂▃▄▅▆▇█"
    width = 40
    size = max(1, len(losses) // width)
    means = [sum(losses[i : i + size]) / len(losses[i : i + size]) for i in range(0, len(losses), size)][:width]
    top = max(means) or 1.0
    return "".join(blocks[min(8, round(8 * mean / top))] for mean in means)
