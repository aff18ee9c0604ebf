"""A training that ends in an uncaught error: `python -m tests.process.endings KIND WORKERS START`."""

import ctypes
import os
import signal
import sys
import threading
import time

import torch
from torch.utils.data import Dataset, IterableDataset

from holdfast import DataLoader, Policy
from holdfast.local.keeper import worker_life

BAD = 17


class OwnError(Exception):
    def __init__(self, code, path):
        super().__init__(f"{path} is broken ({code})")
        self.code, self.path = code, path


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


def read(kind, index):
    """The sample at BAD."""
    match kind:
        case "unsendable":
            return threading.Lock()
        case "plain":
            raise ValueError(f"bad header in {index}.jpg")
        case "long":
            raise ValueError(f"bad header in {index}.jpg" + "\nand so on" * 30)
        case "arguments":
            raise OwnError(5, f"{index}.jpg")
        case "unpicklable":
            raise Locked("it holds a lock")
        case "exit":
            sys.exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            threading.Event().wait()
    return torch.tensor(index)


class Samples(Dataset):
    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == BAD:
            return read(self.kind, index)
        if self.kind == "many" and index > 2:
            raise ValueError("no label")
        return torch.tensor(index)


class Records(IterableDataset):
    """`kind`: "raises", or "other items" each time that it is replayed."""

    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        for number in range(64):
            if number == BAD and self.kind == "raises":
                raise ValueError("bad record")
            if number == BAD:
                os.kill(os.getpid(), signal.SIGKILL)
            yield number if self.kind == "raises" else time.monotonic_ns()


def broken_collate(samples):
    if BAD in [int(sample) for sample in samples]:
        raise TypeError("these do not fit")
    return torch.stack(samples)


def broken_init(worker):
    raise RuntimeError("there is no GPU 7")


def wrong_sampler():
    yield from ([index] for index in range(8))
    raise LookupError("the sampler has no more")


def loader_of(kind, **more):
    match kind:
        case "collate":
            more["collate_fn"] = broken_collate
        case "init":
            more["worker_init_fn"] = broken_init
        case "deadline":
            kind, more["policy"] = "hang", Policy(sample_timeout=0.3)
        case "timeout":
            kind, more["timeout"] = "hang", 1
        case "timeout after a silence":
            worker_life.SILENT_S = 1.0  # the keeper is a fork of this process: it knows
            kind, more["timeout"] = "hang", 3
        case "unsendable":
            more["collate_fn"] = list
        case "many":
            more["policy"] = Policy(bad_sample="skip", max_bad=0.01)
        case "torn":
            return DataLoader(Samples(kind), batch_sampler=wrong_sampler(), **more)
        case "stream":
            return DataLoader(Records("raises"), batch_size=4, **more)
        case "replayed":
            return DataLoader(Records("other items"), batch_size=4, **more)
    return DataLoader(Samples(kind), batch_size=4, **more)


def main(kind, workers, start):
    more = {"multiprocessing_context": start} if int(workers) else {}
    iterator = iter(loader_of(kind, num_workers=int(workers), **more))
    if kind == "torn":
        try:
            for _ in iterator:
                pass
        except LookupError:
            pass
    if kind == "closed":
        next(iterator)
        iterator._shutdown_workers()
    for _ in iterator:
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
