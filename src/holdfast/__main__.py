"""The command line: `holdfast COMMAND`, or `python -m holdfast COMMAND`."""

import argparse
import signal
import sys
from importlib import import_module
from typing import Any

from holdfast import __version__
from holdfast.cli import leave_pipe, reader_gone
from holdfast.errors import HoldfastError

# Modules of cli/. Only the one that is chosen is imported: some need torch.
COMMANDS = {
    "demo": "Train a small model while its workers are killed, crash, hang and raise, and prove that nothing was lost.",
    "doctor": "Check this machine, its libraries and your dataset before a training run, and say what to set.",
    "explain": "Say what a log or a traceback of any program means, or show the page of a finding.",
    "report": "Say what happened in a run, by its run folder, also if the trainer was killed.",
    "repro": "Load the sample of an incident once more, with the same random numbers, here or under a debugger.",
    "run": "Run a training script, unchanged, with Holdfast's DataLoader in the place of torch's.",
    "top": "Watch loaders and pools that run with HOLDFAST_RUN_DIR: rates, waits, and the memory of each worker.",
}
# Where the module cannot have the name of the command: diagnose/ has a report.
_MODULES = {"report": "read_run"}


def main(argv: list[str] | None = None) -> int:
    """Run one command; gives the exit status."""
    parser = argparse.ArgumentParser(prog="holdfast", description="Data loading that survives its workers.")
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    words = sys.argv[1:] if argv is None else argv
    named = next((word for word in words if word in COMMANDS), None)  # no option before it takes a word
    command: Any = import_module(f"holdfast.cli.{_MODULES.get(named, named)}") if named is not None else None
    for name, about in COMMANDS.items():
        its_parser = commands.add_parser(name, help=about, description=about)
        if name == named:
            command.arguments(its_parser)
    try:
        return _run(command, parser, argv)
    except BrokenPipeError:
        if not reader_gone(sys.stdout):
            raise
        leave_pipe(sys.stdout)
        return 128 + signal.SIGPIPE


def _run(command: Any, parser: argparse.ArgumentParser, argv: list[str] | None) -> int:
    try:
        chosen = parser.parse_args(argv)
    finally:
        sys.stdout.flush()  # (--help and --version exit)
    try:
        status: int = command.run(chosen)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        if chosen.command == "run":
            raise  # it is the script's own: Python ends by SIGINT, as without Holdfast
        print("interrupted", file=sys.stderr)
        return 130
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
