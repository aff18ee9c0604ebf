"""Load the sample of an incident once more, with the same random numbers, in this process or under a debugger.

A sample that ended its worker is loaded in a child, so that it does not end this process.

The file may come from another person, so nothing in it is run. Two things can only be kept as pickles: the dataset
beside it, and indices that are no literals. They are opened only with --trust.
"""

import argparse
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli import show, wrapped
from holdfast.cli.apart import start_child
from holdfast.cli.doctor import BadInput, here_on_path, make_dataset
from holdfast.cli.explain import incident_files, incidents_of
from holdfast.diagnose.finding import Again
from holdfast.diagnose.run_folder import from_pickle, from_text
from holdfast.errors import legible
from holdfast.remote_exception import shown, text_of
from holdfast.system.linux import signal_name

if TYPE_CHECKING:
    from holdfast.loader.seeds import Seeder

# With these findings the sample may end or hang the process that loads it.
_DEADLY = ("worker-", "hang-", "sample-hung", "poison-sample", "fork-after-threads")

# Incidents of a folder that are listed beside the one that is loaded.
_LISTED = 10

_TRUST = "opening it may run any code; add --trust if only you could have written it"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="the folder of a run with HOLDFAST_RUN_DIR=folder, or a trainer-*.jsonl of it")
    parser.add_argument(
        "--incident", type=int, help="the incident's number in the file (by default the newest one with a sample)"
    )
    parser.add_argument(
        "--dataset", metavar="module:name", help="make the dataset anew instead of opening the one beside the file"
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="open the pickles of that run: they may run any code, so the run must be yours",
    )
    parser.add_argument("--pdb", action="store_true", help="open the debugger where the sample raises")


def run(chosen: argparse.Namespace) -> int:
    """0: it loads now. 1: it failed again. 2: bad input."""
    try:
        file, incident = _incident(Path(chosen.file), chosen.incident)
        again = _again(incident["again"], chosen.trust)
        with here_on_path():
            dataset = _dataset(file, chosen.dataset, chosen.trust)
    except BadInput as error:
        show(f"holdfast repro: {error}", sys.stderr)
        return 2
    show(f"{incident['headline']}\n  {incident['finding']}: {incident['says']}")
    show(f"loading index {shown(again.indices[-1])} of batch {again.batch} again, after the {again.position} before it")
    if chosen.pdb:
        return _debug(dataset, again)
    if incident["finding"].startswith(_DEADLY):
        return _in_child(dataset, again)
    return _load(dataset, again)


def _incident(place: Path, number: int | None) -> tuple[Path, dict[str, Any]]:
    """The newest incident with a sample, and its file. If a folder has several, the others are listed."""
    count, found = 0, []
    for file in incident_files(place):
        try:
            incidents = incidents_of(file)
        except (OSError, ValueError, RecursionError) as error:
            if not place.is_dir():
                raise BadInput(f"cannot read {file}: {error}") from error
            show(f"left out {file}: {error}", sys.stderr)
            continue
        count += len(incidents)
        found += [(file, one) for one in incidents if _is_loadable(one) and number in (None, one["number"])]
    if not found:
        which = f"no incident {number} with a sample" if number is not None else "no incident with a sample"
        raise BadInput(f"{which} in {place}; it has {count} incidents")
    found.sort(key=lambda one: _when(one[1]))
    if place.is_dir() and len(found) > 1:
        _list_others(found[:-1])
    return found[-1]


def _when(incident: dict[str, Any]) -> float:
    at = incident.get("at")
    return at if isinstance(at, int | float) else 0.0


def _list_others(others: list[tuple[Path, dict[str, Any]]]) -> None:
    """Those that were not chosen, the newest first, with what to type for each."""
    show(f"This is the newest of {len(others) + 1} incidents with a sample. The others:")
    for file, incident in others[: -_LISTED - 1 : -1]:
        show(wrapped(f"holdfast repro {file} --incident {incident['number']}: {incident['headline']}", "  ", "      "))
    if len(others) > _LISTED:
        show(f"  and {len(others) - _LISTED} older ones")
    show()


def _is_loadable(incident: Any) -> bool:
    """True if it has the fields of an incident with a sample; the file may hold anything."""
    if not isinstance(incident, dict) or not isinstance(again := incident.get("again"), dict):
        return False
    texts = [incident.get(name) for name in ("headline", "finding", "says")]
    numbers = [incident.get("number"), *(again.get(name) for name in ("seed", "batch", "position"))]
    kept = again.get("literal") or again.get("pickled")
    return all(isinstance(text, str) for text in (*texts, kept)) and all(isinstance(n, int) for n in numbers)


def _again(told: dict[str, Any], trust: bool) -> Again:
    if told.get("literal"):
        try:
            indices = from_text(told["literal"])
        except ValueError as error:
            raise BadInput(f"the indices of that incident cannot be read: {error}") from error
    elif trust:
        try:
            indices = from_pickle(told["pickled"])
        except Exception as error:
            raise BadInput(f"the indices of that incident cannot be opened here: {error!r}") from error
    else:
        raise BadInput(f"the indices of that incident are a pickle: {_TRUST}")
    return Again(told["seed"], told["batch"], indices, told["position"])


def _dataset(file: Path, target: str | None, trust: bool) -> Any:
    if target is not None:
        return make_dataset(target)[0]
    kept = file.with_suffix(".dataset")
    if not trust:
        found = f"the dataset in {kept} is a pickle: {_TRUST}" if kept.exists() else f"the dataset is not in {kept}"
        raise BadInput(f"{found}, or say --dataset module:name")
    try:
        return pickle.loads(kept.read_bytes())
    except OSError as error:
        raise BadInput(f"the dataset was not kept ({error}); say --dataset module:name") from error
    except Exception as error:
        raise BadInput(f"{kept} cannot be opened here ({error!r}); say --dataset module:name") from error


def _load(dataset: Any, again: Again) -> int:
    from holdfast.loader.seeds import Seeder  # here: it imports torch, which is no part of the sample's time

    seeder = Seeder()
    began = time.monotonic()
    try:
        sample = load_again(dataset, again, seeder)
    except Exception:
        show(traceback.format_exc().rstrip(), sys.stderr)
        show(f"it failed again, after {time.monotonic() - began:.1f} s")
        return 1
    show(f"it loads now, in {time.monotonic() - began:.1f} s: {type(sample).__name__}")
    return 0


def _debug(dataset: Any, again: Again) -> int:
    import pdb

    from holdfast.loader.seeds import Seeder

    try:
        load_again(dataset, again, Seeder())
    except Exception:
        show(traceback.format_exc().rstrip(), sys.stderr)
        pdb.post_mortem(sys.exc_info()[2])
        return 1
    show("it loads now")
    return 0


def _in_child(dataset: Any, again: Again) -> int:
    show("in a child of this process; Ctrl-C shows its stack and ends it")

    def child() -> int:
        faulthandler.enable(2)  # (the dataset's module may have replaced sys.stderr)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        faulthandler.register(signal.SIGUSR1, 2)
        return _load(dataset, again)

    pid = start_child(child)
    try:
        _, status = os.waitpid(pid, 0)
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        show(f"the child was ended by {signal_name(-code)}")
    return int(code != 0)


def load_again(dataset: Any, again: Again, seeder: "Seeder") -> Any:
    """Load one sample with the random numbers that it had.

    The samples before it in its batch are loaded first, because they draw from the same generators.
    """
    seeder.seed(again.seed, again.batch)
    *before, wanted = again.indices
    for index in before:
        try:
            dataset[index]
        except Exception as error:
            said = f"(index {shown(index)}, before it, raised {type(error).__name__}: {text_of(error)})"
            print(legible(said), file=sys.stderr)
    return dataset[wanted]
