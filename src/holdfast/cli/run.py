"""Run a training script, unchanged, with Holdfast's DataLoader in the place of torch's.

Options set its policy. If a signal comes to the trainer, Holdfast prints who sent it. The script is `__main__`, and
has its own arguments, signal handlers and exit status.
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

from holdfast.core.messages import What
from holdfast.diagnose.finding import TRAINER, Case
from holdfast.diagnose.incident import incident_of
from holdfast.diagnose.run_folder import RunFolder
from holdfast.local.trainer.signal_witness import SignalWitness
from holdfast.policy import PARSERS, Policy
from holdfast.system.evidence import Evidence

_HELP = {
    "bad_sample": "what to do with a sample that cannot be loaded: raise, skip or replace",
    "retries": "how often a sample that raised an OSError is tried again",
    "retry_delay": "seconds before the first retry",
    "retry_delay_max": "seconds between two retries at most",
    "strikes": "how many workers one sample may end before it counts as bad",
    "sample_timeout": "seconds that one sample may take",
    "worker_memory": "how much a worker may allocate, such as 4GiB",
    "max_bad": "the share of bad samples above which the run ends, such as 0.1",
    "restarts": "deaths in a row without progress after which the run ends",
    "shared_files": "files that the dataset holds open when workers are forked: warn, error or ignore",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    for field in fields(Policy):
        if field.name in PARSERS:
            parser.add_argument(f"--{field.name.replace('_', '-')}", metavar="X", help=_HELP.get(field.name))
    parser.add_argument(
        "--run-dir", metavar="FOLDER", help="write incidents to this folder at once, as with HOLDFAST_RUN_DIR"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the script is given as the name of a module")
    parser.add_argument("script", help="the script to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the arguments of the script")


def run(chosen: argparse.Namespace) -> int:
    """The exit status: the script's own, or 2 if the script cannot be read."""
    for name in PARSERS:
        if (text := getattr(chosen, name, None)) is not None:
            os.environ[f"HOLDFAST_{name.upper()}"] = text
    if chosen.run_dir is not None:
        os.environ["HOLDFAST_RUN_DIR"] = os.path.abspath(chosen.run_dir)
    Policy.from_environment()  # a wrong value is an error before the script runs
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
            trace = trace.tb_next  # frames of ours help nobody
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _script(path: str, given: list[str]) -> Callable[[], None] | None:
    """Run it as `python path given...` does: the module stays `__main__` until the interpreter ends."""
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
    """Run it as `python -m name given...` does."""

    def begin() -> None:
        sys.argv[:] = [name, *given]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)

    return begin


def _tell(folder: RunFolder | None, number: int, evidence: Evidence) -> None:
    """Which process: the witness. It writes to stderr and into the run folder; the trainer may be gone already."""
    case = Case(what=What.SIGNALLED, worker=TRAINER, pid=evidence.pid, code=number, evidence=evidence, at=time.time())
    incident = incident_of(case)
    os.write(2, f"holdfast: {incident}\n".encode())
    if folder is not None:
        folder.write(asdict(incident))


# `from torch.utils.data import DataLoader` gives Holdfast's loader: for programs that are not to be changed.


def replace_torchs_loader() -> None:
    """From now on an import from torch gives ours. A name that was imported before keeps torch's own loader.

    Ours is a subclass of torch's, so `isinstance` of our loader with either of them is true.
    """
    import torch.utils.data.dataloader

    from holdfast.loader.dataloader import DataLoader

    torch.utils.data.DataLoader = DataLoader  # type: ignore[misc]
    torch.utils.data.dataloader.DataLoader = DataLoader  # type: ignore[misc]
