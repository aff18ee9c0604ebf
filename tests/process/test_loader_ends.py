"""The end of a loader: of its trainer, of the interpreter, by Ctrl-C, by a timeout."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from holdfast import DataLoader

from ..conftest import METHODS
from .data import Numbers
from .scripts import CHILD, run_child


def descendants_by_name(marker):
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if marker.encode() in file.read():
                    found.append(int(pid))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("method", METHODS)
def test_no_process_outlives_a_killed_trainer(method):
    """After SIGKILL of the trainer nothing of it is left: within a second, or as soon as a busy machine gets to it."""
    marker = f"HOLDFAST_TEST_MARK={os.getpid()}-{method}-{time.monotonic_ns()}"
    body = f"""
if __name__ == "__main__":
    loader = holdfast.DataLoader(Numbers(10000, 0.05), batch_size=4, num_workers=2, multiprocessing_context={method!r})
    for i, _ in enumerate(loader):
        if i == 0: print("going", flush=True)
"""
    import pathlib

    root = str(pathlib.Path(__file__).parents[2])
    env = {**os.environ, marker.split("=", maxsplit=1)[0]: marker.split("=")[1]}
    trainer = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(root=root, body=body)],
        stdout=subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
    assert trainer.stdout.readline() == b"going\n"
    assert len(descendants_by_name(marker)) >= 4
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline and descendants_by_name(marker):
        time.sleep(0.05)
    left = [
        p for p in descendants_by_name(marker) if b"resource_tracker" not in open(f"/proc/{p}/cmdline", "rb").read()
    ]
    assert not left


@pytest.mark.parametrize(
    "end",
    ["pass", "raise SystemExit(3)", "1/0", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"],
    ids=["end", "exit", "error", "ctrl-c"],
)
def test_the_interpreters_end_is_quiet_and_quick(end):
    """An iterator left open at exit: no hang, no traceback but the user's own."""
    body = f"""
loader = holdfast.DataLoader(Numbers(10000, 0.01), batch_size=4, num_workers=2, persistent_workers=True)
iterator = iter(loader)
next(iterator)
{end}
"""
    began = time.monotonic()
    done = run_child(body)
    assert time.monotonic() - began < 30
    expected = {"pass": 0, "raise SystemExit(3)": 3, "1/0": 1}.get(end, -signal.SIGINT)
    assert done.returncode == expected, done.stderr
    assert done.stderr.count("Traceback") == (0 if end in ("pass", "raise SystemExit(3)") else 1), done.stderr


def test_ctrl_c_in_the_whole_group_stops_the_trainer_alone():
    """The terminal signals everybody; workers note it and make no noise."""
    body = """
loader = holdfast.DataLoader(Numbers(10000, 0.01), batch_size=4, num_workers=2)
for i, _ in enumerate(loader):
    if i == 2: print("going", flush=True)
"""
    import pathlib

    root = str(pathlib.Path(__file__).parents[2])
    trainer = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(root=root, body=body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert trainer.stdout.readline() == "going\n"
    os.killpg(trainer.pid, signal.SIGINT)
    _, err = trainer.communicate(timeout=30)
    assert err.count("Traceback") == 1 and "KeyboardInterrupt" in err, err


def test_an_interrupt_in_next_leaves_a_usable_iterator():
    """Ctrl-C while waiting; the user catches it and goes on: nothing is lost."""
    loader = DataLoader(Numbers(24, 0.02), batch_size=4, num_workers=2)
    iterator = iter(loader)
    got = []
    interrupts = 0
    for _ in range(3):
        threading.Timer(0.02, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)).start()
        try:
            got += next(iterator).tolist()
            time.sleep(0.1)
        except KeyboardInterrupt:
            interrupts += 1
    for batch in iterator:
        got += batch.tolist()
    assert interrupts >= 1
    assert got == list(range(24))


def test_timeout_is_torchs():
    loader = DataLoader(Numbers(8, 5.0), num_workers=2, timeout=1)
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 1 seconds"):
        next(iter(loader))
