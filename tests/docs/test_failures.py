"""docs/failures.md is written by `make failures`; here one of the eight is made, and what comes back is looked at."""

import os
import re

import pytest

from benchmarks import failures, train

SEGFAULT = next(failure for failure in failures.FAILURES if failure.name == "segfault")


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where the run has its folder."""
    monkeypatch.setattr(failures.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_segfault_with_both_loaders(temporary):
    theirs, ours, again = failures.runs_of(SEGFAULT)
    assert (theirs.loader, ours.loader) == ("torch", "Holdfast")
    assert again.loader == "Holdfast, `HOLDFAST_BAD_SAMPLE=skip`"
    assert (theirs.end, ours.end, again.end) == ("exit 1", "exit 1", "exit 0")
    # torch loses what other workers had made ready; Holdfast gives all before the batch, or all but one sample.
    before = train.BAD // 16 * 16
    assert theirs.right <= ours.right == before and again.right == train.SAMPLES - 1
    assert "DataLoader worker" in theirs.last[-1]  # torch names the signal only if it hears of it first
    assert any(f"index {train.BAD}" in line for line in ours.last + again.last)
    assert again.last[-1] == "the epoch is complete"
    for run in (theirs, ours, again):
        assert 0 < run.seconds < failures.LIMIT_S and 0 < len(run.last) <= failures.LINES
        assert not any(str(place) in line for line in run.last for place in (temporary, failures.ROOT))
        assert all(len(line) <= failures.COLUMNS for line in run.last)
    assert not os.listdir(temporary)


def test_the_page_has_all_eight_and_only_one_import_differs():
    page = failures.PAGE.read_text()
    titles = re.findall(r"^## \d\. (.*)", page, re.MULTILINE)
    assert titles == [failure.title for failure in failures.FAILURES] and len(titles) == 8
    assert page.startswith(failures.INTRODUCTION)
    assert failures.SCRIPT.read_text().count(f"\n{failures.THEIRS}\n") == 1
    assert set(train.FAILURES) == {failure.name for failure in failures.FAILURES}
