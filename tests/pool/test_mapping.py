"""What a worker leaves of a chunk can be read without it: in its slot, or in a file where the slot is too small."""

import os

import numpy as np
import pytest

from holdfast.core.host import JOURNAL_BYTES, JOURNALLED, ReplyKind
from holdfast.local.protocol.pulse import FIELDS
from holdfast.pool.mapping import Results, left_by, unfold
from holdfast.shm.memory_file import Memory
from holdfast.shm.pack import Packer
from holdfast.shm.slot_writer import SlotSpace


@pytest.fixture
def slot():
    return memoryview(bytearray(64 << 10))


def filled(slot, contents):
    words = [0] * FIELDS
    results = Results(Packer(), SlotSpace(slot, 0), words, len(contents))
    for item, content in enumerate(contents):
        results.begin(item)
        results.add(content, item % 2)
    return results, words


SMALL = [1, "two", [3, None], {"four": np.arange(4)}, None]


def test_all_that_was_added_is_there_at_each_moment(slot):
    for count in range(1, len(SMALL) + 1):
        _, words = filled(slot, SMALL[:count])
        assert words[JOURNALLED] == count
        outcomes, begun = left_by(bytes(slot[: words[JOURNAL_BYTES]]), count)
        assert begun == count
        assert [repr(outcome.content) for outcome in outcomes] == [repr(content) for content in SMALL[:count]]
        assert [outcome.retries for outcome in outcomes] == [item % 2 for item in range(count)]


def test_an_item_that_was_begun_and_not_done_is_told_from_those_behind_it(slot):
    results, words = filled(slot, SMALL[:2])
    results.begin(2)
    outcomes, begun = left_by(bytes(slot[: words[JOURNAL_BYTES]]), words[JOURNALLED])
    assert (len(outcomes), begun) == (2, 3)


def test_nothing_done_means_that_the_first_was_begun():
    assert left_by(b"", 0) == ([], 1)


@pytest.mark.parametrize("first", [0, 3], ids=["at-once", "later"])
def test_what_is_too_much_for_the_slot_goes_to_a_file(slot, first):
    """All of it; what is in the slot already can still be read there when the worker dies."""
    contents = [*SMALL[:first], *(np.full(20_000, x, np.uint8) for x in range(5)), "last"]
    results, words = filled(slot, contents)
    reply = results.reply()
    assert reply.kind is ReplyKind.BATCH_IN_FILE
    memory = Memory(reply.file, os.fstat(reply.file).st_size)
    os.close(reply.file)
    outcomes = unfold(memory.view, reply.where, reply.buffers, reply.spec_bytes, lambda: None)
    assert [repr(outcome.content) for outcome in outcomes] == [repr(content) for content in contents]
    assert first < words[JOURNALLED] < len(contents)
    kept, _ = left_by(bytes(slot[: words[JOURNAL_BYTES]]), words[JOURNALLED])
    assert [repr(outcome.content) for outcome in kept] == [repr(content) for content in contents[: words[JOURNALLED]]]


def test_an_item_that_cannot_be_read_is_alone_with_it(slot):
    results, _ = filled(slot, [1, Sulky(), 3])
    reply = results.reply()
    outcomes = unfold(slot, reply.where, reply.buffers, reply.spec_bytes, lambda: None)
    assert [outcome.content for outcome in outcomes] == [1, None, 3]
    assert str(outcomes[1].error) == "not with me"


class Sulky:
    def __reduce__(self):
        return refuse, ()


def refuse():
    raise ValueError("not with me")
