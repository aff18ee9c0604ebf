"""The commands of `holdfast COMMAND`: a module for each, with two functions, `arguments` and `run`.

demo      a training whose workers die, and the proof that nothing was lost
doctor    checks the machine, the libraries and a dataset before a training
explain   what a log, a traceback or a run folder means; the pages of the findings
read_run  `holdfast report`: what happened in a run, by its folder
repro     loads the sample of an incident again
run       runs a training script with Holdfast's loader in the place of torch's
top       what loaders and pools do now
apart     runs something in a child of the command: a crash there does not end the command

holdfast/__main__.py chooses the command.
"""

import os
import select
import shutil
import sys
import textwrap
from typing import TextIO

from holdfast.errors import legible


def show(text: str = "", to: TextIO | None = None) -> None:
    """Print one line or more, to stdout by default, without anything that a terminal obeys. JSON is not printed so."""
    print(legible(text), file=sys.stdout if to is None else to, flush=True)


# Without a terminal: wide enough for a log line, narrow enough for a mail. With a wide one: eyes lose longer lines.
_COLUMNS, _MOST_COLUMNS = 110, 140


def columns() -> int:
    """The width to wrap text at: that of the terminal, or COLUMNS."""
    return max(40, min(_MOST_COLUMNS, shutil.get_terminal_size((_COLUMNS, 24)).columns))


def wrapped(text: str, head: str = "", margin: str = "") -> str:
    """Behind `head`, with `margin` before further lines. Commands keep their words whole."""
    return textwrap.fill(
        legible(text),
        columns(),
        initial_indent=head,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def reader_gone(file: TextIO) -> bool:
    """True if the file is a pipe that nobody reads any more: `holdfast explain --list | head`."""
    try:
        poll = select.poll()
        poll.register(file.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):
        return False  # closed, or no file of the system


def leave_pipe(file: TextIO) -> None:
    """What is left in the buffer goes nowhere, instead of into an error while Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)
