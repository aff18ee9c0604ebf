"""Subclasses that were written for torch's loader: whatever names they use for themselves are theirs."""

import copy
import inspect
import pickle
import subprocess
import sys

import pytest
import torch.utils.data

from holdfast import DataLoader, Policy

from .data import Numbers, flat


class Before(DataLoader):
    """Sets its own attributes first."""

    def __init__(self, *args, **kwargs):
        self.policy, self.device, self.incidents, self.stats, self.report = "mine", "cuda:7", [], {}, None
        super().__init__(*args, **kwargs)


class After(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.policy, self.device, self.incidents, self.stats, self.report = "mine", "cuda:7", [], {}, None


class Named(DataLoader):
    """Its own arguments, as Accelerate's loaders have `device`."""

    def __init__(self, dataset, device, policy="mine", **kwargs):
        super().__init__(dataset, **kwargs)
        self.device, self.policy = device, policy


class Properties(DataLoader):
    @property
    def device(self):
        return "cuda:7"

    policy = "mine"


MAKE = {
    "before": Before,
    "after": After,
    "named": lambda dataset, **kwargs: Named(dataset, "cuda:7", **kwargs),
    "properties": Properties,
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", MAKE)
def test_names_of_a_subclass_are_its_own(kind, workers, monkeypatch):
    """What it sets is what it reads, is not taken for ours, and survives a copy."""
    monkeypatch.setenv("HOLDFAST_RETRIES", "3")
    loader = MAKE[kind](Numbers(8), batch_size=2, num_workers=workers)
    for made in (loader, copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert (made.policy, made.device) == ("mine", "cuda:7")
        if kind in ("before", "after"):
            assert (made.incidents, made.stats, made.report) == ([], {}, None)
        assert flat(made) == list(range(8))


def rebuilt(loader, **changes):
    """As Lightning does it: public attributes that are arguments, those of torch's name for **kwargs."""
    known = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
    wanted = dict(inspect.signature(loader.__init__).parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in wanted.values()):
        wanted |= inspect.signature(DataLoader.__init__).parameters
    kwargs = {name: known[name] for name in wanted if name in known}
    kwargs |= {"multiprocessing_context": None, "batch_size": 1, "shuffle": False, "sampler": None, "drop_last": False}
    kwargs.pop("batch_sampler", None)
    return type(loader)(**kwargs | changes)


@pytest.mark.parametrize("kind", ["before", "after", "named"])
def test_a_rebuilt_subclass_keeps_its_own_and_ours(kind):
    """Neither is taken for the other."""
    loader = MAKE[kind](Numbers(8), batch_size=2, **({} if kind == "named" else {"policy": Policy(retries=3)}))
    again = rebuilt(loader)
    assert (again.policy, again.device) == ("mine", "cuda:7")
    assert flat(again) == list(range(8))
    if kind != "named":
        assert vars(again)["policy"] == Policy(retries=3) and "device" not in vars(again)


class Plain(DataLoader):
    def __init__(self, dataset, **kwargs):
        super().__init__(dataset, **kwargs)


class OwnDefault(DataLoader):
    """Looks whether somebody has set them."""

    def __getattr__(self, name):
        if name in ("policy", "device"):
            return "default"
        raise AttributeError(name)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [DataLoader, Plain])
def test_what_nobody_gave_is_no_attribute(kind, workers):
    """As with torch's loader: `hasattr`, and `getattr` with a default, tell what the user has set."""
    loader = kind(Numbers(8), batch_size=2, num_workers=workers)
    for made in (loader, copy.copy(loader), pickle.loads(pickle.dumps(loader)), rebuilt(loader)):
        assert not hasattr(made, "policy") and not hasattr(made, "device")
        assert getattr(made, "device", "default") == "default"
        assert flat(made) == list(range(8))
        made.device = "cuda:7"
        assert made.device == "cuda:7"
        del made.device
        assert not hasattr(made, "device")


def test_the_default_of_a_subclass_is_asked():
    """It stands behind attributes that are not there."""
    loader = OwnDefault(Numbers(8), batch_size=2, num_workers=1)
    assert (loader.policy, loader.device) == ("default", "default")
    assert flat(loader) == list(range(8))


class Holey(Numbers):
    def __getitem__(self, index):
        if index == 2:
            raise ValueError("a hole")
        return index


@pytest.mark.parametrize("kind", [DataLoader, Plain])
def test_what_was_not_given_is_the_same_in_a_rebuilt_loader(kind, monkeypatch):
    """The policy of the environment, and workers that are many by themselves."""
    monkeypatch.setenv("HOLDFAST_BAD_SAMPLE", "skip")
    again = rebuilt(kind(Holey(4), batch_size=2, num_workers=1))
    assert flat(again) == [0, 1, 3]
    again = rebuilt(kind(Holey(4), batch_size=2, num_workers="auto"))
    assert again.policy == Policy(bad_sample="skip", auto_workers=True)


class Forwards(DataLoader):
    """Knows of Holdfast."""

    def __init__(self, dataset, policy=None, device=None, **kwargs):
        super().__init__(dataset, policy=policy, device=device, **kwargs)


@pytest.mark.parametrize("kind", [DataLoader, Forwards])
def test_a_rebuilt_loader_keeps_ours(kind):
    """The policy and the device go along."""
    again = rebuilt(kind(Numbers(8), batch_size=2, policy=Policy(retries=3), device="meta"))
    assert (again.policy, again.device) == (Policy(retries=3), "meta")
    assert [batch.device.type for batch in again] == ["meta"] * 8


def test_a_policy_that_is_set_later_is_ours(tmp_path):
    """Of what is set to that name, a Policy can mean nothing else."""
    loader = DataLoader([1, 2, 3], batch_size=3, collate_fn=list)
    loader.policy = Policy(bad_sample="skip")
    loader.dataset[1:2] = []
    loader.batch_sampler.sampler = [0, 7, 1]
    assert list(loader) == [[1, 3]]
    assert [bad.index for bad in loader.incidents if bad.index is not None] == [7]


SCRIPT = """
import torch
from torch.utils.data import DataLoader

class Mine(DataLoader):
    def __init__(self, *args, **kwargs):
        self.device = "cuda:7"
        super().__init__(*args, **kwargs)
        self.policy, self.incidents = {"lr": 0.1}, []

loader = Mine(list(range(8)), batch_size=4, num_workers=1)
print([batch.tolist() for batch in loader], loader.device, loader.policy, loader.incidents)
"""


def test_an_unchanged_script_may_use_any_name(tmp_path):
    """With `holdfast run` it prints what it prints with torch's loader."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    said = []
    for words in ([], ["-m", "holdfast", "run"]):
        command = [sys.executable, *words, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1]


WAS_PICKLED = """
import pickle, sys
from torch.utils.data import DataLoader

class Mine(DataLoader):
    pass

class Reads(DataLoader):
    def __setstate__(self, state):
        self.__dict__.update(state)

if sys.argv[1] == "write":
    with open(sys.argv[2], "wb") as file:
        for kind in (DataLoader, Mine, Reads):
            for workers in (0, 1):
                pickle.dump(kind(range(8), batch_size=4, num_workers=workers), file)
else:
    with open(sys.argv[2], "rb") as file:
        for _ in range(6):
            loader = pickle.load(file)
            for epoch in range(2):
                print([batch.tolist() for batch in loader], hasattr(loader, "policy"))
            print("Holdfast" if hasattr(loader, "stats") and loader.stats()["batches"] == 4 else "torch")
            if hasattr(loader, "report"):
                assert "nothing went wrong" in str(loader.report()) and not loader.incidents
"""


def test_a_loader_that_was_pickled_with_torchs_class(tmp_path):
    """Under `holdfast run` the name leads to ours: it has the defaults."""
    script, kept = tmp_path / "train.py", tmp_path / "loaders"
    script.write_text(WAS_PICKLED)

    def said(*words):
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said(str(script), "write", str(kept))
    before = said(str(script), "read", str(kept))
    assert before.count("[[0, 1, 2, 3], [4, 5, 6, 7]] False\n") == 12
    ours = said("-m", "holdfast", "run", str(script), "read", str(kept))
    assert ours == before.replace("torch", "Holdfast")


def test_isinstance_holds():
    """A subclass of ours is one of torch's."""
    assert issubclass(Before, torch.utils.data.DataLoader)
