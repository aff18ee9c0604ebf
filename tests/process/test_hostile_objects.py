"""Objects of the user's that raise when they are asked anything: ours to ask, so ours to survive.

An exception reaches the user, as itself where it can; no worker ends for it, and the batches behind it come.
"""

import json
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from holdfast import DataLoader, Policy, Pool, TaskLost
from holdfast.errors import SampleError

LENGTH, BAD = 8, 3


class Worse(Exception):
    """What the objects here raise when they are asked."""


class Beyond(BaseException):
    """The same, past every `except Exception`."""


def refuse(*args, **kwargs):
    raise Worse("asked")


def exit_(*args, **kwargs):
    raise Beyond("asked")


class BadStr(ValueError):
    __str__ = refuse


class BadStrBeyond(ValueError):
    __str__ = exit_


class BadRepr(ValueError):
    __repr__ = refuse


class BadReduce(ValueError):
    __reduce_ex__ = __reduce__ = refuse


class BadReduceBeyond(ValueError):
    __reduce_ex__ = __reduce__ = exit_


class BadLoad(ValueError):
    def __reduce__(self):
        return exit_, ()


class BadArgs(ValueError):
    args = property(refuse)


class BadAttributes(ValueError):
    __dict__ = property(exit_)


class BadCause(ValueError):
    __cause__ = property(refuse)


class BadContext(ValueError):
    __context__ = property(exit_)


class BadNotes(ValueError):
    __notes__ = property(refuse)


class BadNotesBeyond(ValueError):
    __notes__ = property(exit_)


class BadAddNote(ValueError):
    add_note = exit_


class BadSetattr(ValueError):
    __setattr__ = refuse


class BadGetattribute(ValueError):
    def __getattribute__(self, name):
        raise Worse(name)


class BadClass(ValueError):
    __class__ = property(refuse)


class OddText(str):
    __reduce_ex__ = __reduce__ = refuse


class OddStr(ValueError):
    def __str__(self):
        return OddText("odd")


class BadFilename(OSError):
    filename = property(refuse)


class BadErrno(OSError):
    errno = property(exit_)


class BadEqual(ValueError):
    __eq__ = __hash__ = __bool__ = refuse


class WantsMore(ValueError):
    def __init__(self, one, two):
        super().__init__(one)


class Sulks:
    """An argument of an exception."""

    __repr__ = __str__ = refuse
    __reduce_ex__ = __reduce__ = exit_


def notes_are_no_list():
    error = ValueError("odd")
    error.__notes__ = 5
    return error


def caused():
    error = ValueError("odd")
    error.__cause__ = BadGetattribute("odd")
    return error


ERRORS = {
    **{
        kind.__name__: (lambda kind=kind: kind("odd"))
        for kind in ValueError.__subclasses__()
        if kind.__module__ == __name__ and kind is not WantsMore
    },
    "BadFilename": lambda: BadFilename(2, "odd", "name"),
    "BadErrno": lambda: BadErrno(2, "odd"),
    "WantsMore": lambda: WantsMore(1, 2),
    "argument": lambda: ValueError(Sulks(), 1),
    "lock": lambda: ValueError(threading.Lock()),
    "errno is no number": lambda: OSError(threading.Lock(), "odd"),
    "syntax error": lambda: SyntaxError("odd", (Sulks(), "line", Sulks(), 5)),
    "notes are no list": notes_are_no_list,
    "caused by one": caused,
    "group": lambda: ExceptionGroup("odd", [BadStr("odd"), BadNotes("odd")]),
    "large": lambda: ValueError("x" * (8 << 20)),
    "stop": lambda: StopAsyncIteration(Sulks()),
}


PAST_EXCEPTION = {
    "BadStrBeyond",
    "BadReduceBeyond",
    "BadLoad",
    "BadAttributes",
    "BadNotesBeyond",
    "BadContext",
    "BadErrno",
    "argument",
    "stop",
    "syntax error",
}


class Samples(Dataset):
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        if index == BAD:
            raise ERRORS[self.error]()
        return index


class Stream(IterableDataset):
    """Its iterator is no generator: it goes on after an exception."""

    def __init__(self, error):
        self.error = error

    def __iter__(self):
        self.number = -1
        return self

    def __next__(self):
        self.number += 1
        if self.number == LENGTH:
            raise StopIteration
        if self.number == BAD:
            raise ERRORS[self.error]()
        return self.number


class Generated(Stream):
    def __iter__(self):
        for index in range(LENGTH):
            if index == BAD:
                raise ERRORS[self.error]()
            yield index


class Collates:
    def __init__(self, error):
        self.error = error

    def __call__(self, samples):
        if BAD in samples:
            raise ERRORS[self.error]()
        return torch.tensor(samples)


class Starts:
    def __init__(self, error):
        self.error = error

    def __call__(self, worker):
        raise ERRORS[self.error]()


def outcomes(loader):
    """Each batch as a list, or the type of what it raised; no worker has ended."""
    batches = iter(loader)
    found = []
    for _ in range(2 * LENGTH):
        try:
            found.append(next(batches).tolist())
        except StopIteration:
            break
        except BaseException as error:
            found.append(type(error))
    assert loader.stats()["restarts"] == 0
    return found


def as_itself(error):
    kind = type(ERRORS[error]())
    return (kind, SampleError)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_exception_of_a_sample_reaches_the_user(workers):
    """Whatever it does when it is asked; and the batches before and behind it come."""
    for error in ERRORS:
        if workers == 0 and error in PAST_EXCEPTION:
            continue  # in the trainer what is no Exception passes: it may be a Ctrl-C
        found = outcomes(DataLoader(Samples(error), batch_size=2, num_workers=workers))
        assert [found[0], *found[2:]] == [[0, 1], [4, 5], [6, 7]], error
        assert found[1] in as_itself(error), error


@pytest.mark.parametrize("retries", [0, 1])
def test_a_sample_that_raises_is_left_out(retries):
    policy = Policy(bad_sample="skip", max_bad=1.0, retries=retries, retry_on=(Exception,), retry_delay=0.001)
    for error in ERRORS:
        loader = DataLoader(Samples(error), batch_size=2, num_workers=1, policy=policy)
        assert outcomes(loader) == [[0, 1], [2], [4, 5], [6, 7]], error
        assert len(loader.report().bad_samples) == 1
        str(loader.report())


@pytest.mark.parametrize("kind", [Stream, Generated])
def test_an_exception_of_a_stream_reaches_the_user(kind):
    for error in ERRORS:
        if kind is Generated and error == "stop":
            continue
        found = outcomes(DataLoader(kind(error), batch_size=2, num_workers=1))
        assert found[0] == [0, 1], error
        assert found[1] in as_itself(error), error
        # A generator that raised is finished; other iterators go on.
        assert found[2:] == ([] if kind is Generated else [[4, 5], [6, 7]]), error


def test_an_exception_of_a_collate_fn_reaches_the_user():
    for error in ERRORS:
        loader = DataLoader(range(LENGTH), batch_size=2, num_workers=1, collate_fn=Collates(error))
        found = outcomes(loader)
        assert [found[0], *found[2:]] == [[0, 1], [4, 5], [6, 7]], error
        assert found[1] in as_itself(error), error


def test_an_exception_of_a_worker_init_fn_reaches_the_user():
    for error in ERRORS:
        with pytest.raises(as_itself(error)):
            next(iter(DataLoader(range(LENGTH), num_workers=1, worker_init_fn=Starts(error))))


def raises(error):
    raise ERRORS[error]()


def test_an_exception_of_a_task_of_a_pool_reaches_the_user():
    with Pool(1) as pool:
        for error in ERRORS:
            raised = pool.submit(raises, error).exception(timeout=60)
            assert type(raised) in as_itself(error), error
        assert pool.submit(len, "pool").result(timeout=60) == 4
        assert pool.stats()["restarts"] == 0


class Refuses:
    """Cannot be sent, and cannot be asked why."""

    def __reduce_ex__(self, protocol):
        raise BadStr("odd")

    __repr__ = refuse


class RefusesBeyond(Refuses):
    def __reduce_ex__(self, protocol):
        raise BadNotesBeyond("odd")


class Opens:
    """Cannot be opened."""

    def __reduce__(self):
        return raises, ("BadStrBeyond",)


class OddKey(str):
    __repr__ = __str__ = refuse
    __hash__ = str.__hash__


SAMPLES = {
    "refuses": lambda: Refuses(),
    "in a dict": lambda: {"a": [Refuses()]},
    "behind an odd key": lambda: {OddKey("a"): Refuses()},
}


class Unsendable(Dataset):
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return SAMPLES[self.kind]() if index == BAD else index


def the_first(samples):
    return samples[-1] if not isinstance(samples[-1], int) else torch.tensor(samples)


def test_what_cannot_be_sent_is_said():
    for kind in SAMPLES:
        loader = DataLoader(Unsendable(kind), batch_size=2, num_workers=1, collate_fn=the_first)
        found = outcomes(loader)
        assert [found[0], *found[2:]] == [[0, 1], [4, 5], [6, 7]], kind
        assert found[1].__name__ == "CannotSend", kind


def test_what_a_pool_cannot_send_or_open_is_said():
    with Pool(1) as pool:
        with pytest.raises(BadStr):
            pool.submit(id, Refuses()).result(timeout=60)
        with pytest.raises(BadNotesBeyond):
            pool.submit(id, RefusesBeyond()).result(timeout=60)
        assert isinstance(pool.submit(Refuses).exception(timeout=60), BadStr)
        assert isinstance(pool.submit(len, Opens()).exception(timeout=60), TaskLost)
        assert isinstance(pool.submit(Opens).exception(timeout=60), TaskLost)
        assert pool.submit(len, "pool").result(timeout=60) == 4


class LazyDict(dict):
    """Loads what is asked for: each time something else."""

    def __getitem__(self, key):
        return torch.rand(1)


class BadDict(dict):
    __getitem__ = __iter__ = __len__ = keys = items = values = refuse


class LazyList(list):
    def __iter__(self):
        torch.rand(1)
        return super().__iter__()


class BadList(list):
    __getitem__ = __iter__ = __len__ = refuse


class BadTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__reduce_ex__:
            return super().__torch_function__(function, types, args, kwargs)
        raise Worse(str(function))


class BadNumber(float):
    __repr__ = refuse


class BadWord(str):
    encode = exit_


class BadArray(np.ndarray):
    flat = property(exit_)


ITEMS = {
    "lazy dict": lambda: LazyDict(a=1),
    "lazy list": lambda: LazyList([1]),
    "bad dict": lambda: BadDict(a=1),
    "bad list": lambda: BadList([1]),
    "tensor": lambda: torch.ones(3).as_subclass(BadTensor),
    "number": lambda: BadNumber(1.5),
    "word": lambda: BadWord("word"),
    "array": lambda: np.ones(3).view(BadArray),
    "nested": lambda: [{"a": (BadWord("word"), np.ones(3).view(BadArray))}],
}


class Items(IterableDataset):
    """Items that raise when they are looked at, each followed by a number of torch's."""

    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        for _ in range(3):
            yield ITEMS[self.kind](), torch.rand(1).item()


def the_numbers(items):
    return torch.tensor([number for _, number in items])


def test_items_of_a_stream_are_looked_at_without_their_own_code():
    """It may raise, and it may draw random numbers, which would change those of the dataset."""
    want = None
    for kind in ITEMS:
        torch.manual_seed(3)
        found = outcomes(DataLoader(Items(kind), batch_size=3, num_workers=1, collate_fn=the_numbers))
        assert len(found) == 1, kind
        want = want or found
        assert found == want, kind


class BadKind:
    """What it is an instance of cannot be asked."""

    __class__ = property(exit_)


class BadToLookAt:
    def __getattribute__(self, name):
        raise Beyond(name)


class Pairs(Dataset):
    """For the default collation, which asks what the first sample is."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return (index, self.kind()) if index in (BAD - 1, BAD) else index


class StreamOfPairs(Pairs, IterableDataset):
    def __iter__(self):
        return map(self.__getitem__, range(LENGTH))


@pytest.mark.parametrize("kind", [BadKind, BadToLookAt])
@pytest.mark.parametrize("dataset", [Pairs, StreamOfPairs])
def test_a_sample_that_cannot_be_asked_what_it_is(kind, dataset):
    """Torch's collation asks it, too: what it raises there reaches the user."""
    found = outcomes(DataLoader(dataset(kind), batch_size=2, num_workers=1))
    assert [found[0], *found[2:]] == [[0, 1], [4, 5], [6, 7]]
    assert found[1] in (Beyond, SampleError)


class BadIndex(int):
    __repr__ = __str__ = __format__ = refuse


@pytest.mark.parametrize("bad_sample", ["raise", "skip", "replace"])
def test_an_index_that_cannot_be_shown(bad_sample, tmp_path, monkeypatch):
    """It is in the exception's note, in the report and in the run folder, which say what they can."""
    monkeypatch.setenv("HOLDFAST_RUN_DIR", str(tmp_path))
    policy = Policy(bad_sample=bad_sample, max_bad=1.0)
    order = [BadIndex(index) for index in range(LENGTH)]
    loader = DataLoader(Samples("BadStr"), sampler=order, batch_size=2, num_workers=1, policy=policy)
    found = outcomes(loader)
    assert [found[0], *found[2:]] == [[0, 1], [4, 5], [6, 7]]
    assert found[1] is BadStr if bad_sample == "raise" else isinstance(found[1], list)
    assert "BadIndex" in str(loader.report())
    assert [file for file in tmp_path.glob("incidents-*.jsonl") if "BadStr" in file.read_text()]


class Unlike(int):
    """What a copy is made of, and what JSON makes of numbers, are the user's own code."""

    __deepcopy__ = __copy__ = refuse
    __reduce_ex__ = object.__reduce_ex__


class Key:
    """An index that is no number, and is not copied."""

    def __init__(self, number):
        self.number = number

    __deepcopy__ = __copy__ = refuse

    def __repr__(self):
        return f"Key({self.number})"


class SulkyKey(Key):
    __repr__ = refuse


def itself(number):
    index = [number]
    index.append(index)
    return index


# How an index is made of a number, and which number it stands for; how JSON has it.
INDICES = {
    "keys that are tuples": (lambda number: {(1, 2): number}, lambda index: index[1, 2], "{(1, 2): 3}"),
    "inside a tuple": (lambda number: (number, {(1, 2): 3}), lambda index: index[0], "(3, {(1, 2): 3})"),
    "not to be copied": (Key, lambda index: index.number, "Key(3)"),
    "a number not to be copied": (Unlike, int, 3),
    "not to be copied or shown": (SulkyKey, lambda index: index.number, "<a SulkyKey, whose __repr__ raised Worse>"),
    "holds itself": (itself, lambda index: index[0], "[3, [...]]"),
    "too long a number": (
        lambda number: (number, 10**5000),
        lambda index: index[0],
        "<a tuple, whose __repr__ raised ValueError>",
    ),
    "a list": (lambda number: [number, "a"], lambda index: index[0], [3, "a"]),
    "a set": (lambda number: {number}, min, "{3}"),
}


class Indexed(Dataset):
    """Each index stands for a number."""

    def __init__(self, kind):
        self.number_of = INDICES[kind][1]

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        number = self.number_of(index)
        if number == BAD:
            raise ValueError("odd")
        return number


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("bad_sample", ["raise", "skip", "replace"])
def test_an_index_that_json_cannot_hold(bad_sample, kept, workers, tmp_path, monkeypatch):
    """It is not copied. Where JSON has no way to write it, it stands there as text."""
    for kind, (index, number, told) in INDICES.items():
        folder = tmp_path / kind
        monkeypatch.setenv("HOLDFAST_RUN_DIR", str(folder)) if kept else monkeypatch.delenv("HOLDFAST_RUN_DIR", False)
        order = [[index(first), index(first + 1)] for first in range(0, LENGTH, 2)]
        policy = Policy(bad_sample=bad_sample, max_bad=1.0)
        loader = DataLoader(Indexed(kind), batch_sampler=order, num_workers=workers, policy=policy)
        found = outcomes(loader)
        assert [found[0], *found[2:]] == [[0, 1], [4, 5], [6, 7]], kind
        assert found[1] is ValueError if bad_sample == "raise" else found[1][0] == 2
        report = json.loads(loader.report().to_json())
        assert report["incidents"][0]["index"] == report["bad_samples"][0]["index"] == told
        (raw,) = loader.report().to_dict()["bad_samples"]
        assert number(raw["index"]) == BAD
        if kept:
            lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
            assert [line["index"] for line in lines] == [told], kind
            assert not workers or lines[0]["again"]["indices"][1] == told


def test_an_exception_larger_than_any_slot_reaches_the_user(tmp_path):
    """Where a limit on files makes the slots small, its text is cut."""
    import resource
    import subprocess
    import sys

    body = """
import resource
from holdfast import DataLoader
class Samples:
    def __len__(self): return 4
    def __getitem__(self, index):
        if index == 1:
            raise ValueError("x" * (300 << 20))
        return index
loader = DataLoader(Samples(), batch_size=1, num_workers=1)
batches = iter(loader)
found = []
for _ in range(4):
    try: found.append(int(next(batches)))
    except Exception as error: found.append((type(error).__name__, len(str(error)) < 1 << 20))
print(found, loader.stats()["restarts"])
"""
    limit = 1 << 30

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = subprocess.run(
        [sys.executable, "-c", body], capture_output=True, text=True, timeout=100, check=False, preexec_fn=limited
    )
    assert done.stdout.strip() == "[0, ('SampleError', True), 2, 3] 0", done.stderr[-2000:]
