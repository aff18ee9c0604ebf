"""One sample once more, with the random numbers that it had: for `holdfast repro`."""

from typing import Any

from holdfast.diagnose.finding import Again
from holdfast.loader.seeds import Seeder


def load_again(dataset: Any, again: Again) -> Any:
    """The sample. Those before it in its batch are loaded first: they draw from the same generators."""
    Seeder().seed(again.seed, again.batch)
    for index in again.indices:
        sample = dataset[index]
    return sample
