"""Functions of the user's in torch's registry: what they do with a batch, torch's loader and ours give back alike.

A batch lies in a slot that is written again. So nothing of the user's may hold one before it is sent.
"""

import collections
import functools
import itertools
import sys
import threading
import time

import pytest
import torch
import torch.utils.data._utils.collate as torch_collate
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from holdfast import DataLoader

from .test_batches import described

LENGTH, BATCH = 12, 2
registry = torch_collate.default_collate_fn_map


@pytest.fixture(autouse=True)
def registry_as_it_was():
    before = dict(registry)
    functions = torch_collate.default_collate, torch_collate.collate
    yield
    registry.clear()
    registry.update(before)
    torch_collate.default_collate, torch_collate.collate = functions


def square(index):
    return torch.arange(9.0).view(3, 3) + 100 * index


class Marked(torch.Tensor):
    """A tensor subclass."""


class Samples(Dataset):
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return self.make(index)


def batches(loader_class, make, workers=1, **options):
    loader = loader_class(Samples(make), batch_size=BATCH, num_workers=workers, **options)
    return [described(batch) for batch in loader]


def check(make, **options):
    """One worker for all batches: what it keeps of one comes back with the next."""
    want = batches(TorchLoader, make, **options)
    assert batches(DataLoader, make, **options) == want
    return want


CHANGES = {
    "unsqueeze_": lambda t: t.unsqueeze_(1),
    "transpose_": lambda t: t.transpose_(1, 2),
    "t_ of a square": lambda t: t[0].t_(),
    "swapaxes_": lambda t: t.swapaxes_(0, 1),
    "squeeze_": lambda t: t.unsqueeze_(0).squeeze_(0).unsqueeze_(-1),
    "resize_": lambda t: t.resize_(2, 4),
    "as_strided_": lambda t: t.as_strided_((2, 3), (3, 1), 9),
    "requires_grad_": lambda t: t.requires_grad_(),
    "data": lambda t: setattr(t, "data", torch.full((5,), float(t.sum()))) or t,
    "dtype": lambda t: setattr(t, "data", t.to(torch.int64)) or t,
    "set_": lambda t: t.set_(torch.ones(2, 2)),
    "values": lambda t: t.add_(1),
    "an attribute": lambda t: setattr(t, "mark", 1) or t,
}
WAYS = {
    "default_collate": lambda parts, functions: torch.utils.data.default_collate(parts),
    "collate": lambda parts, functions: torch_collate.collate(parts, collate_fn_map=functions),
    "the registered function": lambda parts, functions: functions[torch.Tensor](parts, collate_fn_map=functions),
    "torch's function": lambda parts, functions: torch_collate.collate_tensor_fn(parts, collate_fn_map=functions),
    "in a dict": lambda parts, functions: torch.utils.data.default_collate([{"part": p} for p in parts])["part"],
}


class Boxed:
    """A class of the user's, with a function of its own in the registry."""

    def __init__(self, value, change=""):
        self.value = value
        self.change = change


@pytest.mark.parametrize("way", WAYS)
def test_a_function_changes_what_default_collate_made(way):
    """In place: torch has it changed, so have we; and the batches that follow are not changed by it."""

    def boxes(batch, *, collate_fn_map=None):
        made = WAYS[way]([box.value for box in batch], collate_fn_map)
        CHANGES[batch[0].change](made)
        return made

    registry[Boxed] = boxes
    changes = [change for change in CHANGES if (change, way) != ("set_", "torch's function")]
    check(lambda i: {"beside": square(i + 50)} | {change: Boxed(square(i), change) for change in changes})
    for change in changes[:2]:
        check(lambda i, change=change: Boxed(square(i), change))


class Keeper:
    """Gives each result together with all that it gave before."""

    def __init__(self):
        self.kept = []

    def __call__(self, made):
        self.kept.append(made)
        return list(self.kept)


@pytest.mark.parametrize("kind", [Boxed, Marked, dict, list, tuple, torch.Tensor, collections.abc.Mapping], ids=str)
def test_a_function_keeps_what_it_made(kind):
    """Of whatever type it is: a later batch does not change what an earlier one left."""
    keeper = Keeper()
    made_by_torch = registry[torch.Tensor]
    samples = {
        Boxed: lambda i: Boxed(square(i)),
        Marked: lambda i: square(i).as_subclass(Marked),
        dict: lambda i: {"a": square(i)},
        list: lambda i: [square(i)],
        tuple: lambda i: (square(i), i),
        torch.Tensor: square,
        collections.abc.Mapping: lambda i: collections.OrderedDict(a=square(i)),
    }
    parts = {
        Boxed: lambda sample: sample.value,
        Marked: lambda sample: sample.as_subclass(torch.Tensor),
        torch.Tensor: lambda sample: sample,
        list: lambda sample: sample[0],
        tuple: lambda sample: sample[0],
    }
    part = parts.get(kind, lambda sample: sample["a"])

    def function(batch, *, collate_fn_map=None):
        if kind is torch.Tensor:  # as one that only adds to what torch does
            return keeper(made_by_torch(batch, collate_fn_map=collate_fn_map))
        return keeper(torch_collate.collate_tensor_fn([part(sample) for sample in batch]))

    def through_the_registry(batch, *, collate_fn_map=None):
        return keeper(made_by_torch([part(sample) for sample in batch], collate_fn_map=collate_fn_map))

    for tried in (function, through_the_registry):
        keeper.kept.clear()
        registry[kind] = tried
        check(samples[kind])


def test_a_function_for_tensors_that_calls_what_was_registered_before_it():
    """In the worker that is no more torch's own function."""
    keeper = Keeper()

    def register(worker):
        before = registry[torch.Tensor]
        registry[torch.Tensor] = lambda batch, *, collate_fn_map=None: keeper(
            before(batch, collate_fn_map=collate_fn_map).unsqueeze_(1)
        )

    check(lambda i: (square(i), i), worker_init_fn=register)


def test_a_partial_of_torchs_own_function():
    registry[Marked] = functools.partial(torch_collate.collate_tensor_fn)
    check(lambda i: (square(i).as_subclass(Marked), i))


def test_the_registered_function_is_asked_for_where_it_is_registered_late():
    """By the dataset, with the first sample that needs it."""
    keeper = Keeper()

    def make(index):
        registry[Boxed] = lambda batch, *, collate_fn_map=None: keeper(
            torch_collate.collate([box.value for box in batch], collate_fn_map=collate_fn_map).unsqueeze_(1)
        )
        return {"a": square(index), "b": Boxed(square(index))} if index >= 4 else square(index)

    check(make)


class Shelf(dict):
    """A dict of the user's, that changes and keeps what it is given."""

    kept: list = []

    def update(self, parts):
        for key, part in parts.items():
            self.kept.append(part)
            self[key] = part.unsqueeze_(1) if isinstance(part, torch.Tensor) else part
        self["kept"] = list(self.kept)


class Row(list):
    """A list of the user's."""

    kept: list = []

    def __setitem__(self, place, part):
        self.kept.append(part)
        super().__setitem__(place, (part.unsqueeze_(1), list(self.kept)))


class Pair(collections.namedtuple("Pair", "image label")):
    """A named tuple of the user's, with a constructor of its own."""

    kept: list = []

    def __new__(cls, image, label):
        if isinstance(image, torch.Tensor) and image.dim() > 2:  # (a batch; and it is made once more in the trainer)
            cls.kept.append(image)
            image = [image.unsqueeze_(1), *cls.kept]
        return super().__new__(cls, image, label)


class Alike(type):
    def __instancecheck__(cls, instance):
        return isinstance(instance, list)


class Lists(metaclass=Alike):
    """Every list is one, for isinstance()."""


@pytest.mark.parametrize(
    "make", [lambda i: Shelf(a=square(i)), lambda i: Row([square(i)]), lambda i: Pair(square(i), i)]
)
def test_a_class_of_the_users_is_given_the_parts(make):
    """Torch's own function puts the parts into an object of the sample's class, whose methods are the user's."""
    for kind in (Shelf, Row, Pair):
        kind.kept.clear()
    want = batches(TorchLoader, make)
    for kind in (Shelf, Row, Pair):
        kind.kept.clear()
    assert batches(DataLoader, make) == want


def test_a_class_of_the_users_inside_a_plain_sample():
    Shelf.kept.clear()
    want = batches(TorchLoader, lambda i: [{"a": (square(i), Shelf(b=square(i + 20)))}, i])
    Shelf.kept.clear()
    assert batches(DataLoader, lambda i: [{"a": (square(i), Shelf(b=square(i + 20)))}, i]) == want


class Lazy(dict):
    """A dict of the user's that makes its parts with default_collate when it is asked for them, and keeps them."""

    kept: list = []

    def __getitem__(self, key):
        made = torch.utils.data.default_collate(super().__getitem__(key)).unsqueeze_(0)
        self.kept.append(made)
        return made[0] + sum(float(kept.sum()) for kept in self.kept)


class Rows(list):
    """A list of the user's that does the same."""

    kept: list = []

    def __iter__(self):
        for part in list.__iter__(self):
            made = registry[torch.Tensor](part, collate_fn_map=registry).transpose_(0, 1)
            self.kept.append(made)
            yield made + sum(float(kept.sum()) for kept in self.kept)


LATER = {
    "a dict": lambda later, i: Lazy(a=list(square(i))) if later else {"a": square(i)},
    "a dict inside": lambda later, i: [{"b": Lazy(a=list(square(i))) if later else {"a": square(i)}}, i],
    "a list": lambda later, i: Rows([list(square(i))]) if later else [square(i)],
    "a list inside": lambda later, i: ({"b": Rows([list(square(i))]) if later else [square(i)]}, square(i)),
    "a dict with a function in the registry": lambda later, i: Boxes(a=square(i)) if later else {"a": square(i)},
    "a tensor": lambda later, i: square(i).as_subclass(Collates) if later else square(i),
    "a tensor inside": lambda later, i: {"a": (square(i).as_subclass(Collates) if later else square(i), i)},
}


class Boxes(dict):
    """Torch goes by the first sample; this one calls default_collate for its parts with itself as the first."""

    kept: list = []

    def __getitem__(self, key):
        return torch.utils.data.default_collate([self])[key]


class Collates(torch.Tensor):
    """A tensor of the user's that uses default_collate whenever torch tells it of a function."""

    kept: list = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        made = super().__torch_function__(function, types, args, kwargs or {})
        if function is torch.stack:
            made = made.as_subclass(torch.Tensor)
            cls.kept.append(torch.utils.data.default_collate(list(made)))
            made = made + sum(float(kept.sum()) for kept in cls.kept)
        return made


@pytest.mark.parametrize("kind", LATER)
def test_a_later_sample_of_a_class_of_the_users(kind):
    """Torch goes by the first sample, which is plain. What a later one makes with default_collate is its own."""

    def boxes(batch, *, collate_fn_map=None):
        made = torch.utils.data.default_collate([dict.__getitem__(box, "a") for box in batch])
        Boxes.kept.append(made)
        return {"a": made[0] + sum(float(kept.sum()) for kept in Boxes.kept)}

    registry[Boxes] = boxes
    found = []
    for loader_class in (TorchLoader, DataLoader):
        for user in (Lazy, Rows, Boxes, Collates):
            user.kept.clear()
        found.append(batches(loader_class, lambda i: LATER[kind](i % BATCH, i)))
    assert found[0] == found[1]


class Told(torch.Tensor):
    """Is told of each function that it is given to: it changes what stack() made, and keeps it."""

    kept: list = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        made = super().__torch_function__(function, types, args, kwargs or {})
        if function is torch.stack:
            made = made.as_subclass(torch.Tensor)
            cls.kept.append(made)
            made = made.unsqueeze_(1) + sum(float(kept.sum()) for kept in cls.kept)
        return made


@pytest.mark.parametrize("place", [0, 1])
def test_a_tensor_subclass_among_plain_ones(place):
    """It is told of their stack(), wherever in the batch it is."""

    def make(index):
        return (square(index).as_subclass(Told) if index % BATCH == place else square(index)), square(index)

    Told.kept.clear()
    want = batches(TorchLoader, make)
    Told.kept.clear()
    assert batches(DataLoader, make) == want


class Listens(torch.overrides.TorchFunctionMode):
    """Is told of all functions."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function is torch.stack:
            Told.kept.append(made)
            made = made.unsqueeze_(1) + sum(float(kept.sum()) for kept in Told.kept)
        return made


def test_a_mode_of_the_users_in_the_worker():
    """What it makes of a batch counts."""
    Told.kept.clear()
    check(lambda i: (square(i), i), worker_init_fn=lambda worker: Listens().__enter__())


def test_a_function_registered_for_what_isinstance_says():
    keeper = Keeper()
    registry[Lists] = lambda batch, *, collate_fn_map=None: keeper(
        collate_fn_map[torch.Tensor]([sample[0] for sample in batch])
    )
    check(lambda i: [square(i)])


@pytest.mark.parametrize("name", ["default_collate", "collate"])
def test_torchs_own_function_is_replaced(name):
    """By one that calls it, and changes and keeps what it made. Libraries do that."""
    keeper = Keeper()
    own = getattr(torch_collate, name)

    @functools.wraps(own)
    def replaced(batch, **options):
        return keeper(own(batch, **options).unsqueeze_(1))

    setattr(torch_collate, name, replaced)
    check(square)


def test_another_thread_collates_meanwhile():
    """A dataset may have threads of its own, which call default_collate, too: what they made stays what it is."""
    made = []
    stop = threading.Event()

    def collate_on():
        sys.setswitchinterval(1e-6)
        for number in itertools.count():
            if stop.is_set():
                break
            if len(made) >= 20_000:
                del made[:10_000]
            made.append((number, torch.utils.data.default_collate([torch.full((3, 3), float(number))] * BATCH)))

    def make(index):
        if not made:
            threading.Thread(target=collate_on, daemon=True).start()
            while not made:
                time.sleep(0.001)
        if index == LENGTH - 1:
            stop.set()
            wrong = [number for number, batch in list(made) if not (batch == number).all()]
            return [torch.full((3, 3), float(len(wrong)))]
        return [square(index)] * 300  # the thread has time enough while these are collated

    loader = DataLoader(Samples(make), batch_sampler=[*([i] for i in range(LENGTH))], num_workers=1)
    got = [batch[0] for batch in loader]
    assert got[-1].sum() == 0
    assert torch.equal(torch.cat(got[:-1]), torch.stack([square(index) for index in range(LENGTH - 1)]))
