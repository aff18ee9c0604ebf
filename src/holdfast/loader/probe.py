"""Tries a dataset out, under supervision: a sample that raises, hangs or kills its worker is named; the rest goes on.

`probe` runs in the trainer, on one worker of our own DataLoader; what is measured inside that worker is in measure.py.
"""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import context
from typing import Any

from torch.utils.data import IterableDataset

from holdfast.diagnose.fitness import Bad, Measured, Repeat, Sample
from holdfast.loader.dataloader import DataLoader
from holdfast.loader.measure import Repeated, Weighed, WeighedStream
from holdfast.loader.tree import explain_unsendable
from holdfast.policy import Policy
from holdfast.remote_exception import shown, text_of
from holdfast.shm.pack import Packer, Scales

Progress = Callable[[int, int], None]

# Samples that are loaded again, three times each.
_REPEATED = 12


def probe(
    dataset: Any,
    name: str,
    *,
    expression: str = "dataset",
    samples: int = 64,
    sample_timeout: float = 30.0,
    budget_s: float = 120.0,
    import_s: float = 0.0,
    progress: Progress = lambda done, total: None,
) -> Measured:
    """All that can be learnt of a dataset from `samples` of it, in about `budget_s` seconds."""
    stream = is_stream(dataset)
    length = None if stream else length_of(dataset)
    pickled, why_not = pickled_size(dataset)
    policy = Policy(sample_timeout=sample_timeout, strikes=1, restarts=samples + 20)
    deadline = time.monotonic() + budget_s
    indices = list(range(samples)) if length is None else spread(length, samples)
    total = len(indices) if stream else len(indices) + min(_REPEATED, len(indices))
    # What cannot be pickled can still be tried, in a fork.
    method = "fork" if why_not else None
    trial = _Trial(deadline, lambda done: progress(done, total))
    loader: DataLoader[Any]
    if stream:
        loader = _loader(WeighedStream(dataset, samples), None, policy, method)
    else:
        loader = _loader(Weighed(dataset), indices, policy, method)
    found: list[Sample] = trial.run(loader, len(indices))
    if stream:  # it has no index; what failed is the item after the last that came
        trial.bad = [replace(bad, index=len(found)) for bad in trial.bad]
    repeats = [] if stream else _repeat(dataset, found, trial, partial(_loader, policy=policy, method=method))
    return Measured(
        name=name,
        expression=expression,
        kind="stream" if stream else "map",
        length=length,
        asked=len(indices),
        samples=tuple(found),
        repeats=tuple(repeats),
        bad=tuple({shown(bad.index): bad for bad in trial.bad}.values()),
        import_s=import_s,
        pickled_bytes=pickled,
        unpicklable=why_not,
        start_method=multiprocessing.get_start_method(),
        cut_short=trial.cut_short,
    )


class _Trial:
    """Runs loaders to their end, whatever happens in them, and keeps what went wrong."""

    def __init__(self, deadline: float, progress: Callable[[int], None]) -> None:
        self._deadline = deadline
        self._progress = progress
        self._done = 0
        self.bad: list[Bad] = []
        self.cut_short = False

    def run(self, loader: DataLoader[Any], count: int) -> list[Any]:
        found: list[Any] = []
        unnamed: list[Bad] = []
        last: BaseException | None = None
        iterator: Any = None
        for _ in range(count + 1):
            if time.monotonic() > self._deadline:
                self.cut_short = True
                break
            try:
                iterator = iter(loader) if iterator is None else iterator
                found.append(next(iterator))
            except StopIteration:
                break
            except Exception as error:  # the dataset's own, or ours about it: named below
                if error is last or iterator is None:
                    unnamed.append(Bad(None, _line(error)))
                    break
                last = error
            self._done += 1
            self._progress(self._done)
        self.bad += [*_bad_of(loader), *unnamed]
        if last is not None and not self.bad:
            self.bad.append(Bad(None, _line(last)))
        return found


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error).partition(chr(10))[0]}"


def _bad_of(loader: DataLoader[Any]) -> list[Bad]:
    """The bad samples of a loader, each with the last that was found about it."""
    report = loader.report()
    about = {shown(incident.index): incident for incident in report.incidents}
    found = []
    for bad in report.bad_samples:
        incident = about.get(shown(bad.index))
        if incident is None:
            found.append(Bad(bad.index, bad.error))
        else:
            error = bad.error if incident.finding == "sample-raised" else incident.headline.partition(" (batch")[0]
            found.append(Bad(bad.index, error, incident.finding, incident.stack))
    return found


def _loader(dataset: Any, indices: Sequence[Any] | None, policy: Policy, method: str | None) -> DataLoader[Any]:
    return DataLoader(
        dataset, batch_size=None, sampler=indices, num_workers=1, multiprocessing_context=method, policy=policy
    )


def _repeat(
    dataset: Any, found: Sequence[Sample], trial: _Trial, load: Callable[[Any, Sequence[Any]], DataLoader[Any]]
) -> list[Repeat]:
    """A few of the samples again, backwards."""
    first = {sample.index: sample.digest for sample in found if not sample.unsendable}
    again = list(first)[:: max(1, len(first) // _REPEATED)][-_REPEATED:][::-1]
    if not again or trial.cut_short:
        return []
    seen = trial.run(load(Repeated(dataset), again), len(again))
    return [Repeat(index, one != first[index], one != two, two != other) for index, one, two, other in seen]


def is_stream(dataset: Any) -> bool:
    """Iterated over, not indexed."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def length_of(dataset: Any) -> int | None:
    """None where it has none."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def spread(length: int, count: int) -> list[int]:
    """Indices over the whole length, the first and the last among them."""
    if count >= length:
        return list(range(length))
    if count <= 1:
        return [0] if length else []
    return sorted({round(i * (length - 1) / (count - 1)) for i in range(count)})


class _SpawnScales(Scales):
    """Takes what a worker that is not forked would be sent."""

    # multiprocessing's locks and shared values pickle only for a process that is being started; here we are it.

    def duplicate_for_child(self, fd: int) -> int:
        return fd

    def DupFd(self, fd: int) -> int:
        return fd


def pickled_size(dataset: Any) -> tuple[int | None, str]:
    """Bytes of the dataset as a worker that is not forked would get it; or why it would not."""
    scales = _SpawnScales()
    context.set_spawning_popen(scales)  # type: ignore[arg-type]
    try:
        Packer(spawning=True).pack(dataset, scales)
    except Exception as error:  # user code: __reduce__, __getstate__
        path = explain_unsendable(error, dataset, None, None).path
        return None, f"dataset{path}: {type(error).__name__}: {text_of(error)}"
    finally:
        context.set_spawning_popen(None)
    return scales.size, ""
