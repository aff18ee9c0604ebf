"""The command line: `holdfast COMMAND`, or `python -m holdfast COMMAND`."""

import argparse
import signal
import sys

from holdfast import __version__
from holdfast.cli import demo, doctor, explain, leave_pipe, reader_gone, repro, run, top
from holdfast.errors import HoldfastError

COMMANDS = {"demo": demo, "doctor": doctor, "explain": explain, "repro": repro, "run": run, "top": top}


def main(argv: list[str] | None = None) -> int:
    """Run one command; gives the exit status."""
    parser = argparse.ArgumentParser(prog="holdfast", description="Data loading that survives its workers.")
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        about = (module.__doc__ or "").strip().splitlines()[0]
        module.arguments(commands.add_parser(name, help=about, description=about))
    try:
        return _run(parser, argv)
    except BrokenPipeError:
        if not reader_gone(sys.stdout):
            raise
        leave_pipe(sys.stdout)
        return 128 + signal.SIGPIPE


def _run(parser: argparse.ArgumentParser, argv: list[str] | None) -> int:
    try:
        chosen = parser.parse_args(argv)
    finally:
        sys.stdout.flush()  # (--help and --version exit)
    try:
        status: int = COMMANDS[chosen.command].run(chosen)
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
