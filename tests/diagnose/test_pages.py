"""Each finding has a page of one form, and the index in the docs lists the pages and nothing else."""

import re
from collections import Counter
from pathlib import Path

import pytest

import holdfast

SOURCE = Path(holdfast.__file__).parent
PAGES = sorted((SOURCE / "diagnose" / "pages").glob("*.md"))
INDEX = SOURCE.parents[1] / "docs" / "findings.md"
SECTIONS = ["## What it means", "## How we know", "## What to do", "## When this is wrong"]
# A terminal at 3 a.m. may be narrow.
COLUMNS = 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_its_name_and_four_sections(page):
    """The first line names the finding; the four sections follow in order, and each says something."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(rf"# {page.stem}: \S.*", lines[0])
    assert [line for line in lines[1:] if re.match(r"#+ ", line)] == SECTIONS
    bodies = re.split(r"^## .*$", "\n".join(lines), flags=re.MULTILINE)[1:]
    assert all(body.strip() for body in bodies)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_fits_a_terminal(page):
    """No line is too long for it."""
    assert [line for line in page.read_text(encoding="utf-8").splitlines() if len(line) > COLUMNS] == []


def test_the_index_lists_each_page_once_and_nothing_else():
    """A page that is not in docs/findings.md cannot be found; a row without a page leads nowhere."""
    text = INDEX.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[([a-z-]+)\]\(\.\./src/holdfast/diagnose/pages/([a-z-]+)\.md\) \|", text, re.MULTILINE)
    assert all(name == file for name, file in rows)
    assert Counter(name for name, _ in rows) == Counter(page.stem for page in PAGES)
