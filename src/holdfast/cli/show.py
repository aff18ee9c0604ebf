"""What commands print: text of others, in which nothing is left that a terminal obeys. JSON does not come this way."""

import sys
from typing import TextIO

from holdfast.errors import legible


def show(text: str = "", to: TextIO | None = None) -> None:
    """A line, or several; to stdout unless said otherwise."""
    print(legible(text), file=sys.stdout if to is None else to, flush=True)
