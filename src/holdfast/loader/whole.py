"""Whole: is all of an epoch there that was asked for? If not, the error that says so: no epoch is short in silence."""

from collections.abc import Mapping

from holdfast.core.messages import Short
from holdfast.errors import HoldfastError, LoaderTorn, StreamBroken

_REPORT = "\n    try    please report this; a new iterator begins clean: iter(loader)"


def short(result: Short) -> StreamBroken:
    """Batches of a stream that were made did not come, or came twice."""
    made, came, worker = result.made, result.came, result.worker
    text = f"worker {worker}'s stream ended after {made} batches by its own count, and {came} came"
    return StreamBroken(text + _REPORT, worker)


def missing(asked: int, came: int, told: int, dropped: int) -> LoaderTorn | None:
    """`told`: next() raised for it, or nothing was left of it. `dropped`: a stream had no batch to give, or so."""
    if came + told + dropped == asked:
        return None
    return LoaderTorn(
        f"this epoch is not whole: of {asked} batches that were asked for, {came} came, {told} were told of as bad or "
        f"empty, and {dropped} had nothing in them{_REPORT}"
    )


def fewer_items(made: Mapping[int, int], came: Mapping[int, int]) -> HoldfastError | None:
    """By worker: items of its stream, by its own count and by ours, where that is known."""
    for worker, count in made.items():
        if came.get(worker, count) != count:
            text = f"worker {worker}'s stream gave {count} items by its own count, and {came[worker]} came"
            return StreamBroken(text + _REPORT, worker)
    return None
