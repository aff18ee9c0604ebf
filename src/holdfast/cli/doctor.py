"""Check this machine, its libraries and your dataset before a training run, and say what to set.

Exit status: 0 if there is no problem, 1 if there is one (with --strict also for a warning), 2 if the dataset could not
be made.
"""

import argparse
import contextlib
import importlib
import json
import logging
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from holdfast import __version__
from holdfast.cli import columns, show, wrapped
from holdfast.cli.apart import Died, Say, apart
from holdfast.diagnose.fitness import Measured, check_dataset, percentile
from holdfast.diagnose.forecast import Forecast, Setting, forecast, memory_forecast, recommend
from holdfast.diagnose.libraries import (
    bug_report,
    check_process,
    file_positions,
    fork_dangers,
    native_threads,
    read_process,
)
from holdfast.diagnose.machine import Machine, read_machine
from holdfast.diagnose.machine_checks import Check, check_machine
from holdfast.pool.progress import is_terminal

SCHEMA = 1
_COLOURS = {"ok": "32", "warning": "33", "problem": "31"}
_NAME_WIDTH, _LABEL_WIDTH = 18, 14
# On a narrower terminal, what follows a check begins further to the left.
_WIDE = 80


class BadInput(Exception):
    """The given words lead to no dataset; the text is one line."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that was found, for the terminal and for JSON."""

    machine: Machine
    groups: dict[str, tuple[Check, ...]]
    about: dict[str, str]
    """For a bug report."""
    measured: Measured | None = None
    expected: Forecast | None = None
    setting: Setting | None = None

    def count(self, verdict: str) -> int:
        return sum(check.verdict == verdict for checks in self.groups.values() for check in checks)

    def status(self, strict: bool) -> int:
        return 1 if self.count("problem") or (strict and self.count("warning")) else 0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dataset", nargs="?", metavar="module:name", help="a Dataset, its class, or a function that makes it"
    )
    parser.add_argument(
        "--workers", type=_count, help="the number of workers you want (by default one for each usable processor)"
    )
    parser.add_argument("--batch-size", type=_positive, default=32, help="samples per batch (32)")
    parser.add_argument(
        "--samples", type=_positive, default=64, help="how many samples to try, from the whole dataset (64)"
    )
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds before a sample counts as hung (30)")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for trying all samples (120)")
    parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings too")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def run(chosen: argparse.Namespace) -> int:
    logging.getLogger("holdfast").addHandler(logging.NullHandler())  # the checks have all incidents
    if not 0 < chosen.timeout < math.inf or not 0 < chosen.budget < math.inf:
        print("holdfast doctor: --timeout and --budget must be seconds above 0", file=sys.stderr)
        return 2
    try:
        with here_on_path():
            found = examine(chosen) if chosen.dataset is None else apart(lambda say: examine(chosen, say), (BadInput,))
    except BadInput as error:
        show(f"holdfast doctor: {error}", sys.stderr)
        return 2
    except Died as death:
        show(f"holdfast doctor: {death.doing} ended the process ({death.how})", sys.stderr)
        return 2
    if chosen.json:
        print(json.dumps(to_dict(found, chosen.strict), default=repr, indent=2))
    else:
        _draw(found, chosen.dataset)
    return found.status(chosen.strict)


def examine(chosen: argparse.Namespace, say: Say = lambda doing: None) -> Diagnosis:
    """Read, try out, judge. Before it runs user code, which could end this process, it tells `say`."""
    import torch  # before threads and files are counted: what torch itself starts is not the dataset's

    machine = read_machine()
    workers = machine.cpus if chosen.workers is None else chosen.workers
    threads, files = native_threads(), file_positions()
    measured = None
    dataset, expression, import_s = None, "", 0.0
    # Our JSON goes to stdout, so what the dataset prints goes to stderr.
    with contextlib.redirect_stdout(sys.stderr):
        if chosen.dataset is not None:
            say(f"importing and making {chosen.dataset}")
            dataset, expression, import_s = make_dataset(chosen.dataset)
            say(f"trying out {chosen.dataset}")
        cuda = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
        process = read_process(cuda=cuda, threads_before=threads, files_before=files)
        if chosen.dataset is not None:
            before = file_positions()
            measured = _try_out(dataset, expression, import_s, chosen)
            after = file_positions()
            moved = tuple(path for path in process.open_files if before.get(path) != after.get(path))
            process = replace(process, picklable=not measured.unpicklable, moved=moved if measured.samples else None)
    groups = {
        "machine": check_machine(machine, workers),
        "libraries": check_process(process, workers, machine.cpus, measured is not None),
    }
    about = bug_report(machine, process, __version__)
    if measured is None:
        return Diagnosis(machine, groups, about)
    fork_safe = not fork_dangers(process)
    groups["dataset"] = check_dataset(replace(measured, fork_safe=fork_safe), workers)
    if not measured.samples:
        return Diagnosis(machine, groups, about, measured)  # there is no figure to forecast from
    expected = forecast(machine, measured, workers, chosen.batch_size)
    groups["dataset"] += (memory_forecast(expected),)
    setting = recommend(machine, measured, chosen.batch_size, fork_safe, chosen.workers)
    return Diagnosis(machine, groups, about, measured, expected, setting)


def _try_out(dataset: Any, expression: str, import_s: float, chosen: argparse.Namespace) -> Measured:
    from holdfast.loader.probe import probe

    with _progress(chosen.dataset) as progress:
        return probe(
            dataset,
            chosen.dataset,
            expression=expression,
            samples=chosen.samples,
            sample_timeout=chosen.timeout,
            budget_s=chosen.budget,
            import_s=import_s,
            progress=progress,
        )


# The dataset ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def here_on_path() -> Iterator[None]:
    """The current folder is on sys.path, as with `python -m`."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)


def make_dataset(target: str) -> tuple[Any, str, float]:
    """The dataset, the Python expression that makes it, and the seconds that the import of its module took."""
    from torch.utils.data import DataLoader  # before the clock starts: the import of torch is not the module's

    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise BadInput(f"{target!r} names no dataset; write module:name, e.g. data:train_set")
    began = time.perf_counter()
    found: Any = _guarded(f"importing {module_name}", lambda: importlib.import_module(module_name))
    import_s = time.perf_counter() - began
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise BadInput(f"{module_name} has no {path!r}; it has: {_names(found)}") from None
    expression = f"{module_name}.{path}"
    if isinstance(found, type) or (callable(found) and not _is_dataset(found)):
        found = _guarded(f"{path}()", found)
        expression += "()"
    if isinstance(found, DataLoader):
        found, expression = found.dataset, f"{expression}.dataset"
    if not _is_dataset(found):
        raise BadInput(f"{target} gives a {type(found).__name__}, which has neither __getitem__ nor __iter__")
    return found, expression, import_s


def _guarded(doing: str, call: Any) -> Any:
    """Call user code. What it raises becomes one line that says where."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1] if frames else None
        own = last is None or "importlib" in last.filename or last.filename == __file__
        where = "" if own or last is None else f" at {last.filename}:{last.lineno}"
        text = " ".join(str(error).split())
        raise BadInput(f"{doing} raised {type(error).__name__}: {text}{where}") from error


def _is_dataset(value: Any) -> bool:
    from torch.utils.data import DataLoader, Dataset

    if isinstance(value, DataLoader | Dataset):
        return True
    return hasattr(value, "__getitem__") or hasattr(value, "__iter__")


def _names(place: Any) -> str:
    """Names that the user may have meant: those that the module defines itself."""
    from torch.utils.data import Dataset

    home = getattr(place, "__name__", "")
    own = [
        name
        for name, value in getattr(place, "__dict__", {}).items()
        if not name.startswith("_") and (callable(value) or _is_dataset(value))
        if getattr(value, "__module__", home) == home or isinstance(value, Dataset)
    ]
    return ", ".join(own[:8]) + (", ..." if len(own) > 8 else "") if own else "nothing that looks like a dataset"


@contextlib.contextmanager
def _progress(name: str) -> Iterator[Any]:
    """One line on stderr. On a terminal it counts the samples, and vanishes at the end."""
    if not is_terminal(sys.stderr):
        print(f"trying samples of {name} in a supervised worker", file=sys.stderr, flush=True)
        yield lambda done, total: None
        return

    def show(done: int, total: int) -> None:
        print(f"\rtrying samples of {name}: {done} of {total}", end="", file=sys.stderr, flush=True)

    print(f"trying samples of {name}", end="", file=sys.stderr, flush=True)
    try:
        yield show
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


# What people and programs read ---------------------------------------------------------------------------------------


def _draw(found: Diagnosis, target: str | None) -> None:
    titles = {"machine": "Machine", "libraries": "Libraries", "dataset": f"Dataset {target}"}
    for name, checks in found.groups.items():
        show(titles[name])
        for check in checks:
            _draw_check(check)
        show()
    if found.setting is not None:
        show("To paste")
        show("\n".join(f"  {line}" for line in found.setting.code.splitlines()))
        show()
        for reason in found.setting.reasons:
            show(wrapped(reason, "  ", "    "))
        show()
    show("For a bug report")
    for name, text in found.about.items():
        show(wrapped(text, f"  {name.ljust(_LABEL_WIDTH)} ", " " * (_LABEL_WIDTH + 3)))
    show()
    problems, warnings = found.count("problem"), found.count("warning")
    show(f"{_number(problems, 'problem')}, {_number(warnings, 'warning')}, {found.count('ok')} ok")


def _number(count: int, word: str) -> str:
    return f"{count or 'no'} {word}{'' if count == 1 else 's'}"


def _draw_check(check: Check) -> None:
    head = f"  {check.verdict.ljust(7)}  {check.name.ljust(_NAME_WIDTH)} "
    margin = " " * (len(head) if columns() >= _WIDE else 4)
    text = wrapped(check.says, head, margin)
    if is_terminal(sys.stdout) and not os.environ.get("NO_COLOR"):
        text = text.replace(check.verdict, f"\033[{_COLOURS[check.verdict]}m{check.verdict}\033[0m", 1)
    print(text)
    if check.verdict == "ok":
        return
    for i, fact in enumerate(check.seen):
        show(wrapped(fact, f"{margin}{'seen' if i == 0 else '    '}  ", f"{margin}      "))
    show(wrapped(check.advice, f"{margin}try   ", f"{margin}      "))


def to_dict(found: Diagnosis, strict: bool = False) -> dict[str, Any]:
    """The JSON answer, schema 1. It has figures of all samples, and every bad sample in full."""
    answer: dict[str, Any] = {
        "schema": SCHEMA,
        "exit_status": found.status(strict),
        "counts": {verdict: found.count(verdict) for verdict in _COLOURS},
        "checks": [{"group": name, **asdict(c)} for name, checks in found.groups.items() for c in checks],
        "bug_report": found.about,
        "machine": {**asdict(found.machine), "cpus": found.machine.cpus, "memory_free": found.machine.memory_free},
    }
    if found.measured is not None:
        answer["dataset"] = _dataset(found.measured)
    if found.expected is not None:
        totals = {"waiting_bytes": found.expected.waiting_bytes, "total_bytes": found.expected.total_bytes}
        answer["forecast"] = asdict(found.expected) | totals
    if found.setting is not None:
        answer["setting"] = {**asdict(found.setting), "code": found.setting.code}
    return answer


def _dataset(measured: Measured) -> dict[str, Any]:
    seconds, sizes = measured.seconds, [sample.bytes for sample in measured.samples]
    kept = ("name", "kind", "length", "asked", "import_s", "pickled_bytes", "unpicklable", "start_method", "cut_short")
    return {name: getattr(measured, name) for name in kept} | {
        "loaded": len(seconds),
        "median_s": percentile(seconds, 0.5),
        "p95_s": percentile(seconds, 0.95),
        "slowest_s": max(seconds, default=0.0),
        "mean_bytes": sum(sizes) / len(sizes) if sizes else 0,
        "largest_bytes": max(sizes, default=0),
        "growth_bytes_per_sample": measured.growth_bytes,
        "descriptors_per_sample": measured.leaked_descriptors,
        "shapes": sorted({sample.shape for sample in measured.samples}),
        "bad": [asdict(bad) for bad in measured.bad],
    }
