"""Run a training script, unchanged, with Holdfast's DataLoader in the place of torch's.

Its policy comes from options; who signals the trainer is told. The script is `__main__`, with its own arguments, its
own signal handlers and its own exit status.
"""

import argparse
import builtins
import os
import runpy
import sys
import time
import types
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import partial

import torch.utils.data
import torch.utils.data.dataloader

from holdfast.core.messages import What
from holdfast.diagnose.finding import TRAINER, Case
from holdfast.diagnose.incident import incident_of
from holdfast.diagnose.run_folder import RunFolder
from holdfast.loader.dataloader import DataLoader
from holdfast.local.trainer.signal_witness import SignalWitness
from holdfast.policy import PARSERS, Policy
from holdfast.system.evidence import Evidence

_HELP = {
    "bad_sample": "raise, skip or replace: a sample that cannot be loaded",
    "retries": "more attempts for a sample that raised an OSError",
    "retry_delay": "seconds before the first retry",
    "strikes": "workers that one sample may end before it is bad",
    "sample_timeout": "seconds for one sample",
    "worker_memory": "what a worker may allocate: 4GiB",
    "max_bad": "the share of bad samples that ends the run",
    "restarts": "deaths in a row without progress before it gives up",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    for field in fields(Policy):
        if field.name in PARSERS:
            parser.add_argument(f"--{field.name.replace('_', '-')}", metavar="X", help=_HELP.get(field.name))
    parser.add_argument("--run-dir", metavar="FOLDER", help="write incidents there at once, as HOLDFAST_RUN_DIR does")
    parser.add_argument("-m", dest="module", action="store_true", help="script is the name of a module")
    parser.add_argument("script", help="the script to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script gets")


def run(chosen: argparse.Namespace) -> int:
    """The script's own status. 2: there is no such script."""
    for name in PARSERS:
        if (text := getattr(chosen, name, None)) is not None:
            os.environ[f"HOLDFAST_{name.upper()}"] = text
    if chosen.run_dir is not None:
        os.environ["HOLDFAST_RUN_DIR"] = os.path.abspath(chosen.run_dir)
    Policy.from_environment()  # what makes no sense is said before the script runs
    start = _module if chosen.module else _script
    begin = start(chosen.script, chosen.arguments)
    if begin is None:
        print(f"holdfast run: cannot read {chosen.script}", file=sys.stderr)
        return 2
    replace_torchs_loader()
    SignalWitness(partial(_tell, RunFolder.from_environment("trainer"))).start()
    try:
        begin()
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next  # ours are of no interest
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _script(path: str, given: list[str]) -> Callable[[], None] | None:
    """As `python path given...`: the module stays `__main__` until the interpreter ends."""
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError:
        return None

    def begin() -> None:
        main = types.ModuleType("__main__")
        main.__dict__.update(__file__=path, __builtins__=builtins, __spec__=None, __cached__=None)
        sys.argv[:] = [path, *given]
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        sys.modules["__main__"] = main
        exec(compile(source, path, "exec"), main.__dict__)

    return begin


def _module(name: str, given: list[str]) -> Callable[[], None]:
    """As `python -m name given...`."""

    def begin() -> None:
        sys.argv[:] = [name, *given]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)

    return begin


def _tell(folder: RunFolder | None, number: int, evidence: Evidence) -> None:
    """In the witness: straight to stderr and into the run's folder; the trainer may be gone already."""
    case = Case(what=What.SIGNALLED, worker=TRAINER, pid=evidence.pid, code=number, evidence=evidence, at=time.time())
    incident = incident_of(case)
    os.write(2, f"holdfast: {incident}\n".encode())
    if folder is not None:
        folder.write(asdict(incident))


# `from torch.utils.data import DataLoader` gives Holdfast's: for programs that shall not be changed.


def replace_torchs_loader() -> None:
    """From now on, for whoever asks torch for the name. What was imported before keeps torch's own.

    Ours is a subclass of torch's: `isinstance` of a loader with either of them stays true.
    """
    torch.utils.data.DataLoader = DataLoader  # type: ignore[misc]
    torch.utils.data.dataloader.DataLoader = DataLoader  # type: ignore[misc]
