"""A DDP training of two ranks, one of which is killed at step 5: named first, then survived.

python examples/ddp.py                 the error says which rank, by what, and what followed from it
python examples/ddp.py --restarts 2    all ranks start again from the checkpoint, and train to the end
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast


def train(rank: int, steps: int, folder: str) -> None:
    dist.init_process_group("gloo")  # where to meet is in the environment
    torch.manual_seed(rank)  # data of its own; the weights are rank 0's
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint = Path(folder) / "checkpoint.pt"
    first = 0
    if checkpoint.exists():
        first, state = torch.load(checkpoint)
        model.load_state_dict(state)
    for step in range(first, steps):
        if rank == 1 and step == 5 and os.environ["HOLDFAST_ATTEMPT"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            torch.save((step + 1, model.state_dict()), checkpoint)
        print(f"step {step}, loss {loss.item():.3f}")
    dist.destroy_process_group()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--restarts", type=int, default=0)
    policy = holdfast.Policy(restarts=options.parse_args().restarts)
    with tempfile.TemporaryDirectory() as folder:
        holdfast.spawn(train, (10, folder), nprocs=2, policy=policy)
    print("trained to the end")


if __name__ == "__main__":
    main()
