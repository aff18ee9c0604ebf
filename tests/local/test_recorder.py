"""What a worker writes of itself: its stage, and the sample at hand since when; whichever way it is done."""

import time

import pytest

from holdfast.core.host import POSITION, SINCE, STAGE
from holdfast.local.protocol import pulse
from holdfast.local.protocol.pulse import PlainRecorder, new_words

try:
    from holdfast.local.protocol._pulse import Recorder
except ImportError:
    Recorder = None

# What the coarse clock may be behind, and a busy machine.
COARSE_NS = 1_000_000_000
compiled_only = pytest.mark.skipif(
    Recorder is None, reason="without local/protocol/_pulse.c: only PlainRecorder is tested"
)


@pytest.fixture(params=["python", pytest.param("compiled", marks=compiled_only)])
def made(request):
    """Makes a recorder for words."""
    return PlainRecorder if request.param == "python" else lambda words: Recorder(words, STAGE, POSITION, SINCE)


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
    assert {field for field, word in enumerate(words) if word} == {STAGE, POSITION, SINCE}


def test_the_page_is_let_go(made):
    memory = bytearray(200)
    words = memoryview(memory).cast("q")
    walk = made(words).walk(4, [1, 2])
    next(walk)
    del walk
    words.release()
    memory.clear()  # raises while anybody looks at it


@compiled_only
def test_only_words_that_are_there_are_written():
    for numbers in ((0, 1, 3), (3, 0, 1), (0, 3, 1), (0, 1, -1)):
        with pytest.raises(IndexError):
            Recorder(memoryview(bytearray(24)).cast("q"), *numbers)
    with pytest.raises((TypeError, BufferError)):
        Recorder(memoryview(bytes(64)).cast("q"), 0, 1, 2)


@compiled_only
def test_nothing_is_named():
    with pytest.raises(TypeError):
        Recorder(new_words(), STAGE, POSITION, since=SINCE)


@compiled_only
@pytest.mark.parametrize("wrong", [(), (4,), (4, 5), ("four", [1]), (4, [1], 2)])
def test_a_walk_that_is_none(wrong):
    recorder = Recorder(new_words(), STAGE, POSITION, SINCE)
    with pytest.raises(TypeError):
        recorder.walk(*wrong)


@compiled_only
@pytest.mark.parametrize("wrong", [(), ("four",), (4, "nine"), ("four", "nine"), (4, 5, 6)])
def test_a_stage_that_is_none(wrong):
    words = new_words()
    with pytest.raises(TypeError):
        Recorder(words, STAGE, POSITION, SINCE).enter(*wrong)
    assert not any(words)
