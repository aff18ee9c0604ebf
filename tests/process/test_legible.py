"""Text of others (exceptions, logs, files, command lines) does nothing to the terminal that shows it."""

import json
import re
import unicodedata

import pytest
from torch.utils.data import Dataset

from holdfast import DataLoader, Policy, Pool, RankExited, RankRaised, WorkerLost
from holdfast.__main__ import main
from holdfast.core.messages import What
from holdfast.diagnose.finding import Case
from holdfast.diagnose.incident import incident_of
from holdfast.errors import HoldfastError, RemoteTraceback, SampleError, legible
from holdfast.remote_exception import Raised

# Clears the screen, sets the title, goes back to the line's begin, turns the direction of writing, breaks lines; and
# half a character, as file names have them.
HOSTILE = "no \x1b[2J\x1b]0;owned\x07 \r \x9b31m \x85 \x7f \x08 \u202egpj.exe\u202c \u2066 \u200f \u2028 \udc80 \ufeff"
HARMLESS = "Grüße, 日本\u3000語, ابجد, 👩\u200d🚀, 5\u00a0%\ttab\nline"


class Hostile(Dataset):
    """Every sample but the first raises; the index of the second is a file name."""

    def __init__(self, kind=ValueError):
        self.kind = kind

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index:
            raise self.kind(HOSTILE)
        return index


def make():
    return Hostile()


def odd(text):
    """Characters that a terminal does not just show."""
    return {
        char for char in text if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") and char not in "\t\n"
    } | set(re.findall("[\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]", text))


def run(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_RUN_DIR", str(tmp_path))
    loader = DataLoader(Hostile(), batch_size=2, num_workers=1, policy=Policy(bad_sample="skip", max_bad=1.0))
    assert len(list(loader)) == 1
    return loader


def test_only_what_a_terminal_obeys_is_escaped():
    """Letters of every script stay, tabs and line ends too; the rest is written as Python would."""
    assert legible(HARMLESS) == HARMLESS
    assert not odd(legible(HOSTILE))
    assert legible("\x1b[31m\r\x9b\u202e\udc80") == "\\x1b[31m\\r\\x9b\\u202e\\udc80"


def test_report_and_log_are_legible(monkeypatch, tmp_path, caplog):
    """A dataset's exception is escaped in the report and in the log, where it is one line; the JSON has it exactly."""
    loader = run(monkeypatch, tmp_path)
    report = loader.report()
    assert "\\x1b[2J" in str(report)
    assert not odd(str(report)) and not odd(report.text(80)) and not odd(caplog.text)
    assert all(len(record.message.splitlines()) == 1 for record in caplog.records)
    incident = json.loads(report.to_json())["incidents"][0]
    assert HOSTILE in incident["says"]
    assert not odd(report.to_json())


def test_a_log_line_is_one_line():
    """What an exception says after a line end does not look like a log line of its own."""
    raised = Raised("ValueError", "one\nWARNING all is well", "", None, None)
    line = incident_of(Case(what=What.BOOT, worker=0, raised=raised)).line
    assert "\n" not in line and "one\\nWARNING" in line


def test_top_is_legible(monkeypatch, tmp_path, capsys):
    """The last incident stands in it, and whatever somebody else has put into a file of totals."""
    run(monkeypatch, tmp_path)
    (file,) = tmp_path.glob("trainer-*.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    hostile = [{**each, "headline": HOSTILE} if each["record"] == "incident" else each for each in records]
    (tmp_path / "trainer-1-0.jsonl").write_text("".join(json.dumps(each) + "\n" for each in hostile))
    assert main(["top", str(tmp_path), "--once"]) == 0
    text = capsys.readouterr().out
    assert "\\x1b[2J" in text and not odd(text)
    assert main(["top", str(tmp_path), "--json"]) == 0
    assert HOSTILE in [shot["last_incident"] for shot in json.loads(capsys.readouterr().out)]


def test_repro_is_legible(monkeypatch, tmp_path, capsys):
    """The headline of the file and the exception that is raised again."""
    run(monkeypatch, tmp_path)
    (file,) = tmp_path.glob("trainer-*.jsonl")
    lines = [json.loads(line) | {"headline": HOSTILE} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["repro", str(file), "--dataset", "tests.process.test_legible:make"]) == 1
    said = capsys.readouterr()
    assert "\\x1b[2J" in said.out and "\\x1b[2J" in said.err
    assert not odd(said.out) and not odd(said.err)


def test_explain_is_legible(tmp_path, capsys):
    """A line of somebody else's log is quoted, not obeyed."""
    log = tmp_path / "a.log"
    line = f"\x1b[31mRuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. {HOSTILE}"
    log.write_bytes(line.encode(errors="surrogateescape"))
    assert main(["explain", str(log)]) == 0
    text = capsys.readouterr().out
    assert "\\x1b[31m" in text and not odd(text)
    assert main(["explain", str(log), "--json"]) == 0
    assert "\x1b[31m" in json.loads(capsys.readouterr().out)["findings"][0]["quotes"][0]["text"]
    assert main(["explain", "no\x1b[2Jfile"]) == 2
    assert not odd(capsys.readouterr().err)


def raises():
    raise ValueError(HOSTILE)


def test_doctor_is_legible(capfd):
    """What samples raise, and what making the dataset raises."""
    assert main(["doctor", "tests.process.test_legible:make", "--workers", "1", "--samples", "6"]) == 1
    text = capfd.readouterr()
    assert "\\x1b[2J" in text.out and not odd(text.out) and not odd(text.err)
    assert main(["doctor", "tests.process.test_legible:raises"]) == 2
    said = capfd.readouterr().err
    assert "\\x1b[2J" in said and not odd(said)


def test_the_users_own_exception_stays_as_it_is():
    """It is raised as itself, with every character; what we say beside it is escaped."""
    loader = DataLoader(Hostile(), batch_size=2, num_workers=1)
    with pytest.raises(ValueError) as caught:
        list(loader)
    assert str(caught.value) == HOSTILE
    assert caught.value.args == (HOSTILE,)
    assert not odd("".join(caught.value.__notes__)) and not odd(str(caught.value.__cause__))
    with Pool(1, mp_context="fork") as pool, pytest.raises(ValueError) as caught:
        pool.submit(raises).result()
    assert str(caught.value) == HOSTILE
    assert not odd("".join(caught.value.__notes__))


def test_our_own_exceptions_are_legible():
    """Their text shows what others said; their arguments have it exactly."""
    for kind in (HoldfastError, WorkerLost, SampleError, RemoteTraceback, RankExited, RankRaised):
        error = kind(HOSTILE)
        assert not odd(str(error)) and "\\x1b[2J" in str(error)
        assert error.args[0] == HOSTILE
    loader = DataLoader(Hostile(SystemExit), batch_size=2, num_workers=1)
    with pytest.raises(SampleError) as caught:
        list(loader)
    assert not odd(str(caught.value))
