"""Train a small model while its workers are killed, crash, hang and raise, and prove that nothing was lost."""

import argparse
import json
import logging
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from holdfast.loader.dataloader import DataLoader
from holdfast.policy import Policy
from holdfast.pool.progress import rewrite
from holdfast.testing import Saboteur, storm

SAMPLES = 1536
BATCH = 32
# What the dataset does to its workers, once each. Besides, the demo kills a worker from outside every --every seconds.
FAULTS = {
    100: "segfault",
    333: "sigkill",
    500: "raise-os-error",
    640: "hang",
    777: "os-exit",
    901: "raise-os-error",
    1024: "abort",
    1200: "hang-holding-gil",
    1400: "sigstop",
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
        _say(quiet, "The same run while workers segfault, abort, exit, hang, raise, and are killed from outside")
        loader = _loader(Saboteur(Images(), FAULTS, once), chosen.workers, policy)
        rough = _train(loader, chosen.epochs, quiet, chosen.every)
    expected = SAMPLES * chosen.epochs
    proof = {
        "samples_expected": expected,
        "samples_delivered": len(rough.ids),
        "duplicated": len(rough.ids) - sum(len(set(rough.ids[i : i + SAMPLES])) for i in range(0, expected, SAMPLES)),
        "same_order": rough.ids == calm.ids,
        "same_losses": rough.losses == calm.losses,
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


def _train(loader: DataLoader[Any], epochs: int, quiet: bool, kill_every_s: float | None) -> Run:
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
        iterator = iter(loader)
        weather = _weather(iterator, kill_every_s)
        with weather if weather is not None else _calm():
            for step, (index, images, labels) in enumerate(iterator):
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                ids += index.tolist()
                losses.append(float(loss.detach()))
                kills = loader.stats()["restarts"]
                _progress(
                    quiet, f"epoch {epoch + 1} of {epochs}, batch {step + 1}, loss {losses[-1]:.4f}, {kills} deaths"
                )
        if not sys.stdout.isatty():
            _say(quiet, f"  epoch {epoch + 1} of {epochs}: loss {losses[-1]:.4f}, {loader.stats()['restarts']} deaths")
    torch.set_num_threads(threads)
    _say(quiet or not sys.stdout.isatty(), "")
    return Run(ids, losses, time.monotonic() - began)


class _calm:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def _weather(iterator: Any, every_s: float | None) -> storm | None:
    if every_s is None:
        return None
    return storm(lambda: [w.pid for w in iterator._workers if w.pid], every_s)


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
