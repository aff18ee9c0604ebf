"""What is larger than its place goes another way, or is refused in words: nothing is ever written over."""

import os
import resource
import signal

import pytest
import torch
from torch.utils.data import Dataset

import holdfast
from holdfast import DataLoader, Policy
from holdfast.errors import CannotSend, HoldfastError

MIB = 1 << 20
# No file may be larger: so slots and letter boxes are as small as they get, 1 MiB. A worker of a pool has more of them.
LIMIT, LIMIT_OF_POOL = 48 * MIB, 240 * MIB


@pytest.fixture(autouse=True)
def small_files(request):
    """The limit, while a test runs."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = LIMIT_OF_POOL if "pool" in request.node.name else LIMIT
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def key(number, size):
    """An index of so many bytes."""
    return number.to_bytes(4, "little") * (size // 4)


class Keyed(Dataset):
    """Indices are large, samples small or large; kills its worker at some, once or twice."""

    def __init__(self, folder, length, sample=1, deadly=()):
        self.folder, self.length, self.sample, self.deadly = folder, length, sample, dict(deadly)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        number = int.from_bytes(index[:4], "little")
        assert index == key(number, len(index)), "something was written over it"
        mark = self.folder / str(number)
        deaths = len(mark.read_text()) if mark.exists() else 0
        if deaths < self.deadly.get(number, 0):
            mark.write_text("x" * (deaths + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((self.sample,), number)


@pytest.mark.parametrize("bad_sample", ["raise", "replace"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_letter_may_be_larger_than_its_box(method, bad_sample, tmp_path):
    """Indices of 2 MiB for each batch, through deaths too."""
    dataset = Keyed(tmp_path, 24, deadly={5: 2, 13: 1})
    batches = [[key(i, MIB // 2) for i in range(start, start + 4)] for start in range(0, 24, 4)]
    policy = Policy(bad_sample=bad_sample, strikes=9)
    before = len(os.listdir("/proc/self/fd"))
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=1, multiprocessing_context=method, policy=policy)
    it = iter(loader)
    got = []
    for batch in it:
        got += batch.flatten().tolist()
        if method == "fork" and len(got) == 12:
            assert len(os.listdir("/proc/self/fd")) < before + 25
    assert got == list(range(24))
    assert loader.stats()["restarts"] == 3


def test_a_journal_that_does_not_fit_beside_the_letter_is_left_out(tmp_path):
    """0.9 MiB of indices and 0.13 MiB of journal: what a dead worker had done is done again."""
    dataset = Keyed(tmp_path, 16, sample=1000, deadly={7: 3})
    batches = [[key(i, MIB // 9) for i in range(start, start + 8)] for start in range(0, 16, 8)]
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=1, policy=Policy(strikes=9))
    assert [row[0].item() for batch in loader for row in batch] == list(range(16))
    assert loader.stats()["restarts"] == 3


def test_so_many_samples_that_a_journal_has_no_room(tmp_path):
    """The table of a batch of 60,000 alone would fill the slot."""
    loader = DataLoader(Once(tmp_path, 120_000), batch_size=60_000, num_workers=1, collate_fn=len)
    assert list(loader) == [60_000, 60_000]
    assert loader.stats()["restarts"] == 1


class Once(Dataset):
    """Kills its worker once."""

    def __init__(self, folder, length):
        self.mark, self.length = folder / "killed", length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == 50_000 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_indices_that_no_file_may_hold_are_refused_in_words(tmp_path):
    """More than the limit on the size of files."""
    loader = DataLoader(Keyed(tmp_path, 1), batch_sampler=[[key(0, LIMIT + MIB)]], num_workers=1)
    with pytest.raises(HoldfastError, match=r"indices take \d+ bytes[\s\S]*RLIMIT_FSIZE"):
        next(iter(loader))


# Errors --------------------------------------------------------------------------------------------------------------


class Verbose(Dataset):
    """An error that has much to say, and samples around it."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 1:
            raise ValueError("x" * (3 * MIB))
        return index


def say_much(*_):
    raise ValueError("x" * (3 * MIB))


def test_an_error_may_be_larger_than_a_slot():
    """It arrives as itself, and its worker lives on."""
    loader = DataLoader(Verbose(), batch_size=None, num_workers=1)
    it = iter(loader)
    assert next(it) == 0
    with pytest.raises(ValueError, match=r"^x{1000}") as caught:
        next(it)
    assert len(str(caught.value)) == 3 * MIB
    assert next(it) == 2
    assert loader.stats()["restarts"] == 0


def test_an_error_of_a_start_may_be_larger_than_its_place():
    """It is cut to what people read, and raised."""
    loader = DataLoader(Verbose(), num_workers=1, worker_init_fn=say_much)
    with pytest.raises(HoldfastError, match=r"raised ValueError: x{1000}"):
        next(iter(loader))


def name_a_file(*_):
    open("/" + "x" * (3 * MIB))


def name_a_class(*_):
    raise type("x" * (3 * MIB), (ValueError,), {})


@pytest.mark.parametrize("init", [name_a_file, name_a_class])
def test_names_in_an_error_of_a_start_may_be_larger_than_its_place(init):
    """Of a file, which is among what was seen; or of the error's class. The worker says it, and does not crash."""
    loader = DataLoader(Verbose(), num_workers=1, worker_init_fn=init)
    with pytest.raises(HoldfastError, match=r"x{1000}"):
        next(iter(loader))
    assert [incident.finding for incident in loader.incidents] == ["worker-init-raised"]


def test_what_is_kept_and_logged_of_an_error_is_bounded(caplog):
    """A thousand incidents are kept: what an exception says beyond some pages is not. The user's exception is whole."""
    loader = DataLoader(Verbose(), batch_size=1, num_workers=1, policy=Policy(bad_sample="skip", max_bad=1.0))
    assert [index for batch in loader for index in batch.tolist()] == [0, 2]
    (incident,) = loader.incidents
    assert "more letters" in incident.says and "ValueError: xxx" in incident.says
    (bad,) = loader.report().bad_samples
    assert len(str(incident)) + len(bad.error) + sum(map(len, caplog.messages)) < MIB // 4
    assert len(loader.report().to_json()) < MIB // 4


def test_an_error_of_a_pool_may_be_larger_than_a_slot():
    """It arrives as itself."""
    with holdfast.Pool(1) as pool, pytest.raises(ValueError, match=r"^x{1000}"):
        pool.submit(say_much).result(60)


# Results -------------------------------------------------------------------------------------------------------------


class Huge(Dataset):
    """One sample is larger than any file may be."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.zeros(LIMIT + MIB if index == 1 else 4, dtype=torch.uint8)


def huge(number):
    return bytes(LIMIT_OF_POOL + MIB if number == 1 else 4)


def test_a_batch_that_no_file_may_hold_is_an_error_for_that_batch():
    """It says how much was refused; the others come."""
    loader = DataLoader(Huge(), batch_size=None, num_workers=1)
    it = iter(loader)
    assert len(next(it)) == 4
    with pytest.raises(CannotSend, match="RLIMIT_FSIZE"):
        next(it)
    assert len(next(it)) == 4
    assert loader.stats()["restarts"] == 0


def test_a_result_of_a_pool_that_no_file_may_hold_is_an_error_for_that_call():
    """The pool lives on."""
    with holdfast.Pool(1) as pool:
        futures = [pool.submit(huge, number) for number in range(3)]
        assert len(futures[0].result(60)) == len(futures[2].result(60)) == 4
        with pytest.raises(OSError, match="File too large"):
            futures[1].result(60)


def test_a_chunk_of_a_pool_of_so_many_items_that_their_table_has_no_room():
    """It is sent as two halves."""
    with holdfast.Pool(1) as pool:
        assert sum(pool.map(abs, range(80_000), chunksize=80_000)) == sum(range(80_000))
        assert pool.stats()["restarts"] == 0
