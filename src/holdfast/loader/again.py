"""One sample once more, with the random numbers that it had: for `holdfast repro`."""

import sys
from typing import Any

from holdfast.diagnose.finding import Again
from holdfast.errors import legible
from holdfast.loader.seeds import Seeder
from holdfast.local.raised import shown, text_of


def load_again(dataset: Any, again: Again) -> Any:
    """The sample. Those before it in its batch are loaded first: they draw from the same generators."""
    Seeder().seed(again.seed, again.batch)
    *before, wanted = again.indices
    for index in before:
        try:
            dataset[index]
        except Exception as error:
            said = f"(index {shown(index)}, before it, raised {type(error).__name__}: {text_of(error)})"
            print(legible(said), file=sys.stderr)
    return dataset[wanted]
