"""Datasets for tests; importable, so that spawned workers find them."""

import os
import random
import time

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


def flat(loader):
    """All samples of an epoch, in the order in which they come."""
    return [int(x) for batch in loader for x in torch.as_tensor(batch).reshape(-1)]


class Numbers(Dataset):
    """0, 1, 2, ... each after `seconds`."""

    def __init__(self, length=40, seconds=0.0):
        self.length = length
        self.seconds = seconds

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.seconds:
            time.sleep(self.seconds)
        return index


class Images(Dataset):
    """Large enough not to be copied out of the slot: 3 x 256 x 256 float32, filled with the index."""

    def __init__(self, length=40, side=256):
        self.length = length
        self.side = side

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((3, self.side, self.side), float(index)), index


class Noise(Dataset):
    """Draws from torch, numpy and random; dies at some indices if told to, once or always."""

    def __init__(self, length=48, once=None, deadly=()):
        self.length = length
        self.once = once  # a directory: deaths happen once per index
        self.deadly = frozenset(deadly)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        numbers = [torch.rand(1).item(), float(np.random.rand()), random.random()]
        if index in self.deadly:
            mark = os.path.join(self.once, str(index))
            if not os.path.exists(mark):
                open(mark, "w").close()
                if index % 2:
                    os.kill(os.getpid(), 9)
                raise OSError("not yet")
        return torch.tensor([index, *numbers], dtype=torch.float64)


class Epochs(Dataset):
    """Knows its epoch, as set in the trainer."""

    epoch = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.epoch * 100 + index


class Reopens(Dataset):
    """Opens its file in __setstate__, as h5py and tar readers do; the offset must not be shared."""

    def __init__(self, path, length):
        self.path = path
        self.length = length
        self.file = open(path, "rb")

    def __getstate__(self):
        return {"path": self.path, "length": self.length}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.file = open(self.path, "rb")

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.file.seek(index * 8)
        time.sleep(0.0005)
        return int.from_bytes(self.file.read(8), "little")


class Stream(IterableDataset):
    """Numbers, split among the workers."""

    def __init__(self, length=40, seconds=0.0):
        self.length = length
        self.seconds = seconds

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for index in range(worker, self.length, workers):
            if self.seconds:
                time.sleep(self.seconds)
            yield index


class Shared(Dataset):
    """Holds what torch users put into datasets: a shared tensor, a plain one, a multiprocessing counter."""

    def __init__(self, counter):
        self.counter = counter
        self.shared = torch.zeros(8).share_memory_()
        self.table = torch.arange(100_000)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        with self.counter.get_lock():
            self.counter.value += 1
        self.shared[index] = 1
        return int(self.table[index * 1000])


class Getitems(Dataset):
    """Batched access; one index is bad."""

    def __init__(self, bad=None, how="raise"):
        self.bad = bad
        self.how = how

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == self.bad:
            if self.how == "kill":
                os._exit(5)
            raise ValueError(f"bad {index}")
        return index

    def __getitems__(self, indices):
        return [self[i] for i in indices]
