"""Say what a log or a traceback of any program means, or show the page of a finding.

A file, standard input or the name of a finding comes in; text or JSON goes out. diagnose/foreign_logs.py knows the
lines.
"""

import argparse
import difflib
import json
import sys
import textwrap
from dataclasses import asdict
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from holdfast.cli import show
from holdfast.diagnose.foreign_logs import KINDS, Explained, explain

WIDTH = 110  # wide enough for a log line, narrow enough for a terminal beside an editor
LABEL = 11  # as wide as "    seen   ", so that the text behind all labels stands in one column


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", help="a log file, - for standard input, or the name of a finding")
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
        print(json.dumps({"lines": lines, "findings": [asdict(one) for one in found]}, indent=2))
    elif found:
        pages = _pages()
        show("\n\n".join(_told(one, one.name in pages) for one in found))
    else:
        show(f"no known finding in {lines} lines")
        show(textwrap.fill("It knows these logs: " + "; ".join(KINDS) + ".", WIDTH))
    return 0 if found else 1


def _told(one: Explained, has_page: bool) -> str:
    sure = "" if one.confidence == "certain" else f" ({one.confidence})"
    rows = [_row(f"line {quote.line}", quote.text) for quote in one.quotes]
    if one.lines > len(one.quotes):
        rows.append(_row("", f"and {one.lines - len(one.quotes)} more lines like these"))
    if one.follows_from:
        rows.append(_row("follows", "from " + ", ".join(one.follows_from)))
    rows.append(_row("try", one.advice))
    if has_page:
        rows.append(_row("more", f"holdfast explain {one.name}"))
    return "\n".join([textwrap.fill(f"{one.name}: {one.says}{sure}", WIDTH, subsequent_indent="  "), *rows])


def _row(label: str, text: str) -> str:
    head = f"    {label}".ljust(LABEL - 1) + " "
    return textwrap.fill(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * LABEL, break_long_words=False, break_on_hyphens=False
    )


def _list(as_json: bool) -> int:
    summaries = {name: _summary(page) for name, page in sorted(_pages().items())}
    if as_json:
        print(json.dumps(summaries, indent=2))
        return 0
    width = max(map(len, summaries), default=0)
    for name, summary in summaries.items():
        show(f"{name:<{width}}  {summary}")
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
