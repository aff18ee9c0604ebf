"""Where a fault strikes: datasets and functions that meet one. Importable, so that spawned workers find them."""

import atexit
import importlib
import os
import sys
from functools import partial
from pathlib import Path

from torch.utils.data import default_collate

from holdfast import DataLoader, Policy
from holdfast.testing import Saboteur, StreamSaboteur, inflict

from ..process.data import Numbers, Stream
from .matrix import Row

BAD = 37
COUNT = 96
# In each of the two streams, so many items come before the fault.
BEFORE = 9


def first_time(directory):
    try:
        os.close(os.open(os.path.join(directory, "mark"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Fault:
    """Each time, or only `once`: a directory."""

    def __init__(self, how, once):
        self.how, self.once = how, once

    def strike(self):
        if self.once is None or first_time(self.once):
            inflict(self.how)


class Collate(Fault):
    """Meets the fault in the batch that holds the bad sample."""

    def __call__(self, samples):
        if BAD in samples:
            self.strike()
        return default_collate(samples)


class Bomb(Fault):
    """Meets the fault while it is being pickled."""

    def __reduce__(self):
        if self.how == "raise":
            raise ValueError("injected")
        self.strike()
        return int, ()


class Bombs(Numbers):
    def __init__(self, length, how, once):
        super().__init__(length)
        self.how, self.once = how, once

    def __getitem__(self, index):
        return {"number": index, "bomb": Bomb(self.how, self.once) if index == BAD else 0}


class Init(Fault):
    """Meets the fault in each worker that starts; if only once, in the second one."""

    def __call__(self, worker):
        if self.once is None or worker == 1:
            self.strike()


class AtExit(Fault):
    """Each worker meets the fault when it leaves."""

    def __call__(self, worker):
        atexit.register(self.strike)


MODULE = """
import os
from tests.faults.places import Fault
from tests.process.data import Numbers

if os.getpid() != {trainer}:
    Fault({how!r}, {once!r}).strike()

class Imported(Numbers):
    pass
"""


def write_module(folder, how, once):
    """Its import strikes wherever it is not the trainer's. Its name, which no other test has."""
    name = f"struck_{how}_{Path(folder).name}".replace("-", "_")
    Path(folder, f"{name}.py").write_text(MODULE.format(trainer=os.getpid(), how=how, once=once))
    return name


class ImportsLate(Numbers):
    """One sample needs a module that nothing has imported before."""

    def __init__(self, length, folder, name):
        super().__init__(length)
        self.folder, self.name = str(folder), name

    def __getitem__(self, index):
        if index == BAD:
            if self.folder not in sys.path:
                sys.path.insert(0, self.folder)
            importlib.import_module(self.name)
        return index


def _dataset_of(folder, name, *args):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(name).Imported(*args)


class Elsewhere(Numbers):
    """Its class is in a module that a spawned worker imports when it opens the dataset."""

    def __init__(self, length, folder, name):
        super().__init__(length)
        self.folder, self.name = str(folder), name

    def __reduce__(self):
        return partial(_dataset_of, self.folder, self.name), (self.length,)


def make(row: Row, folder):
    """A loader in which the row's fault strikes. `folder` says whether it has struck."""
    once = str(folder) if row.owed == "once" else None
    policy = Policy(bad_sample="skip" if row.owed == "skips" else "raise", sample_timeout=0.4, max_bad=0.2)
    dataset, more = Numbers(COUNT, 0.0005), {"batch_size": 4}
    match row.where:
        case "dataset":
            dataset = Saboteur(dataset, {BAD: row.how}, once)
        case "import":
            dataset = Elsewhere(COUNT, folder, write_module(folder, row.how, once))
        case "late-import":
            dataset = ImportsLate(COUNT, folder, write_module(folder, row.how, once))
        case "collate":
            more["collate_fn"] = Collate(row.how, once)
        case "send":
            dataset, more = Bombs(COUNT, row.how, once), {"batch_size": 4, "collate_fn": list}
        case "worker_init_fn":
            more["worker_init_fn"] = Init(row.how, once)
        case "at-exit":
            more["worker_init_fn"] = AtExit(row.how, None)
        case "stream":
            dataset = StreamSaboteur(Stream(COUNT, 0.0005), {BEFORE: row.how}, once)
    return DataLoader(
        dataset,
        num_workers=2,
        policy=policy,
        persistent_workers=row.where == "between-epochs",
        multiprocessing_context=row.start,
        **more,
    )
