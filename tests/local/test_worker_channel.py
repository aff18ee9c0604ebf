"""The trainer's ends of one life: a task lies in a letter box from its sending until it is answered, or taken back."""

import errno
import os
import resource

import pytest

from holdfast.core.host import JOURNAL_BYTES, JOURNALLED, POSITION, SLOT
from holdfast.core.messages import Cause, Exited, Place, Stage
from holdfast.errors import HoldfastError
from holdfast.local.protocol.pulse import PAGE, Pulse
from holdfast.local.protocol.wire import ELSEWHERE, TASK
from holdfast.local.trainer import worker_channel
from holdfast.local.trainer.process_handles import WorkerHandle, exit_code
from holdfast.local.trainer.worker_channel import Journals, begin_life
from holdfast.shm.memory_file import Memory, new_file
from holdfast.shm.slots import KEEPABLE

BUSY = 2


class Line:
    """A channel, and the worker's ends of it."""

    def __init__(self, take_back=False, busy=BUSY):
        self.journals = Journals(sent=True)
        self.channel, self.order, self.fds = begin_life(3, 7, busy, None, self.journals, take_back=take_back)
        self.tasks = self.fds[0]
        os.set_blocking(self.tasks, False)

    def read(self):
        """(task, letter) of all records that have come; a journal stands behind the letter."""
        view, stride, found = self.channel.slots.memory.view, self.channel.slots.stride, []
        try:
            data = os.read(self.tasks, 1 << 16)
        except BlockingIOError:
            return []
        for task, box, size, saved, _ in TASK.iter_unpack(data):
            found.append((task, bytes(view[box * stride : box * stride + abs(size) + saved])))
        return found

    def free_boxes(self):
        return len(self.channel.slots._boxes)

    def close(self):
        self.channel.end()
        for fd in self.fds:
            os.close(fd)


@pytest.fixture(params=[False, True], ids=["sent at once", "may be taken back"])
def line(request):
    made = Line(request.param)
    yield made
    made.close()


@pytest.fixture
def back():
    """Of which tasks may be taken back."""
    made = Line(True, busy=4)
    yield made
    made.close()


@pytest.fixture
def at_once():
    made = Line()
    yield made
    made.close()


# Sending -------------------------------------------------------------------------------------------------------------


def test_a_task_reaches_the_worker(line):
    line.channel.send(5, b"load this")
    line.channel.flush()
    assert line.read() == [(5, b"load this")]


def test_where_tasks_may_be_taken_back_they_go_out_together(back):
    back.channel.send(5, b"a")
    back.channel.send(6, b"b")
    assert back.read() == []
    back.channel.flush()
    assert [task for task, _ in back.read()] == [5, 6]


def test_a_task_without_a_letter_box_waits_for_an_answer(line):
    for task in range(BUSY + 2):
        line.channel.send(task, b"%d" % task)
    line.channel.flush()
    assert [task for task, _ in line.read()] == [0, 1]
    line.channel.answered(0)
    line.channel.flush()
    assert line.read() == [(2, b"2")]


def test_each_answer_frees_a_letter_box(line):
    for task in range(BUSY):
        line.channel.send(task, b"")
    assert line.free_boxes() == 0
    for task in range(BUSY):
        line.channel.answered(task)
    assert line.free_boxes() == BUSY and not line.channel.boxes


def test_an_answer_to_what_was_never_sent_frees_nothing(line):
    line.channel.send(5, b"")
    line.channel.answered(9)
    assert line.free_boxes() == BUSY - 1


def test_a_letter_that_no_box_can_hold_lies_in_a_file(line, monkeypatch):
    monkeypatch.setattr(line.channel.slots, "stride", 1 << 12)
    letter = os.urandom(1 << 13)
    line.channel.send(5, letter)
    line.channel.flush()
    [(task, where)] = line.read()
    pid, fd, inode = ELSEWHERE.unpack(where)
    assert (task, pid, os.fstat(fd).st_ino) == (5, os.getpid(), inode)
    assert os.pread(fd, len(letter) + 1, 0) == letter
    line.channel.answered(5)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_letter_for_which_there_is_no_file_is_an_error_and_keeps_no_box(line, monkeypatch):
    def refuse(name, size):
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(line.channel.slots, "stride", 16)
    monkeypatch.setattr(worker_channel, "new_file", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    with pytest.raises(HoldfastError, match=r"(?s)indices take \d+ bytes.*RLIMIT_FSIZE is 1048576 bytes"):
        line.channel.send(5, bytes(17))
    assert line.free_boxes() == BUSY


def test_what_a_full_pipe_does_not_take_follows_when_something_was_answered():
    made = Line(busy=10_000)
    try:
        for task in range(5000):
            made.channel.send(task, b"")
        assert made.channel.waiting
        came = []
        while more := [task for task, _ in made.read()]:
            came += more
            for task in more:
                made.channel.answered(task)
        assert came == list(range(5000))
        assert made.free_boxes() == 10_000
    finally:
        made.close()


def test_a_worker_that_is_dying_gets_nothing_and_that_is_no_error(at_once):
    os.close(at_once.fds.pop(0))
    at_once.channel.send(5, b"")
    at_once.channel.flush()
    assert list(at_once.channel.boxes) == [5]


def test_after_hanging_up_nothing_is_sent(line):
    line.channel.hang_up()
    line.channel.hang_up()
    line.channel.send(5, b"")
    line.channel.flush()
    assert line.read() == [] and not line.channel.boxes


def test_a_worker_hears_that_nothing_more_comes(at_once):
    at_once.channel.hang_up()
    assert os.read(at_once.tasks, 1) == b""


def test_the_end_closes_files_of_letters(line, monkeypatch):
    monkeypatch.setattr(line.channel.slots, "stride", 1 << 12)
    line.channel.send(5, bytes(1 << 13))
    fd = line.channel._large[5]
    line.channel.end()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# Taking back ---------------------------------------------------------------------------------------------------------


def test_what_the_worker_has_not_read_is_taken_back(back):
    for task in range(4):
        back.channel.send(task, b"")
    back.channel.flush()
    os.read(back.tasks, TASK.size)  # the worker is at work on the first
    assert back.channel.take_back(2) == [1, 2]
    assert [task for task, _ in back.read()] == [3]
    assert set(back.channel.boxes) == {0, 3}


def test_what_is_not_sent_yet_is_taken_back_too(back):
    back.channel.send(5, b"")
    assert back.channel.take_back() == [5]
    assert back.read() == [] and back.free_boxes() == 4


def test_nothing_is_taken_back_where_nothing_is_left(back):
    assert back.channel.take_back() == []
    back.channel.hang_up()
    assert back.channel.take_back() == []


def test_where_tasks_are_sent_at_once_none_is_taken_back(at_once):
    at_once.channel.send(5, b"")
    assert at_once.channel.take_back() == []
    assert [task for task, _ in at_once.read()] == [5]


def test_a_task_that_the_worker_is_on_is_all_that_it_keeps(back):
    for task in range(3):
        back.channel.send(task, b"")
    back.channel.flush()
    os.read(back.tasks, TASK.size)
    assert back.channel.isolate(0) == {1, 2}
    assert back.read() == []


def test_where_the_worker_is_on_another_task_it_keeps_the_others(back):
    for task in range(3):
        back.channel.send(task, b"")
    back.channel.flush()
    os.read(back.tasks, TASK.size)
    assert back.channel.isolate(1) is None
    assert [task for task, _ in back.read()] == [2]
    assert set(back.channel.boxes) == {0, 2}


# Journals ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pulse():
    fd = new_file("test", PAGE)
    memory = Memory(fd, PAGE)
    os.close(fd)
    return Pulse(memory, 0)


def died(line, pulse, *, position=2, at=2, stage=Stage.FETCH, count=2, saved=b"two samples"):
    """A life left this in slot 1; it was on task 5."""
    start = line.channel.slots.stride
    line.channel.slots.memory.view[start : start + len(saved)] = saved
    pulse.words[SLOT], pulse.words[JOURNALLED], pulse.words[JOURNAL_BYTES] = 1, count, len(saved)
    pulse.words[POSITION] = at
    return pulse, line.channel.slots, Place(5, position, stage, 0.0)


def test_what_a_life_had_loaded_goes_with_its_task_to_the_next(line, pulse):
    line.journals.keep(*died(line, pulse))
    line.channel.send(5, b"load this")
    line.channel.flush()
    assert line.read() == [(5, b"load thistwo samples")]


@pytest.mark.parametrize("how", [{"count": 0}, {"stage": Stage.COLLATE}, {"at": 3}], ids=["none", "collate", "went on"])
def test_what_is_no_help_to_the_next_life_is_not_kept(line, pulse, how):
    line.journals.keep(*died(line, pulse))
    line.journals.keep(*died(line, pulse, **how))
    assert not line.journals


def test_who_reads_journals_here_wants_all_that_there_is(line, pulse):
    journals = Journals(sent=False)
    journals.keep(*died(line, pulse, at=3))
    assert journals == {5: (b"two samples", 2)}


def test_a_journal_that_does_not_fit_beside_its_letter_stays_here(line, pulse, monkeypatch):
    line.journals.keep(*died(line, pulse))
    monkeypatch.setattr(line.channel.slots, "stride", 16)
    line.channel.send(5, b"load this")
    line.channel.flush()
    assert line.read() == [(5, b"load this")]


# A life's memory -----------------------------------------------------------------------------------------------------


def test_the_order_says_what_the_descriptors_hold(at_once):
    order, channel = at_once.order, at_once.channel
    assert (order.worker, order.life, order.boxes) == (3, 7, BUSY)
    assert order.slots == 2 * BUSY + 1 + KEEPABLE
    assert os.fstat(at_once.fds[1]).st_size == channel.slots.memory.size == (order.slots + BUSY + 1) * order.stride


def test_a_life_that_cannot_begin_leaves_nothing_open(monkeypatch):
    before = set(os.listdir("/proc/self/fd"))

    def refuse(space):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(worker_channel.forks, "watch_slots", refuse)
    with pytest.raises(OSError, match="Too many"):
        begin_life(0, 1, BUSY, None, Journals(sent=True), take_back=True)
    assert set(os.listdir("/proc/self/fd")) == before


# What is shown to others ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "code", "shown"),
    [
        (Cause.EXIT, 5, 5),
        (Cause.SIGNAL, 9, -9),
        (Cause.DEADLINE, 9, -9),
        (Cause.RECYCLED, 3, 0),
        (Cause.UNBORN, 12, 1),
    ],
)
def test_an_exit_code_is_as_multiprocessing_has_it(cause, code, shown):
    assert exit_code(Exited(0, 1, 0.0, cause, code, Place(-1, 0, Stage.IDLE, 0.0), None)) == shown


class Host:
    """With one worker, this process or none."""

    def __init__(self, pid, closed=False):
        self.pid, self.closed = pid, closed

    def has_life(self, worker):
        return self.pid != 0

    def pid_of(self, worker, patience_s=0.0):
        return self.pid


@pytest.mark.parametrize(
    ("host", "alive"),
    [(Host(os.getpid()), True), (Host(os.getpid(), closed=True), False), (Host(0), False), (Host(None), True)],
    ids=["lives", "closed", "not needed", "starting"],
)
def test_a_worker_is_alive_from_its_start_until_it_is_gone(host, alive):
    assert WorkerHandle(host, 2).is_alive() is alive


def test_a_worker_is_joined_for_as_long_as_was_asked_for():
    handle = WorkerHandle(Host(os.getpid()), 2)
    handle.join(0.01)
    assert (handle.name, handle.pid, handle.daemon, handle.exitcode) == ("holdfast-worker-2", os.getpid(), True, None)
