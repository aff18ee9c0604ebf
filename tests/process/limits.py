"""Datasets that run out of something; and, run as a script, one epoch of one of them: limits.py NAME WORKERS

The script is for what needs a process of its own: a control group or a limit that stays. It prints JSON.
"""

import json
import os
import resource
import sys
import threading
import time

import numpy as np
from torch.utils.data import Dataset

MIB = 1 << 20
KEPT = []


class Leaks(Dataset):
    """Each sample leaves `size` bytes behind."""

    def __init__(self, length, size):
        self.length, self.size = length, size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        KEPT.append(np.ones(self.size, np.uint8))
        return index


class LeaksSlowly(Leaks):
    """In a trainer that has freed 240 MiB in small pieces, and one behind them that it keeps."""

    def __init__(self):
        super().__init__(256, MIB // 2)
        KEPT.extend(np.ones(4 * MIB, np.uint8) for _ in range(2))
        KEPT.clear()  # from now on such sizes are no mappings of their own, which would go with what is in them
        KEPT.extend(np.ones(MIB // 2, np.uint8) for _ in range(480))
        del KEPT[:-1]

    def __getitem__(self, index):
        time.sleep(0.005)
        return super().__getitem__(index)


class Greedy(Dataset):
    """One sample asks for far more than it may."""

    def __init__(self, length, bad, size):
        self.length, self.bad, self.size = length, bad, size

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.bad:
            np.ones(self.size, np.uint8)
        return index


class LeaksFiles(Dataset):
    """Each sample leaves twelve files open."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        KEPT.extend(open(__file__) for _ in range(12))
        return index


class Heavy(Dataset):
    """Each sample needs 150 MiB for a moment."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        np.ones(150 * MIB, np.uint8)
        time.sleep(0.02)
        return index


class Slow(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(0.005)
        return index


class Threads(Dataset):
    """Fills its memory, then starts a thread."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            pile = []
            try:
                while True:
                    pile.append(np.ones(2 * MIB, np.uint8))
            except MemoryError:
                pile.pop()
            threading.stack_size(32 * MIB)
            thread = threading.Thread(target=time.sleep, args=(0.01,))
            thread.start()
            thread.join()
        return index


class Names(Dataset):
    """Many Python objects, all of them looked at for each sample."""

    def __init__(self):
        self.names = [f"a name that is not short, number {i}" for i in range(2_000_000)]

    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(0.1)
        return index if all(self.names) else -1


DATASETS = {"freed": LeaksSlowly, "files": LeaksFiles, "heavy": Heavy, "slow": Slow, "names": Names}


def main(name, workers):
    import holdfast
    from holdfast.local.worker import thresholds

    if name == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    if name == "names":  # the keeper is forked from here
        thresholds.COPY_LEAST, thresholds.COPY_LOOKS_S = 8 * MIB, (0.5, 1.0, 2.0, 3.0, 4.0)
    dataset = DATASETS[name]()
    policy = holdfast.Policy(worker_memory="60MiB") if name == "freed" else None
    many = workers if workers == "auto" else int(workers)
    loader = holdfast.DataLoader(dataset, batch_size=4, num_workers=many, policy=policy)
    got = [i for batch in loader for i in batch.tolist()]
    report = loader.report()
    print(
        json.dumps(
            {
                "exact": got == list(range(len(dataset))),
                "findings": [i.finding for i in report.incidents],
                "text": str(report),
                "oom_kills": oom_kills(),
            }
        )
    )


def oom_kills():
    """Of the group that this process is in (version 1)."""
    path = next(line.split(":")[2].strip() for line in open("/proc/self/cgroup") if ":memory:" in line)
    control = f"/sys/fs/cgroup/memory{path}/memory.oom_control"
    if not os.path.exists(control):
        return 0
    return int(open(control).read().split()[-1])


if __name__ == "__main__":
    main(*sys.argv[1:])
