"""Totals: what a loader has done so far, over all its epochs. `loader.stats()`, and what `holdfast top` shows."""

from typing import Any

from holdfast.diagnose.report import Record
from holdfast.loader.cached import CachedDataset
from holdfast.loader.files import FileCache
from holdfast.loader.weigh import attributes
from holdfast.local.cgroups import usable_cpus


def totals(record: Record, workers: int, dataset: Any) -> dict[str, Any]:
    """It does not need the loader, which may be gone: `for batch in DataLoader(...)`."""
    names = ("batches", "samples", "retries", "restarts", "bad_samples")
    found = {name: record.counts[name] for name in names} | {
        "waited_s": round(record.waited_s, 3),
        "ran_s": round(record.ran_s, 3),
        "workers": workers,
        "cpus": usable_cpus(),
        "per_worker": record.workers.figures(),
        "caches": _caches(dataset),
    }
    if record.device_ran_s:
        found["device_waited_s"] = round(record.device_waited_s, 3)
        found["device_ran_s"] = round(record.device_ran_s, 3)
        found["device_waited_share"] = round(record.device_waited_s / record.device_ran_s, 4)
    return found


def _caches(dataset: Any) -> dict[str, dict[str, float]]:
    """The figures of our caches: of a dataset that is one, and of those that it holds. A user's own method of that name
    is not called, and types are asked past `__class__`, which may be user code."""
    found = {type(dataset).__name__: dataset}
    found |= {f"{type(part).__name__} {name}": part for name, part in attributes(dataset).items()}
    return {name: part.figures() for name, part in found.items() if issubclass(type(part), CachedDataset | FileCache)}
