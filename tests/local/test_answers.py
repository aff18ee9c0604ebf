"""What workers say, where the trainer has no descriptor left to hear it."""

import errno
import os
import socket

import pytest

from holdfast.core.host import ReplyKind
from holdfast.core.messages import Finished
from holdfast.local.protocol.wire import MAGIC, RECORD
from holdfast.local.trainer.worker_channel import Answers, Journals, begin_life
from holdfast.shm.memory_file import new_file
from tests.conftest import descriptors, free_descriptors


@pytest.fixture
def answers():
    """Of one worker, in its first life."""
    before = descriptors()
    journals = Journals(sent=False)
    line, _, fds = begin_life(0, 1, 2, None, journals, take_back=False)
    answers = Answers([line], [0], {}, {}, journals)
    yield answers
    answers.close()
    line.hang_up()
    for fd in fds:
        os.close(fd)
    assert descriptors() == before


def announce(answers, task, file):
    """As a worker does whose batch is too large for a slot."""
    record = RECORD.pack(MAGIC | ReplyKind.BATCH_IN_FILE, 0, 1, task, 0, 0, 0, 0, 0, 0)
    socket.send_fds(answers.files_w, [record], [file])
    os.write(answers.pipe_w, record)


def test_a_file_that_cannot_be_taken_is_an_error_of_its_batch_alone(answers):
    """It says EMFILE; what came behind it is heard, and the next file is taken again."""
    file = new_file("batch", 4096)
    announce(answers, 0, file)
    os.write(answers.pipe_w, RECORD.pack(MAGIC | ReplyKind.BATCH, 0, 1, 1, 0, 0, 0, 0, 0, 0))
    events = []
    with free_descriptors(0):
        answers.drain(events)
    announce(answers, 2, file)
    os.close(file)
    answers.drain(events)
    assert [event.task for event in events if isinstance(event, Finished)] == [0, 1, 2]
    with pytest.raises(OSError, match="the file of a large batch") as caught:
        events[0].result.open(None, 0)
    assert caught.value.errno == errno.EMFILE
    assert events[2].result.file.size == 4096
