"""Every row of the table, on real processes with the real fault."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from holdfast import DataLoader, Policy
from holdfast.testing import Saboteur, inflict, storm

from ..conftest import until
from ..process.data import Numbers, Stream
from .matrix import MAP_ROWS, STREAM_ROWS, TRAINER_ROWS, Row
from .places import BAD, BEFORE, COUNT, first_time, make


def numbers(batch):
    if isinstance(batch, list):
        return [int(sample["number"]) for sample in batch]
    return batch.tolist()


def epoch(loader, disturb=None):
    """All that arrives, and all that is raised."""
    got, errors = [], []
    iterator = iter(loader)
    step = 0
    while True:
        try:
            got.append(numbers(next(iterator)))
        except StopIteration:
            break
        except Exception as error:
            errors.append(error)
            if len(errors) > 8:
                break
        step += 1
        if disturb is not None and step == 5:
            disturb(iterator)
    return got, errors


def strike(row: Row):
    """Faults that come from outside."""
    number = getattr(signal, row.how.upper(), None)

    def disturb(iterator):
        host = iterator._host
        match row.where:
            case "idle":
                time.sleep(0.05)  # the window is full by now: workers wait
                os.kill(host.workers[0].pid, number)
                time.sleep(0.25)
            case "keeper":
                os.kill(host.keeper_pid, number)
            case "group":
                for pid in (host.keeper_pid, *(w.pid for w in host.workers)):
                    os.kill(pid, number)
                time.sleep(0.25)

    return disturb if row.where in ("idle", "keeper", "group") else None


def told(loader, errors):
    return "\n".join([str(loader.report()), *(note for e in errors for note in (str(e), *getattr(e, "__notes__", ())))])


@pytest.mark.parametrize("row", MAP_ROWS, ids=str)
def test_map_style(row, tmp_path):
    loader = make(row, tmp_path)
    if row.where == "between-epochs":
        epoch(loader)
        os.kill(loader._iterator._workers[1].pid, getattr(signal, row.how.upper()))
        time.sleep(0.25)
    got, errors = epoch(loader, strike(row))
    check(row, loader, [x for batch in got for x in batch], errors)


def streams_before_the_fault():
    """The batches that each of the two workers gives before the one that holds the fault: in turn."""
    batches = BEFORE // 4
    return [list(range(COUNT))[worker::2][4 * i : 4 * i + 4] for i in range(batches) for worker in range(2)]


@pytest.mark.parametrize("row", STREAM_ROWS, ids=str)
def test_iterable(row, tmp_path):
    loader = make(row, tmp_path)
    got, errors = epoch(loader)
    says = told(loader, errors)
    if row.owed == "once":
        assert got == [b.tolist() for b in DataLoader(Stream(COUNT), batch_size=4, num_workers=2)], says
        assert not errors, says
    else:  # what a stream would have given behind the fault is lost with it
        assert got == streams_before_the_fault(), says
        assert [type(e).__name__ for e in errors] == [row.raises] * 2, says
    assert_named(row, loader, says)


def check(row, loader, got, errors):
    says = told(loader, errors)
    raised = [type(e).__name__ for e in errors]
    match row.owed:
        case "once" | "nobody":
            assert got == list(range(COUNT)) and not errors, says
        case "skips":
            assert got == [i for i in range(COUNT) if i != BAD] and not errors, says
            assert [b.index for b in loader.report().bad_samples] == [BAD], says
        case "breaks":
            assert not got and set(raised) == {row.raises}, says
        case "raises":
            batch = range(BAD - BAD % 4, BAD - BAD % 4 + 4)
            assert got == [i for i in range(COUNT) if i not in batch], says
            assert raised == [row.raises], says
    assert_named(row, loader, says)


def assert_named(row, loader, says):
    """What went wrong is named; where nothing is owed but the epoch, nothing is told. (The text of a report has the
    last incident of each finding.)
    """
    says = "\n".join([says, *(incident.headline for incident in loader.incidents)])
    assert all(word in says for word in row.words), says
    found = {i.finding for i in loader.incidents}
    assert row.owed != "nobody" or not found, says
    assert not row.finding or row.finding in found, says


@pytest.mark.parametrize("row", TRAINER_ROWS, ids=str)
def test_nothing_outlives_its_trainer(row):
    """It ends in the middle of an epoch. `nothing_left` looks for shared memory."""
    mark = f"{os.getpid()}-{row}-{time.monotonic_ns()}"
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults.trainer", row.how, row.start]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOLDFAST_TEST_MARK": mark},
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    ) as trainer:
        assert trainer.stdout.readline() == b"going\n"
        assert len(carrying(mark)) >= 4  # the trainer, its keeper and two workers
        if row.how in ("sigkill", "sigterm", "sigint"):
            os.kill(trainer.pid, getattr(signal, row.how.upper()))
        status = trainer.wait(30)
        assert status == {"raise": 1, "sys-exit": 3, "os-exit": 5, "segfault": -signal.SIGSEGV}.get(
            row.how, -getattr(signal, row.how.upper(), 0)
        )
        until(lambda: not carrying(mark), "some process of it lives on", 5)


def carrying(mark):
    """Processes with this mark in their environment; not multiprocessing's own, which end when they see fit."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"resource_tracker" not in command:
                    found.append(int(pid))
        except OSError:
            continue
    return found


def test_an_exception_comes_back_as_itself():
    """Type, args, errno, attributes, notes; the worker's traceback is its cause."""

    class Rich(Numbers):
        def __getitem__(self, index):
            error = FileNotFoundError(2, "No such file", "cat.png")
            error.extra = {"url": "s3://x"}
            error.add_note("a note of the user's")
            raise error

    with pytest.raises(FileNotFoundError) as caught:
        next(iter(DataLoader(Rich(4), num_workers=1)))
    error = caught.value
    assert (error.errno, error.filename, error.extra) == (2, "cat.png", {"url": "s3://x"})
    assert error.__notes__[0] == "a note of the user's"
    assert "index 0" in error.__notes__[1] and "worker 0" in error.__notes__[1]
    assert "in __getitem__" in str(error.__cause__)


def test_the_stack_of_a_crash_and_of_a_hang_is_shown(tmp_path):
    for how, line in (("segfault", "_segfault"), ("hang-holding-gil", "_hang_in_c")):
        loader = DataLoader(Saboteur(Numbers(8), {3: how}), num_workers=1, policy=Policy(sample_timeout=0.3))
        _, errors = epoch_of_ones(loader)
        assert line in str(errors[0]) and "faults.py" in errors[0].stack, errors[0]
        assert errors[0].index == 3


def epoch_of_ones(loader):
    got, errors = [], []
    iterator = iter(loader)
    while True:
        try:
            got.append(int(next(iterator)))
        except StopIteration:
            return got, errors
        except Exception as error:
            errors.append(error)


def test_a_lock_held_in_the_trainer_at_the_fork(tmp_path):
    """The workers inherit it locked. A new keeper is forked, and no sample is charged."""
    lock = threading.Lock()

    class Locks(Numbers):
        def __getitem__(self, index):
            with lock:
                return index

    lock.acquire()
    threading.Timer(0.4, lock.release).start()
    loader = DataLoader(Locks(12), batch_size=3, num_workers=2, policy=Policy(sample_timeout=0.8))
    got, errors = epoch(loader)
    assert [x for b in got for x in b] == list(range(12)) and not errors
    assert "new keeper" in str(loader.report())


def test_a_storm_ends_exact():
    """A random worker is killed every 80 ms for a whole epoch."""
    loader = DataLoader(Numbers(1200, 0.003), batch_size=8, num_workers=3)
    iterator = iter(loader)
    with storm(lambda: [w.pid for w in iterator._workers if w.pid], 0.08) as weather:
        got = [x for batch in iterator for x in batch.tolist()]
    assert got == list(range(1200))
    assert weather.kills > 10
    assert loader.stats()["restarts"] > 5
    assert not loader.report().bad_samples


def test_a_storm_over_a_stream():
    loader = DataLoader(Stream(400, 0.002), batch_size=4, num_workers=2)
    expected = [b.tolist() for b in DataLoader(Stream(400), batch_size=4, num_workers=2)]
    iterator = iter(loader)
    with storm(lambda: [w.pid for w in iterator._workers if w.pid], 0.5):
        assert [b.tolist() for b in iterator] == expected


def test_a_replay_that_gives_other_items_is_an_error(tmp_path):
    class Fickle(torch.utils.data.IterableDataset):
        def __iter__(self):
            salt = int.from_bytes(os.urandom(4), "little")
            for i in range(20):
                if i == 15 and first_time(str(tmp_path)):
                    inflict("sigkill")
                yield i + salt

    with pytest.raises(Exception, match="other items when it was replayed"):
        list(DataLoader(Fickle(), batch_size=2, num_workers=1))


def test_a_stateful_stream_is_not_replayed(tmp_path):
    """With state_dict, a new life goes on from a snapshot."""

    class Stateful(torch.utils.data.IterableDataset):
        def __init__(self):
            self.at = 0
            self.log = str(tmp_path / "made")

        def __iter__(self):
            while self.at < 60:
                item = self.at
                if item == 50 and first_time(str(tmp_path)):
                    inflict("sigkill")
                self.at += 1
                with open(self.log, "a") as file:
                    file.write(f"{item}\n")
                time.sleep(0.03)
                yield item

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    got = [x for b in DataLoader(Stateful(), batch_size=2, num_workers=1) for x in b.tolist()]
    assert got == list(range(60))
    made = (tmp_path / "made").read_text().split()
    assert made.count("0") == 1, "it began again from the start"


def test_a_stateful_stream_that_shuffles_keeps_its_order(tmp_path):
    """Its state says how far it is. The order is drawn anew in the new life, by the same seed."""

    class Shuffled(torch.utils.data.IterableDataset):
        at = 0

        def __iter__(self):
            return self.walk(torch.randperm(30).tolist())

        def walk(self, order):
            while self.at < len(order):
                if self.at == 20 and first_time(str(tmp_path)):
                    inflict("sigkill")
                self.at += 1
                yield order[self.at - 1]

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    loader = DataLoader(Shuffled(), batch_size=2, num_workers=1)
    got = [x for b in loader for x in b.tolist()]
    assert sorted(got) == list(range(30)) and got != list(range(30))
    assert loader.stats()["restarts"] == 1


def test_a_state_that_leads_elsewhere_is_an_error_and_no_silence(tmp_path):
    """It is a generator: its order is drawn when it is asked for its first item, under the seed of another batch. With
    a snapshot after each batch, too.
    """

    class Shuffled(torch.utils.data.IterableDataset):
        at = 0

        def __iter__(self):
            order = torch.randperm(1000).tolist()
            while self.at < 12:
                if self.at == 8 and first_time(str(tmp_path)):
                    inflict("sigkill")
                self.at += 1
                time.sleep(0.55)
                yield order[self.at - 1]

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    with pytest.raises(Exception, match="other items when it was replayed"):
        list(DataLoader(Shuffled(), batch_size=2, num_workers=1))


def test_replace_keeps_batch_sizes():
    policy = Policy(bad_sample="replace")
    runs = []
    for workers in (1, 2):
        torch.manual_seed(3)
        dataset = Saboteur(Numbers(40), {5: "raise", 17: "segfault", 33: "raise"})
        loader = DataLoader(dataset, batch_size=4, num_workers=workers, policy=policy)
        got = [b.tolist() for b in loader]
        assert [len(b) for b in got] == [4] * 10
        flat = [x for b in got for x in b]
        for bad in (5, 17, 33):
            assert flat[bad] != bad and flat[bad] <= bad + 16
        runs.append(got)
        assert {b.index for b in loader.report().bad_samples} >= {5, 33}
    assert runs[0] == runs[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_retries(workers, tmp_path):
    """A service that fails now and then: nothing lost, and said how often."""

    class Flaky(Numbers):
        def __getitem__(self, index):
            if index % 5 == 0 and not os.path.exists(tmp_path / f"{workers}-{index}"):
                (tmp_path / f"{workers}-{index}").touch()
                raise ConnectionResetError(104, "dropped")
            return index

    policy = Policy(retries=2, retry_delay=0.001)
    loader = DataLoader(Flaky(40), batch_size=4, num_workers=workers, policy=policy)
    assert [x for b in loader for x in b.tolist()] == list(range(40))
    assert loader.stats()["retries"] == 8
    assert "sample-retried x8" in str(loader.report())


@pytest.mark.parametrize("workers", [0, 2])
def test_the_breaker(workers):
    """The store is down: stop early, with what all share."""

    class Down(Numbers):
        def __getitem__(self, index):
            raise ConnectionError("store is down")

    from holdfast import TooManyBad

    policy = Policy(bad_sample="skip")
    with pytest.raises(TooManyBad, match="store is down"):
        list(DataLoader(Down(4000), batch_size=4, num_workers=workers, policy=policy))


@pytest.mark.parametrize("workers", [0, 2])
def test_num_workers_zero_honours_the_policy(workers):
    faults = {5: "raise", 9: "stop-iteration"}
    loader = DataLoader(
        Saboteur(Numbers(40), faults), batch_size=4, num_workers=workers, policy=Policy(bad_sample="skip", max_bad=0.5)
    )
    assert [x for b in loader for x in b.tolist()] == [i for i in range(40) if i not in faults]
    loader = DataLoader(Saboteur(Numbers(40), faults), batch_size=4, num_workers=workers)
    got, errors = epoch(loader)
    assert len(got) == 8
    assert [type(e).__name__ for e in errors] == ["ValueError", "SampleError"]


def test_an_emptied_batch_is_not_delivered():
    faults = dict.fromkeys(range(8, 12), "raise")
    loader = DataLoader(
        Saboteur(Numbers(40), faults), batch_size=4, num_workers=2, policy=Policy(bad_sample="skip", max_bad=0.5)
    )
    assert len(list(loader)) == 9
    assert loader.stats()["bad_samples"] == 4


def test_worker_memory_names_the_line():
    """RLIMIT_DATA: the allocation fails in Python, at its line, in that sample alone."""

    class Greedy(Numbers):
        def __getitem__(self, index):
            if index == 5:
                bytearray(3 << 30)
            return index

    loader = DataLoader(
        Greedy(12), batch_size=2, num_workers=2, policy=Policy(bad_sample="skip", worker_memory="1GiB", max_bad=0.5)
    )
    assert [x for b in loader for x in b.tolist()] == [i for i in range(12) if i != 5]
    assert "bytearray(3 << 30)" in str(loader.report())


def test_a_stream_whose_worker_died_after_its_end_comes_again_in_the_next_epoch():
    """With persistent workers: it needs no other life in this epoch, and one in the next."""

    class Uneven(torch.utils.data.IterableDataset):
        def __iter__(self):
            worker = torch.utils.data.get_worker_info().id
            for i in range(2 if worker == 1 else 12):
                time.sleep(0.02)
                yield worker * 100 + i

    loader = DataLoader(Uneven(), batch_size=1, num_workers=2, persistent_workers=True)
    iterator = iter(loader)
    first = []
    for batch in iterator:
        first.append(int(batch))
        if len(first) == 8:
            os.kill(iterator._workers[1].pid, signal.SIGKILL)
    assert [int(batch) for batch in loader] == first
    iterator._shutdown_workers()


def test_a_sample_that_is_left_out_for_its_deaths_is_listed_as_bad_and_not_counted_as_delivered(tmp_path):
    class Deadly(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            if index == 5:
                os.kill(os.getpid(), signal.SIGSEGV)
            return index

    loader = DataLoader(Deadly(), batch_size=4, num_workers=1, policy=Policy(bad_sample="skip", max_bad=1))
    assert sum(len(batch) for batch in loader) == 15
    assert loader.stats()["samples"] == 15
    assert [bad.index for bad in loader.report().bad_samples] == [5]
