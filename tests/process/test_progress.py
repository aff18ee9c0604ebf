"""Progress of a map: counted right, said where it belongs, and of no harm to the work."""

import io
import os
import pty
import re
import subprocess
import sys
import time
from functools import partial

import pytest

from holdfast import Policy, Pool, Progress

from . import calls
from .test_chunks import fail, kill

SCRIPT = """
from holdfast import Pool
from tests.process import calls
with Pool(2, mp_context="fork") as pool:
    list(pool.map(calls.nap, [0.05] * 30, {}))
print("next", flush=True)
"""


def said(*more):
    """What a function is told."""
    told = []

    def show(progress):
        assert isinstance(progress, Progress)
        told.append(progress)

    return told, show


@pytest.mark.parametrize("chunksize", [1, 7])
def test_the_last_word_has_all_of_them(chunksize):
    told, show = said()
    with Pool(2, mp_context="fork") as pool:
        list(pool.map(calls.square, range(100), chunksize=chunksize, progress=show))
        last = told[-1]  # said before the last result was taken
        assert (last.label, last.done, last.total, last.failed, last.over) == ("square", 100, 100, 0, True)
    assert [progress.over for progress in told].count(True) == 1


@pytest.mark.parametrize("chunksize", [1, 10])
def test_failed_and_retried_are_counted(chunksize, tmp_path):
    told, show = said()
    with Pool(2, mp_context="fork", policy=Policy(retries=1)) as pool:
        once = partial(calls.square_or, what=partial(calls.mark_and_die, tmp_path, 1), at=14)
        got = pool.map(once, range(30), chunksize=chunksize, return_exceptions=True, progress=show)
        assert not [x for x in got if isinstance(x, Exception)]
        got = pool.map(partial(calls.square_or, what=kill, at=14), range(30), return_exceptions=True, progress=show)
        list(got)
        got = pool.map(partial(calls.square_or, what=fail, at=14), range(30), return_exceptions=True, progress=show)
        list(got)
    counted = [(last.done, last.failed, last.retried) for last in told if last.over]
    assert counted == [(30, 0, 1), (30, 1, 1), (30, 1, 0)]


def test_the_length_of_a_generator_is_known_at_its_end():
    told, show = said()
    with Pool(2, mp_context="fork") as pool:
        got = pool.map(calls.nap, (0.02 for _ in range(150)), buffersize=4, progress=show)
        list(got)
    assert told[0].total is None
    assert told[0].left_s is None
    assert (told[-1].done, told[-1].total) == (150, 150)


def test_it_is_said_also_while_nothing_ends():
    told, show = said()
    with Pool(1, mp_context="fork") as pool:
        list(pool.map(calls.nap, [2.5], progress=show))
    assert [progress.done for progress in told] == [0, 0, 1]
    assert all(progress.running == 1 for progress in told[:-1])


def test_it_is_said_when_nobody_takes_the_results():
    told, show = said()
    with Pool(2, mp_context="fork") as pool:
        pool.map(calls.square, range(10), progress=show)
    assert told[-1].over
    assert told[-1].done == 10


def test_whoever_takes_no_more_hears_no_more():
    told, show = said()
    with Pool(2, mp_context="fork") as pool:
        got = pool.map(calls.nap, [0.0, 100.0], progress=show)
        next(got)
        got.close()
        assert told[-1].over
        time.sleep(0.05)
        assert pool.submit(calls.square, 3).result() == 9
    assert len([progress for progress in told if progress.over]) == 1


def test_a_function_that_raises_does_not_harm_the_work(caplog):
    def show(progress):
        raise ValueError("not in the mood")

    with Pool(2, mp_context="fork") as pool:
        assert list(pool.map(calls.square, range(10), progress=show)) == [x * x for x in range(10)]
    assert "progress of square cannot be shown" in caplog.text
    assert "not in the mood" in caplog.text


class Odd(io.StringIO):
    """What a program has put in the place of stderr."""

    def isatty(self):
        raise OSError("no idea")


class OddAnswer(io.StringIO):
    class Neither:
        def __bool__(self):
            raise TypeError("neither yes nor no")

    def isatty(self):
        return self.Neither()


class Bare:
    """A stream that knows how to write, and no more."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def getvalue(self):
        return self.text


class Asked(Bare):
    @property
    def isatty(self):
        raise RuntimeError("not now")


class NoMethod(Bare):
    isatty = None


@pytest.mark.parametrize("kind", [Odd, OddAnswer, Bare, Asked, NoMethod])
def test_a_stream_that_does_not_say_what_it_is_is_no_terminal(kind, monkeypatch):
    """It gets lines, as a log file does."""
    stream = kind()
    with Pool(2, mp_context="fork") as pool:
        monkeypatch.setattr(sys, "stderr", stream)
        try:
            assert list(pool.map(calls.square, range(10), progress=True)) == [x * x for x in range(10)]
        finally:
            monkeypatch.undo()
    assert re.fullmatch(r"square: 10 of 10 done, [\d.,]+/s, in 0:0\d\n", stream.getvalue())


def test_a_stream_that_is_closed_does_not_harm_the_work(monkeypatch):
    """It cannot even be asked whether it is a terminal."""
    stream = io.StringIO()
    stream.close()
    with Pool(2, mp_context="fork") as pool:
        monkeypatch.setattr(sys, "stderr", stream)
        try:
            assert list(pool.map(calls.square, range(10), progress=True)) == [x * x for x in range(10)]
        finally:
            monkeypatch.undo()


def test_nothing_is_said_unless_asked(capfd):
    with Pool(2, mp_context="fork") as pool:
        list(pool.map(calls.square, range(10)))
    assert capfd.readouterr() == ("", "")


def test_in_a_log_file_a_line_and_no_more():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format("progress=True")], capture_output=True, text=True, check=True, timeout=60
    )
    assert re.fullmatch(r"nap: 30 of 30 done, [\d.]+/s, in 0:0\d\n", done.stderr)


def test_on_a_terminal_one_line_is_rewritten():
    """The last look ends it, and stands before what the program prints next."""
    ours, theirs = pty.openpty()
    script = SCRIPT.format("progress='tiles'")
    with subprocess.Popen([sys.executable, "-c", script], stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        text = ""
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # as a terminal says that nobody is there
                break
            text += data.decode()
        assert process.wait(60) == 0
    os.close(ours)
    lines = text.split("\r\n")
    assert lines[1:] == ["next", ""]
    looks = lines[0].removeprefix("\r").split("\r")
    assert len(looks) > 2
    assert all(re.match(r"tiles: \d+ of 30 done, [\d.]+/s", look) for look in looks)
    assert re.search(r"2 running, 0:0\d left", looks[1])
    assert looks[-1].startswith("tiles: 30 of 30 done")


def test_the_words_of_a_line():
    line = Progress("work", 1234, 10_000, 3, 1, 8, 20.0, 57.3, False)
    assert str(line) == "work: 1,234 of 10,000 done, 57.3/s, 3 failed, 1 retried, 8 running, 2:33 left"
    assert str(Progress("work", 7, None, 0, 0, 2, 3725.0, 0.5, False)) == "work: 7 done, 0.5/s, 2 running, 1:02:05"
    assert str(Progress("work", 9, 9, 0, 0, 0, 61.0, 0.5, True)) == "work: 9 of 9 done, 0.5/s, in 1:01"
