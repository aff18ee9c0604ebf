"""Hundreds of workers, or few descriptors; run as a script: many.py NAME WORKERS METHOD SOFT HARD

In a process of its own, since the limits on descriptors stay. It prints JSON.
"""

import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import warnings

from torch.utils.data import Dataset, IterableDataset, get_worker_info

import holdfast


class Roll(IterableDataset):
    """Each worker gives its number, once."""

    def __iter__(self):
        yield get_worker_info().id


class Slow(Dataset):
    def __len__(self):
        return 300

    def __getitem__(self, index):
        time.sleep(0.01)
        return index


def meet(folder):
    """Says who is here, and waits for the gate to open."""
    with open(os.path.join(folder, "here"), "a") as here:
        here.write(f"{os.getpid()}\n")
    with open(os.path.join(folder, "gate")):
        return os.getpid()


def loader(workers, method):
    many = holdfast.DataLoader(Roll(), batch_size=None, num_workers=workers, multiprocessing_context=method)
    try:
        return {"exact": sorted(many) == list(range(workers)), **told(many)}
    except holdfast.HoldfastError as error:
        return {"error": str(error), **told(many)}


def slow(workers, method):
    few = holdfast.DataLoader(Slow(), batch_size=2, num_workers=workers, multiprocessing_context=method)
    return {"exact": [i for batch in few for i in batch.tolist()] == list(range(300)), **told(few)}


def told(loader):
    report = loader.report()
    return {"findings": [incident.finding for incident in report.incidents], "text": str(report)}


def pool(workers, method):
    with tempfile.TemporaryDirectory() as folder:
        gate = os.path.join(folder, "gate")
        os.mkfifo(gate)
        with holdfast.Pool(workers, mp_context=multiprocessing.get_context(method)) as many:
            calls = [many.submit(meet, folder) for _ in range(workers)]
            while not os.path.exists(f"{folder}/here") or len(open(f"{folder}/here").readlines()) < workers:
                time.sleep(0.1)
            opened = os.open(gate, os.O_RDWR)
            pids = {call.result() for call in calls}
            os.close(opened)
        return {"exact": len(pids) == workers}


def main(name, workers, method, soft, hard):
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    began = time.monotonic()
    outcome = {"loader": loader, "slow": slow, "pool": pool}[name](workers, method)
    print(json.dumps({"seconds": time.monotonic() - began, **outcome}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
