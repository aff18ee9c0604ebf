"""What torchrun runs in the tests: rank 1 ends in the way that is asked for; rank 0 then loses its peer."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from holdfast.launch.elastic import record


@record
def main():
    how = sys.argv[1]
    dist.init_process_group("gloo")
    for step in range(10):
        if step == 5 and dist.get_rank() == 1:
            if how == "raise":
                raise ValueError("legitimate")
            if how == "exit":
                sys.exit(3)
            if how == "late kill":
                while not 0.93 <= time.time() % 1 < 0.96:
                    time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGSEGV if how == "segfault" else signal.SIGKILL)
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
