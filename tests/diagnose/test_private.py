"""What Holdfast writes about a run is its user's alone, whatever the umask and whoever else writes into the folder."""

import os
import stat

import pytest

from holdfast.diagnose.run_folder import RunFolder
from holdfast.diagnose.stats import LoaderStats
from holdfast.launch.output import RankOutput
from holdfast.system import run_files
from holdfast.system.run_files import records_of

SOMEBODY = 65534


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o277], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


class Dataset:
    pass


def opened(folder):
    """The files for what one rank prints. What a failure leaves open is closed."""
    output = RankOutput(1, 1, folder, prefixed=False)
    try:
        output.open()
    finally:
        output.close()


def keep(folder):
    part = RunFolder(str(folder), "loader", Dataset())
    part.write({"headline": "it died"})
    part.write({"headline": "it died again"})
    part.write_totals(LoaderStats, running=False)
    return part


def test_a_run_folder_is_its_users_alone(tmp_path, umask):
    """Folders that Holdfast makes are 0700 and its files 0600: incidents, totals and the dataset."""
    keep(tmp_path / "deep" / "run")
    files = list((tmp_path / "deep" / "run").iterdir())
    assert sorted(file.suffix for file in files) == [".dataset", ".jsonl"]
    assert {mode(file) for file in files} == {0o600}
    assert mode(tmp_path / "deep") == mode(tmp_path / "deep" / "run") == 0o700


def test_what_ranks_print_is_their_users_alone(tmp_path, umask):
    """The same holds for the log_dir of spawn."""
    opened(tmp_path / "logs")
    (file,) = (tmp_path / "logs").iterdir()
    assert mode(file) == 0o600
    assert mode(tmp_path / "logs") == 0o700


@pytest.mark.parametrize("rights", [0o755, 0o2770, 0o777], ids=oct)
def test_a_folder_that_was_there_becomes_its_users_alone(tmp_path, caplog, rights):
    """Its rights and those of an earlier run's files; the log says so once."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(rights)
    part = RunFolder(str(tmp_path / "run"), "loader")
    part.file.write_text("{}\n")
    part.file.chmod(0o644)
    part.write({"headline": "it died"})
    part.write({"headline": "it died again"})
    part.write_totals(LoaderStats)
    assert mode(part.file) == 0o600
    assert part.file.read_text().startswith("{}\n")
    kinds = [record["record"] for record in records_of(part.file)]
    assert kinds == ["part", "incident", "incident", "totals"]
    assert mode(tmp_path / "run") == rights & 0o2700
    (said,) = caplog.messages
    assert f"{tmp_path / 'run'} was open to other users" in said


def test_a_log_dir_that_was_there_becomes_its_users_alone(tmp_path, caplog):
    """The same holds for spawn."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs").chmod(0o755)
    opened(tmp_path / "logs")
    opened(tmp_path / "logs")
    assert mode(tmp_path / "logs") == 0o700
    assert caplog.text.count("was open to other users") == 1


@pytest.mark.parametrize("other", ["sticky", "train.py", "rank-0-attempt-1.log"])
def test_a_folder_that_holds_other_things_stays_as_it_is(tmp_path, caplog, other):
    """A project, or /tmp, where root runs the training; the log says so once, and what is ours in it is 0600."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o1777 if other == "sticky" else 0o755)
    if other != "sticky":
        (tmp_path / "run" / other).touch()
    if other.startswith("rank"):
        if os.getuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(tmp_path / "run" / other, SOMEBODY, SOMEBODY)
    keep(tmp_path / "run")
    assert mode(tmp_path / "run") == (0o1777 if other == "sticky" else 0o755)
    assert {mode(path) for path in (tmp_path / "run").iterdir() if path.name != other} == {0o600}
    (said,) = caplog.messages
    assert "keeps its rights" in said and "a folder of its own" in said


@pytest.mark.parametrize("plant", [os.symlink, os.link], ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("what", ["log", "dataset", "thinned"])
def test_a_name_that_leads_elsewhere_is_not_written_through(tmp_path, caplog, monkeypatch, plant, what):
    """A link that somebody has put where our file goes changes nothing but our own folder."""
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "precious").chmod(0o644)
    part = RunFolder(str(tmp_path / "run"), "loader", Dataset())
    path = part.file.with_suffix({"log": ".jsonl", "dataset": ".dataset", "thinned": ".draft"}[what])
    plant(tmp_path / "precious", path)
    monkeypatch.setattr(run_files, "MOST_BYTES", 1 if what == "thinned" else run_files.MOST_BYTES)
    part.write({"headline": "it died"})
    part.write_totals(LoaderStats)
    assert (tmp_path / "precious").read_text() == "mine"
    assert mode(tmp_path / "precious") == 0o644
    assert ("cannot be kept" in caplog.text) == (what == "log")


def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path, caplog):
    """Opening one waits for a reader, who never comes."""
    part = RunFolder(str(tmp_path), "loader")
    os.mkfifo(part.file)
    part.write({"headline": "it died"})
    assert "cannot be kept" in caplog.text


def test_the_log_of_a_rank_is_not_written_through_a_link(tmp_path):
    """spawn refuses, and names the file."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "logs" / "rank-0-attempt-1.log").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"rank-0-attempt-1\.log"):
        opened(tmp_path / "logs")
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(tmp_path, caplog):
    """The message says whose it is and what to do."""
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", SOMEBODY, SOMEBODY)
    keep(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []
    assert f"belongs to uid {SOMEBODY}" in caplog.text
    assert "a folder of your own" in caplog.text
    with pytest.raises(PermissionError, match=f"belongs to uid {SOMEBODY}"):
        opened(tmp_path / "run")
    keep(tmp_path / "run" / "mine")
    assert len(list((tmp_path / "run" / "mine").iterdir())) == 2


def test_a_link_to_a_folder_of_the_users_is_followed(tmp_path):
    """Run folders often lie on another disk."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to("scratch")
    keep(tmp_path / "run")
    assert len(list((tmp_path / "scratch").iterdir())) == 2


@pytest.mark.parametrize(
    "stats",
    [
        lambda: 1 / 0,
        lambda: LoaderStats(caches={"odd": {(1, 2): 3}}),
        lambda: LoaderStats(caches={"odd": {"hits": object()}}),
    ],
)
def test_totals_that_cannot_be_told_are_said_once(tmp_path, caplog, stats):
    """What is read of the run is a help, and ends no epoch."""
    part = RunFolder(str(tmp_path), "loader")
    part.write_totals(stats)
    part.write_totals(stats, running=False)
    assert caplog.text.count("totals cannot be kept") == 1
