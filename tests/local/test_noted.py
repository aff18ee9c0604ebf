"""Which sample is at hand, and since when: noted before each, whichever way it is done."""

import time

import pytest

from holdfast.local import pulse
from holdfast.local.pulse import POSITION, SINCE, new_words, noted

# What the coarse clock may be behind, and a busy machine.
COARSE_NS = 1_000_000_000


@pytest.fixture(params=["compiled", "python"])
def way(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(pulse, "_noted", None)
    elif pulse._noted is None:
        pytest.skip("built without a compiler")


@pytest.mark.parametrize("positions", [range(4), range(3, 7), [0, 2, 5, 9]])
@pytest.mark.parametrize("kind", [list, tuple, iter, dict.fromkeys])
def test_each_is_noted_before_it_is_given(way, positions, kind):
    words, indices = new_words(), ["a", "b", "c", "d"]
    seen = []
    for index in noted(words, positions, kind(indices)):
        assert abs(words[SINCE] - time.monotonic_ns()) < COARSE_NS
        seen.append((words[POSITION], index))
    assert seen == list(zip(positions, indices, strict=True))
    assert words[POSITION] == positions[-1]  # the end is no sample


def test_it_goes_on_where_somebody_stopped(way):
    words = new_words()
    walk = noted(words, range(5), "vwxyz")
    for index in walk:
        if index == "w":
            break
    assert words[POSITION] == 1
    assert list(walk) == ["x", "y", "z"]
    assert words[POSITION] == 4


def test_nothing_to_go_through(way):
    words = new_words()
    words[POSITION] = 7
    assert list(noted(words, range(0), [])) == []
    assert words[POSITION] == 7


def test_indices_that_raise(way):
    def broken():
        yield 1
        raise KeyError("no more")

    walk = noted(new_words(), range(2), broken())
    assert next(walk) == 1
    with pytest.raises(KeyError, match="no more"):
        next(walk)


def test_the_page_is_let_go(way):
    memory = bytearray(200)
    words = memoryview(memory).cast("q")
    walk = noted(words, range(2), [1, 2])
    next(walk)
    del walk
    words.release()
    memory.clear()  # raises while anybody looks at it


@pytest.mark.skipif(pulse._noted is None, reason="built without a compiler")
def test_only_words_that_are_there_are_written():
    with pytest.raises(IndexError):
        pulse._noted(memoryview(bytearray(24)).cast("q"), 0, 3, 0, [1])
    with pytest.raises((TypeError, BufferError)):
        pulse._noted(memoryview(bytes(64)).cast("q"), 0, 1, 0, [1])
    with pytest.raises(TypeError):
        pulse._noted(new_words(), 0, 1, 0, 5)
