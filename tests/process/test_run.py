"""`holdfast run`: a script as it is, with our loader in it; who signals the trainer is told, and no more changes."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from holdfast.system import signal_origin
from holdfast.system.run_files import records_of

needs_compiler = pytest.mark.skipif(
    signal_origin.install is None, reason="without system/_sender.c: senders stay unknown"
)

SCRIPT = """
import os, signal, subprocess, sys, time
import beside
import torch.utils.data.dataloader
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index == 5:
            raise OSError("injected")
        return index

class Mine(DataLoader):
    pass

def wait():
    print("ready", flush=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.05)

if __name__ == "__main__":
"""


@contextlib.contextmanager
def running(folder, body, *options, given=(), within=()):
    """The script in a session of its own; ended whatever happens."""
    (folder / "beside.py").write_text("")
    script = folder / "train.py"
    script.write_text(SCRIPT + textwrap.indent(textwrap.dedent(body), "    "))
    process = subprocess.Popen(
        [*within, sys.executable, "-m", "holdfast", "run", *options, str(script), *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def until_ready(process):
    for line in process.stdout:
        if line.strip() == "ready":
            return
    raise AssertionError(f"it ended before it was ready: {process.stderr.read()}")


def ended(process):
    """(status, stdout, stderr); stderr ends only when the witness, too, is gone."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_script_is_main_and_its_loader_is_ours(tmp_path, method):
    body = f"""
        assert sys.argv[1:] == ["--lr", "0.1", "--retries"], sys.argv
        assert sys.modules["__main__"].Data is Data
        loader = Mine(Data(), batch_size=4, num_workers=1, multiprocessing_context="{method}")
        assert isinstance(loader, torch.utils.data.DataLoader)
        assert type(loader).__mro__[1].__module__ == "holdfast.loader.dataloader"
        assert torch.utils.data.dataloader.DataLoader is DataLoader
        policy = loader._holdfast_policy
        print([batch.tolist() for batch in loader], policy.bad_sample, policy.sample_timeout, hasattr(loader, "policy"))
    """
    options = ("--bad-sample", "skip", "--sample-timeout", "30")
    with running(tmp_path, body, *options, given=("--lr", "0.1", "--retries")) as process:
        status, out, err = ended(process)
    assert status == 0, err
    assert out.strip() == "[[0, 1, 2, 3], [4, 6, 7]] skip 30.0 False"


def test_a_module_runs_as_well(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "train.py").write_text("import sys\nprint(__name__, __spec__.name, sys.argv[1:])\n")
    words = [sys.executable, "-m", "holdfast", "run", "-m", "pack.train", "--lr", "3"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "__main__ pack.train ['--lr', '3']", done.stderr


def test_exceptions_and_exits_are_the_scripts_own(tmp_path):
    with running(tmp_path, "raise KeyError('mine')") as process:
        status, _, err = ended(process)
    assert status == 1
    assert "KeyError: 'mine'" in err and "holdfast/cli" not in err
    with running(tmp_path, "sys.exit('enough')") as process:
        status, _, err = ended(process)
    assert (status, err.strip()) == (1, "enough")


def test_what_makes_no_sense_is_said_before_the_script_runs(tmp_path):
    with running(tmp_path, "print('ran')", "--bad-sample", "nope") as process:
        status, out, err = ended(process)
    assert status == 1 and not out and "'raise', 'skip' or 'replace'" in err
    nothing = [sys.executable, "-m", "holdfast", "run", str(tmp_path / "no.py")]
    assert subprocess.run(nothing, capture_output=True, timeout=60, check=False).returncode == 2


@needs_compiler
def test_a_signal_ends_it_as_ever_and_the_sender_is_told(tmp_path):
    """SIGTERM's default action, at once; the one who tells is another process."""
    with running(tmp_path, "wait()", "--run-dir", str(tmp_path / "kept")) as process:
        until_ready(process)
        kill = f"kill -TERM {process.pid}; sleep 0.5; true"
        subprocess.run(["bash", "-c", kill, "--password", "hunter2"], check=True)
        status, _, err = ended(process)
    assert status == -signal.SIGTERM
    assert f"holdfast: the trainer was sent SIGTERM (pid {process.pid})" in err
    assert "trainer-signalled" in err and "bash -c kill -TERM" in err and "hunter2" not in err
    (kept,) = (tmp_path / "kept").glob("trainer-*.jsonl")
    _, incident = records_of(kept)
    assert (incident["finding"], incident["signal"], incident["worker"]) == ("trainer-signalled", "SIGTERM", -2)


@needs_compiler
def test_the_scripts_own_handler_still_decides(tmp_path):
    """It is set after ours, and runs as if we were not there; the loader's workers outlive the signal."""
    body = """
        got = []
        handler = lambda number, frame: got.append(number)
        assert signal.signal(signal.SIGTERM, handler) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is handler
        batches = iter(Mine(Data(), batch_size=1, num_workers=1, prefetch_factor=1))
        next(batches)
        print("ready", flush=True)
        deadline = time.monotonic() + 60
        while not got and time.monotonic() < deadline:
            time.sleep(0.02)
        print(got, len(list(batches)), flush=True)
        sys.exit(7)
    """
    with running(tmp_path, body, "--bad-sample", "skip") as process:
        until_ready(process)
        os.killpg(process.pid, signal.SIGTERM)
        status, out, err = ended(process)
    assert status == 7, err
    assert out.strip() == "[15] 6", "seven were left, one is bad"
    assert err.count("the trainer was sent SIGTERM") == 1
    assert "worker 0 was sent SIGTERM" in err


@needs_compiler
def test_an_interrupt_is_an_interrupt(tmp_path):
    with running(tmp_path, "wait()") as process:
        until_ready(process)
        os.kill(process.pid, signal.SIGINT)
        status, _, err = ended(process)
    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in err and "the trainer was sent SIGINT" in err and "pytest" in err


@needs_compiler
def test_what_is_ignored_stays_ignored(tmp_path):
    """nohup: also for the programs that the script starts."""
    body = """
        children = subprocess.Popen(["bash", "-c", "kill -HUP $$; echo alive"])
        children.wait()
        os.kill(os.getpid(), signal.SIGHUP)
        print("alive, too", flush=True)
    """
    with running(tmp_path, body, within=("nohup",)) as process:
        status, out, err = ended(process)
    assert (status, out.split("\n")[:2]) == (0, ["alive", "alive, too"]), err
    assert "was sent" not in err


@needs_compiler
def test_a_child_of_the_script_is_terminated_as_always_and_is_not_the_trainer(tmp_path):
    body = """
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.2)
        os.kill(pid, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        try:
            os.wait()
        except ChildProcessError:
            print("no child that it does not know of")
    """
    with running(tmp_path, body) as process:
        status, out, err = ended(process)
    assert status == 0, err
    assert out.splitlines() == ["-15", "no child that it does not know of"]
    assert "was sent" not in err


@needs_compiler
def test_the_witness_ends_with_the_trainer(tmp_path):
    """Also with one that is killed: nobody holds its stderr open."""
    with running(tmp_path, "wait()") as process:
        until_ready(process)
        began = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        assert ended(process)[0] == -signal.SIGKILL
        assert time.monotonic() - began < 20
