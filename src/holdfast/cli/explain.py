"""Say what a log or a traceback of any program means, or a run folder of Holdfast, or show the page of a finding.

A file, a folder, standard input or the name of a finding comes in; text or JSON goes out. diagnose/foreign_logs.py
knows the lines.
"""

import argparse
import difflib
import json
import sys
from dataclasses import asdict
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from holdfast.cli import show, wrapped
from holdfast.diagnose.foreign_logs import KINDS, Explained, explain, last_exception
from holdfast.diagnose.run_folder import INCIDENT, PART
from holdfast.system.run_files import records_of

LABEL = 11  # as wide as "    seen   ", so that the text behind all labels stands in one column


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="?", help="a log file, a run folder, - for standard input, or the name of a finding"
    )
    parser.add_argument("--list", action="store_true", help="list all findings that have a page")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(chosen: argparse.Namespace) -> int:
    if chosen.list:
        return _list(chosen.json)
    if chosen.what is None and sys.stdin.isatty():
        return _fail("give a log file, - for standard input, or the name of a finding (--list shows them)")
    if chosen.what in (None, "-"):
        return _explain(sys.stdin.buffer.read().decode(errors="replace"), chosen.json)
    path = Path(chosen.what)
    if path.is_dir() or (path.suffix == ".jsonl" and path.is_file()):
        return _explain_run(path, chosen.json)
    if path.exists():
        try:
            text = path.read_bytes().decode(errors="replace")
        except OSError as error:
            return _fail(f"cannot read {path}: {error.strerror}")
        return _explain(text, chosen.json)
    return _page(chosen.what, chosen.json)


def _explain(text: str, as_json: bool) -> int:
    found = explain(text)
    lines = len(text.splitlines())
    if as_json:
        told = {"lines": lines, "findings": [asdict(one) for one in found]}
        print(json.dumps(told if found else told | {"last_exception": last_exception(text)}, indent=2))
    elif found:
        pages = _pages()
        show("\n\n".join(_told(one, one.name in pages) for one in found))
    else:
        show(f"no known finding in {lines} line{'' if lines == 1 else 's'}")
        if last := last_exception(text):
            show(wrapped(f"The last exception in it is the program's own; its text is all that is known: {last}"))
        show(wrapped("It knows these logs: " + "; ".join(KINDS) + "."))
    return 0 if found else 1


def _told(one: Explained, has_page: bool) -> str:
    sure = "" if one.confidence == "certain" else f" ({one.confidence})"
    rows = [_row(f"line {quote.line}", quote.text) for quote in one.quotes]
    if one.lines > len(one.quotes):
        more = one.lines - len(one.quotes)
        rows.append(_row("", f"and {more} more line{'' if more == 1 else 's'} like these"))
    if one.follows_from:
        rows.append(_row("follows", "from " + ", ".join(one.follows_from)))
    rows.append(_row("try", one.advice))
    if has_page:
        rows.append(_row("more", f"holdfast explain {one.name}"))
    return "\n".join([wrapped(f"{one.name}: {one.says}{sure}", margin="  "), *rows])


def _row(label: str, text: str) -> str:
    return wrapped(text, f"    {label}".ljust(LABEL - 1) + " ", " " * LABEL)


def incidents_of(file: Path) -> list[dict[str, Any]]:
    """What a loader, a pool or ranks wrote with HOLDFAST_RUN_DIR. Raises OSError or ValueError if it is no such file;
    the fields of a record may hold anything.
    """
    head, *rest = records_of(file)
    if head["record"] != PART:
        raise ValueError("no log of a run folder")
    return [record for record in rest if record["record"] == INCIDENT and isinstance(record.get("headline"), str)]


def incident_files(place: Path) -> list[Path]:
    """Those of a run folder, the oldest first; or the one that was given."""
    if not place.is_dir():
        return [place]
    return sorted(filter(Path.is_file, place.glob("trainer-*.jsonl")), key=lambda file: file.stat().st_mtime)


def _explain_run(place: Path, as_json: bool) -> int:
    """Each finding once, with its last incident."""
    files, incidents, odd = incident_files(place), [], []
    for file in files:
        try:
            incidents += [record | {"file": file.name} for record in incidents_of(file)]
        except (OSError, ValueError, RecursionError) as error:
            odd.append(f"left out {file.name}: {error}")
    if place.is_dir() and not files:
        return _fail(f"{place} is no run folder: it has no trainer-*.jsonl. Give a log file, or its folder")
    same: dict[str, list[dict[str, Any]]] = {}
    for incident in incidents:
        same.setdefault(str(incident.get("finding", "unknown")), []).append(incident)
    if as_json:
        findings = [{"name": name, "count": len(own), "last": own[-1]} for name, own in same.items()]
        print(json.dumps({"incidents": len(incidents), "findings": findings, "left_out": odd}, indent=2))
        return 0 if same else 1
    kind = "A run folder" if place.is_dir() else "A file of a run folder"
    count = f"{len(incidents) or 'no'} incident{'' if len(incidents) == 1 else 's'}"
    show(wrapped(f"{kind} of Holdfast, with {count}: {place}", margin="  "))
    for line in odd:
        show(wrapped(line, margin="  "))
    for name, own in same.items():
        show(f"\n{_incidents_told(name, own)}")
    samples = [incident for incident in incidents if isinstance(incident.get("again"), dict)]
    if samples:
        show(f"\nTo load a sample of it again: holdfast repro {place}")
    if place.is_dir():
        show(f"{'' if samples else chr(10)}For all of it: holdfast report {place}")
    return 0 if same else 1


def _incidents_told(name: str, own: list[dict[str, Any]]) -> str:
    last = own[-1]
    seen = last.get("seen")
    rows = [_row("last" if len(own) > 1 else "what", f"{last['headline']} ({last['file']})")]
    rows += [_row("seen", "; ".join(map(str, seen)))] if isinstance(seen, list) and seen else []
    rows += [_row(label, str(last[key])) for label, key in (("did", "did"), ("try", "advice")) if last.get(key)]
    rows += [_row("more", f"holdfast explain {name}")] if name in _pages() else []
    times = f" x{len(own)}" if len(own) > 1 else ""
    return "\n".join([wrapped(f"{name}{times}: {last.get('says', '')}", margin="  "), *rows])


def _list(as_json: bool) -> int:
    summaries = {name: _summary(page) for name, page in sorted(_pages().items())}
    if as_json:
        print(json.dumps(summaries, indent=2))
        return 0
    width = max(map(len, summaries), default=0)
    for name, summary in summaries.items():
        show(wrapped(summary, f"{name:<{width}}  ", " " * (width + 2)))
    return 0


def _page(name: str, as_json: bool) -> int:
    pages = _pages()
    if name not in pages:
        near = difflib.get_close_matches(name, pages, n=4, cutoff=0.5)
        near += [other for other in pages if name in other and other not in near]
        hint = f"; names like it: {', '.join(near)}" if near else "; --list shows all findings"
        return _fail(f"{name!r} is neither a file nor a finding{hint}")
    text = pages[name].read_text(encoding="utf-8")
    if as_json:
        print(json.dumps({"name": name, "page": text}, indent=2))
    else:
        show(text.rstrip())
    return 0


def _pages() -> dict[str, Traversable]:
    """The pages of findings, by name."""
    folder = resources.files("holdfast.diagnose") / "pages"
    if not folder.is_dir():
        return {}
    return {page.name.removesuffix(".md"): page for page in folder.iterdir() if page.name.endswith(".md")}


def _summary(page: Traversable) -> str:
    """The text behind the name in the first line of the page."""
    first = page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    return first.partition(":")[2].strip() or first


def _fail(words: str) -> int:
    show(f"holdfast explain: {words}", sys.stderr)
    return 2
