"""The commands of `holdfast COMMAND`: a module for each, with two functions, `arguments` and `run`.

demo      a training whose workers die, and the proof that nothing was lost
doctor    checks the machine, the libraries and a dataset before a training
explain   what a log or a traceback means; the pages of the findings
read_run  `holdfast report`: what happened in a run, by its folder
repro     loads the sample of an incident again
run       runs a training script with Holdfast's loader in the place of torch's
top       what loaders and pools do now
apart     runs something in a child of the command: a crash there does not end the command

holdfast/__main__.py chooses the command.
"""

import sys
from typing import TextIO

from holdfast.errors import legible


def show(text: str = "", to: TextIO | None = None) -> None:
    """Print one line or more, to stdout by default, without anything that a terminal obeys. JSON is not printed so."""
    print(legible(text), file=sys.stdout if to is None else to, flush=True)
