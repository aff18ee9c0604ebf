"""What a worker writes of itself: its stage, and the sample at hand since when; whichever way it is done."""

import os
import time

import numpy as np
import pytest
import torch

from holdfast.core.host import POSITION, SINCE, STAGE
from holdfast.core.messages import Stage
from holdfast.local.protocol import pulse
from holdfast.local.protocol.pulse import (
    INDEX,
    INDEX_KIND,
    INDEX_TEXT,
    PAGE,
    TEXT_BYTES,
    PlainRecorder,
    Pulse,
    new_words,
)
from holdfast.shm.memory_file import Memory, new_file

try:
    from holdfast.local.protocol._pulse import Recorder
except ImportError:
    Recorder = None

WORDS = (STAGE, POSITION, SINCE, INDEX, INDEX_KIND, INDEX_TEXT)
# What the coarse clock may be behind, and a busy machine.
COARSE_NS = 1_000_000_000
compiled_only = pytest.mark.skipif(
    Recorder is None, reason="without local/protocol/_pulse.c: only PlainRecorder is tested"
)


@pytest.fixture(params=["python", pytest.param("compiled", marks=compiled_only)])
def made(request):
    """Makes a recorder for words."""
    return PlainRecorder if request.param == "python" else lambda words: Recorder(words, *WORDS)


class Page:
    """The page of a worker."""

    def __init__(self):
        fd = new_file("pulse", PAGE)
        self.pulse = Pulse(Memory(fd, PAGE), 0)
        os.close(fd)
        self.words = self.pulse.words


def repr_of(value):
    return str(value)[:20] if isinstance(value, (int, str)) else type(value).__name__


@compiled_only
def test_the_compiled_one_is_taken():
    assert isinstance(pulse.recorder(new_words()), Recorder)


@pytest.mark.parametrize("kind", [list, tuple, iter, dict.fromkeys])
def test_each_is_noted_before_it_is_given(made, kind):
    words, indices = new_words(), ["a", "b", "c", "d"]
    seen = []
    for index in made(words).walk(4, kind(indices)):
        assert words[STAGE] == 4
        assert abs(words[SINCE] - time.monotonic_ns()) < COARSE_NS
        seen.append((words[POSITION], index))
    assert seen == list(enumerate(indices))
    assert words[POSITION] == 3  # the end is no sample


def test_it_goes_on_where_somebody_stopped(made):
    words = new_words()
    walk = made(words).walk(4, "vwxyz")
    for index in walk:
        if index == "w":
            break
    assert words[POSITION] == 1
    assert list(walk) == ["x", "y", "z"]
    assert words[POSITION] == 4


def test_the_stage_is_noted_before_the_first_sample(made):
    words = new_words()
    made(words).walk(4, [1])
    assert words[STAGE] == 4


def test_nothing_to_go_through(made):
    words = new_words()
    words[POSITION] = 7
    assert list(made(words).walk(4, [])) == []
    assert words[POSITION] == 7


def test_indices_that_raise(made):
    def broken():
        yield 1
        raise KeyError("no more")

    walk = made(new_words()).walk(4, broken())
    assert next(walk) == 1
    with pytest.raises(KeyError, match="no more"):
        next(walk)


def test_a_stage_is_entered(made):
    words = new_words()
    recorder = made(words)
    recorder.enter(5, 9)
    assert (words[STAGE], words[POSITION]) == (5, 9)
    assert abs(words[SINCE] - time.monotonic_ns()) < COARSE_NS
    recorder.enter(1)
    assert (words[STAGE], words[POSITION]) == (1, 0)


def test_nothing_else_is_written(made):
    words = new_words()
    list(made(words).walk(4, "ab"))
    made(words).enter(5, 9)
    ours = {STAGE, POSITION, SINCE, INDEX_KIND, *range(INDEX_TEXT, INDEX_TEXT + TEXT_BYTES // 8)}
    assert {field for field, word in enumerate(words) if word} <= ours


def test_the_page_is_let_go(made):
    memory = bytearray(1000)
    words = memoryview(memory).cast("q")
    walk = made(words).walk(4, [1, 2])
    next(walk)
    del walk
    words.release()
    memory.clear()  # raises while anybody looks at it


@compiled_only
def test_only_words_that_are_there_are_written():
    there = (0, 1, 2, 3, 4, 5)
    Recorder(memoryview(bytearray(13 * 8)).cast("q"), *there)  # the text takes eight words
    for which, wrong in [*((which, 13) for which in range(6)), (2, -1), (5, 6), (5, -1)]:
        with pytest.raises(IndexError):
            Recorder(memoryview(bytearray(13 * 8)).cast("q"), *there[:which], wrong, *there[which + 1 :])
    with pytest.raises((TypeError, BufferError)):
        Recorder(memoryview(bytes(13 * 8)).cast("q"), *there)


@compiled_only
def test_nothing_is_named():
    with pytest.raises(TypeError):
        Recorder(new_words(), *WORDS[:-1], text=INDEX_TEXT)


@compiled_only
@pytest.mark.parametrize("wrong", [(), (4,), (4, 5), ("four", [1]), (4, [1], 2)])
def test_a_walk_that_is_none(wrong):
    recorder = Recorder(new_words(), *WORDS)
    with pytest.raises(TypeError):
        recorder.walk(*wrong)


@compiled_only
@pytest.mark.parametrize("wrong", [(), ("four",), (4, "nine"), ("four", "nine"), (4, 5, 6)])
def test_a_stage_that_is_none(wrong):
    words = new_words()
    with pytest.raises(TypeError):
        Recorder(words, STAGE, POSITION, SINCE).enter(*wrong)
    assert not any(words)


class Odd:
    def __repr__(self):
        raise RuntimeError("must not be asked")

    def __index__(self):
        raise KeyError("no number")


@pytest.mark.parametrize(
    ("index", "noted"),
    [
        (17, 17),
        (-3, -3),
        (True, 1),
        (np.int64(5), 5),
        (torch.tensor(6), 6),
        ("a/b.jpg", "'a/b.jpg'"),
        ((3, "x", None), "(3, 'x', None)"),
        ([1.5], "[1.5]"),
        (b"key", "b'key'"),
        (1 << 70, str(1 << 70)),
        ("ü" * 60, "'" + "ü" * 31 + "\ufffd"),
        ("a" * 1000, "<str>"),
        (tuple(range(9)), "<tuple>"),
        ((1, Odd()), "<tuple>"),
        (Odd(), "<Odd>"),
        (np.arange(3), "<ndarray>"),
    ],
    ids=repr_of,
)
def test_the_index_at_hand_is_noted(made, index, noted):
    """A number as such, any other index as text of 64 bytes at most; no code of an object is asked."""
    page = Page()
    for _ in made(page.words).walk(Stage.FETCH, [index]):
        assert page.pulse.index == noted
    page.words[STAGE] = Stage.COLLATE
    assert page.pulse.index is None


def test_a_new_life_has_no_index_at_hand(made):
    page = Page()
    list(made(page.words).walk(Stage.FETCH, [17]))
    page.pulse.begin_life(2)
    page.words[STAGE] = Stage.FETCH
    assert page.pulse.index is None
