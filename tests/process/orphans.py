"""Whoever forks is killed at that moment; run as a script: orphans.py NAME FOLDER

In a process of its own, since hooks of a fork stay. In FOLDER it leaves `born`, the process that was being made; in
`runs`, who ran; and `holder`, see below.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import holdfast
from holdfast.cli.apart import apart as work_apart
from holdfast.cli.repro import _in_child as load_in_child
from holdfast.diagnose.finding import Again
from tests.process import calls

TRAINER = os.getpid()


def kill_the_keeper_once(folder):
    """A hook in each forked child: the first worker ends its keeper, and goes on when that is gone."""
    parent = os.getppid()
    if os.getpid() == TRAINER or parent == TRAINER or os.path.exists(f"{folder}/born"):
        return
    Path(folder, "born").write_text(str(os.getpid()))
    os.kill(parent, signal.SIGKILL)
    while os.getppid() == parent:
        time.sleep(0.001)


def pool(folder):
    with holdfast.Pool(1, mp_context=multiprocessing.get_context("fork")) as pool:
        pool.submit(calls.mark, f"{folder}/runs").result()


def loader(folder):
    class Marks:
        def __len__(self):
            return 1

        def __getitem__(self, index):
            calls.mark(f"{folder}/runs")
            return index

    assert list(holdfast.DataLoader(Marks(), batch_size=None, num_workers=1, multiprocessing_context="fork")) == [0]


def keeper(folder):
    """This process goes while it forks its keeper, and somebody else still holds its end of the socket."""
    os.register_at_fork(before=lambda: hold(folder), after_in_child=lambda: kill_the_trainer(folder))
    list(holdfast.DataLoader(range(2), num_workers=1, multiprocessing_context="fork"))


def rank(folder):
    """This process goes while it forks a rank."""
    os.register_at_fork(after_in_child=lambda: kill_the_trainer(folder))
    holdfast.spawn(time.sleep, (60,), nprocs=1, start_method="fork")


def apart(folder):
    """This process goes while a command of ours waits for its child."""
    os.register_at_fork(after_in_child=lambda: kill_the_trainer(folder))
    work_apart(lambda say: time.sleep(60))


def repro(folder):
    """The same, of the command that loads a sample again."""
    os.register_at_fork(after_in_child=lambda: kill_the_trainer(folder))
    load_in_child(Hangs(), Again(0, 0, (0,), 0))


class Hangs:
    def __getitem__(self, index):
        time.sleep(60)


def hold(folder):
    """A fork that no hook hears of: it holds all that is open."""
    pid = ctypes.CDLL(None).fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    Path(folder, "holder").write_text(str(pid))


def kill_the_trainer(folder):
    """And goes on when that is reaped."""
    Path(folder, "born").write_text(str(os.getpid()))
    os.kill(TRAINER, signal.SIGKILL)
    while os.path.exists(f"/proc/{TRAINER}"):
        time.sleep(0.001)


def main(name, folder):
    if name in ("pool", "loader"):
        os.mkdir(f"{folder}/runs")
        os.register_at_fork(after_in_child=lambda: kill_the_keeper_once(folder))
    globals()[name](folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
