"""What ranks do in the tests: functions of a module, as spawn needs them."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast

# Longer than any test may wait: whoever sleeps this long is to be ended by somebody.
FOR_EVER = 600


def nothing(rank):
    pass


def put(rank, queue):
    queue.put((rank, os.getpid()))


def raise_in(rank, who):
    if rank == who:
        raise ValueError(f"legitimate exception from process {rank}")
    time.sleep(FOR_EVER)


def signal_in(rank, who, number):
    if rank == who:
        os.kill(os.getpid(), number)
    time.sleep(FOR_EVER)


def segfault_in(rank, who):
    if rank == who:
        ctypes.string_at(0)
    time.sleep(FOR_EVER)


def exit_in(rank, who, code):
    if rank == who:
        sys.exit(code)
    time.sleep(FOR_EVER)


def leave_in(rank, who, code):
    if rank == who:
        os._exit(code)
    time.sleep(FOR_EVER)


def wait_for_file(rank, path):
    while not os.path.exists(path):
        time.sleep(0.01)


def fork_and_exit(rank, how):
    """The process that it forks comes back from here as if it were the rank."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what it says of its end
        if how == "raise":
            raise ValueError("in a child of the rank")
        sys.exit(how)
    os.waitpid(child, 0)


def wait_for_ever(rank, folder=None):
    """Says that it is there, by a file with its pid."""
    if folder is not None:
        (Path(folder) / f"{rank}").write_text(str(os.getpid()))
    time.sleep(FOR_EVER)


def hold_the_gil(rank, folder):
    """In native code that never lets another thread run."""
    (Path(folder) / f"{rank}").write_text(str(os.getpid()))
    ctypes.PyDLL(None).pause()


def ignore_sigterm(rank, folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (Path(folder) / f"{rank}").write_text(str(os.getpid()))
    deadline = time.monotonic() + 60
    if rank == 1:
        while not (Path(folder) / "0").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os._exit(9)
    time.sleep(FOR_EVER)


def slow_to_end(rank, folder):
    """Rank 0 ends by itself half a second after rank 1 has failed."""
    if rank == 1:
        raise ValueError("first")
    time.sleep(0.5)
    (Path(folder) / "ended").write_text("by itself")


def nest(rank, folder, method):
    """A rank with ranks of its own, which kills itself."""
    ranks = holdfast.spawn(wait_for_ever, (folder,), 2, join=False, start_method=method)
    deadline = time.monotonic() + 60
    while len(os.listdir(folder)) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ranks is not None
    os.kill(os.getpid(), signal.SIGTERM)


def hang_at_exit(rank, who):
    """Raises, and cannot end: a thread of its own does not."""
    if rank == who:
        threading.Thread(target=time.sleep, args=(FOR_EVER,)).start()
        raise ValueError("raised, and hangs at its end")
    time.sleep(FOR_EVER)


def print_lines(rank, lines):
    for i in range(lines):
        print(f"line {i} of {rank}")
    print("to stderr", file=sys.stderr)
    if rank == 1:
        os._exit(4)


def tell_environment(rank, queue):
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT HOLDFAST_ATTEMPT OMP_NUM_THREADS"
    queue.put((rank, {name: os.environ.get(name) for name in names.split()}, torch.get_num_threads()))


def fail_until(rank, attempt, folder):
    mine = int(os.environ["HOLDFAST_ATTEMPT"])
    (Path(folder) / f"{mine}-{rank}").touch()
    if mine < attempt and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while mine < attempt and time.monotonic() < deadline:
        time.sleep(0.01)


class NotHere:
    """Cannot be opened in a rank."""

    def __reduce__(self):
        return _refuse, (os.getpid(),)


def _refuse(made_in):
    if os.getpid() != made_in:
        raise ImportError("not in this process")


def train(rank, steps, dies_at, folder=None, at_second=None):
    """DDP on gloo. Rank 1 kills itself at step `dies_at` of the first attempt; a checkpoint after each step."""
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (rank, int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = Path(folder) / "checkpoint" if folder is not None else None
    first = 0
    if path is not None and path.exists():
        first, state = torch.load(path)
        model.load_state_dict(state)
    for step in range(first, steps):
        if rank == 1 and step == dies_at and os.environ["HOLDFAST_ATTEMPT"] == "1":
            while at_second is not None and not at_second <= time.time() % 1 < at_second + 0.03:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        torch.manual_seed(step * 10 + rank)
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and path is not None:
            torch.save((step + 1, model.state_dict()), path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)
        print("step", step, flush=True)
    dist.destroy_process_group()


def is_daemon(rank):
    assert multiprocessing.current_process().daemon


def allocate(rank, size):
    whole = bytearray(size)
    assert len(whole) == size
