"""DataLoader: torch's signature and attributes, `policy` and `device`; no logic."""

import inspect
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar

import torch.utils.data
from torch.utils.data import Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from holdfast.diagnose.incident import Incident
from holdfast.diagnose.narrator import Record
from holdfast.diagnose.report import Report
from holdfast.diagnose.run_folder import RunFolder
from holdfast.diagnose.stats import to_dict
from holdfast.loader.device import checked
from holdfast.loader.inline import InlineIterator
from holdfast.loader.iterator import InheritedIterator, WorkerIterator
from holdfast.loader.loader_narrator import totals
from holdfast.policy import Policy
from holdfast.system.cgroups import usable_cpus

# Arguments of ours as public attributes of a loader whose subclasses do not know of us.
#
# A subclass that was written for torch's loader may use any name for itself, `self.device` above all. So what we go by
# is private (`_holdfast_...`), and a subclass reads what it has set. But frameworks rebuild a loader from its `vars()`:
# there, `policy` and `device` are ours, unless the subclass has arguments of these names. What the user did not give is
# no attribute, as with torch's loader: a subclass may ask `hasattr`, or `getattr` with a default of its own.


class Argument:
    """A public attribute that shows an argument of ours, until the user sets it to something of theirs."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name, self._theirs = owner, name, f"_users_{name}"

    def __get__(self, loader: Any, owner: type | None = None) -> Any:
        if loader is None:
            return self
        known = vars(loader)
        for name in (self._theirs, self._name):
            if name in known:
                return known[name]
        raise AttributeError(f"{type(loader).__name__!r} object has no attribute {self._name!r}")

    def __set__(self, loader: Any, value: Any) -> None:
        known = vars(loader)
        if isinstance(value, Policy) and self._name == "policy":  # it can mean nothing else
            known.pop(self._theirs, None)
            known[self._name] = known[f"_holdfast_{self._name}"] = value
        else:
            known[self._name if self._is_theirs(loader) else self._theirs] = value

    def __delete__(self, loader: Any) -> None:
        self.__get__(loader)
        known = vars(loader)
        del known[self._theirs if self._theirs in known else self._name]

    def keep(self, loader: Any, value: Any, given: bool) -> None:
        """This is ours. `given`: by the user, so that it is shown."""
        known = vars(loader)
        known[f"_holdfast_{self._name}"] = value
        if not given or inspect.getattr_static(type(loader), self._name) is not self:
            return  # or a subclass has something else there
        if not self._is_theirs(loader):
            known[self._name] = value
        else:
            known.setdefault(self._name, value)  # if it hands the argument on

    def _is_theirs(self, loader: Any) -> bool:
        """A subclass has an argument of this name."""
        made = type(loader).__init__
        if made is vars(self._owner)["__init__"]:
            return False
        try:
            return self._name in inspect.signature(made).parameters
        except (TypeError, ValueError):  # it is compiled
            return False


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Readable(Generic[T]):
    """A property that a subclass may set to something of its own."""

    def __init__(self, read: Callable[[Any], T]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    def __get__(self, loader: Any, owner: type | None = None) -> T:
        return self if loader is None else self._read(loader)  # type: ignore[return-value]  # of the class: itself


AUTO = "auto"


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """A drop-in for `torch.utils.data.DataLoader` that survives its workers.

    Parameters, with their defaults. `policy` and `device` are Holdfast's; so is the value "auto" of `num_workers`. All
    others are torch's, and mean what they mean there.

    dataset: a Dataset (map-style) or an IterableDataset.
    batch_size=1: samples per batch. None: the samples themselves, without collating them.
    shuffle=None: True: a new random order in each epoch.
    sampler=None: gives the indices, instead of `shuffle`.
    batch_sampler=None: gives a list of indices for each batch, instead of batch_size, shuffle, sampler and drop_last.
    num_workers=0: how many processes load. 0: the trainer loads itself. "auto": Holdfast looks for the best number.
    collate_fn=None: makes a batch of a list of samples. None: torch's default_collate.
    pin_memory=False: True: batches lie in memory that the device reads directly.
    drop_last=False: True: leave out a last batch that is smaller than batch_size.
    timeout=0: seconds that next() waits for a batch before it raises BatchTimeout. 0: as long as it takes. (A limit
        for one sample is Policy(sample_timeout=...).)
    worker_init_fn=None: called in each worker with its number, before the first sample.
    multiprocessing_context=None: the start method, "fork", "spawn" or "forkserver", or a context of multiprocessing.
        None: Python's default.
    generator=None: the torch.Generator that shuffles and seeds the workers.
    prefetch_factor=None: batches that are loaded ahead for each worker. None: 2.
    persistent_workers=False: True: the workers stay for the next epoch.
    pin_memory_device="": deprecated by torch.
    in_order=True: False: batches come as soon as they are ready, in any order.
    policy=None: what to do when loading goes wrong, a holdfast.Policy. None: what the HOLDFAST_* variables say, or the
        defaults. See help(holdfast.Policy).
    device=None: where batches shall arrive ("cuda", "cuda:1", a torch.device). Holdfast copies them there ahead of
        their turn; `pin_memory` has no meaning then. None: they stay on the host.
    """

    policy = Argument()
    device = Argument()
    _holdfast_device: torch.device | str | int | None = None

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        policy: Policy | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        given = policy is not None or num_workers == AUTO
        if policy is None:
            policy = Policy.from_environment()
        elif not isinstance(policy, Policy):
            raise TypeError(f"policy must be a holdfast.Policy, not {policy!r}")
        if num_workers == AUTO:
            from dataclasses import replace

            policy = replace(policy, auto_workers=True)
            num_workers = usable_cpus()
        elif isinstance(num_workers, str):
            raise ValueError(f"num_workers must be a number or 'auto', not {num_workers!r}")
        _check_fit(policy, dataset)
        if prefetch_factor == 0 and num_workers:
            raise ValueError("prefetch_factor must be greater than 0: with none asked for, no batch would ever come")
        checked(device)
        DataLoader.__dict__["policy"].keep(self, policy, given)
        DataLoader.__dict__["device"].keep(self, device, device is not None)
        self._holdfast_record = _record_of(dataset)
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )

    # Where `__init__` was not called, these two are made when somebody asks for them: the loader was pickled when its
    # class was torch's, or a subclass makes it from its attributes alone.

    @cached_property
    def _holdfast_policy(self) -> Policy:
        policy = Policy.from_environment()
        _check_fit(policy, self.dataset)
        return policy

    @cached_property
    def _holdfast_record(self) -> Record:
        return _record_of(self.dataset)

    def __iter__(self) -> _BaseDataLoaderIter:
        if isinstance(self._iterator, InheritedIterator):
            self._iterator = None  # with its workers it is the parent's: this process has its own
        return super().__iter__()

    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self.num_workers == 0:
            return InlineIterator(self, self._holdfast_policy, self._holdfast_record)
        self.check_worker_number_rationality()
        return WorkerIterator(self, self._holdfast_policy, self._holdfast_record)

    @Readable
    def incidents(self) -> tuple[Incident, ...]:
        """All that went wrong so far, oldest first (the first thousand)."""
        return tuple(self._holdfast_record.incidents)

    def stats(self) -> dict[str, Any]:
        """Totals over all epochs of this loader."""
        return to_dict(totals(self._holdfast_record, self.num_workers, self.dataset))

    def report(self) -> Report:
        """What happened so far: `print(loader.report())`, or `.to_json()`."""
        return Report(self._holdfast_record, totals(self._holdfast_record, self.num_workers, self.dataset))


def _check_fit(policy: Policy, dataset: Any) -> None:
    if policy.bad_sample == "replace" and isinstance(dataset, torch.utils.data.IterableDataset):
        raise ValueError(
            'Policy(bad_sample="replace") needs a map-style dataset: a stream has no other sample to give; '
            'use "skip" or "raise"'
        )


def _record_of(dataset: Any) -> Record:
    return Record(kept_in=RunFolder.from_environment("loader", dataset))
