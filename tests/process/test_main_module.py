"""Classes and functions of `__main__`, with and without a file: they reach the workers, and come back as themselves."""

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from holdfast import DataLoader, Policy, Pool
import holdfast

class MyError(Exception):
    def __init__(self, index, why):  # it cannot be made from its args again
        super().__init__(f"{{why}} at {{index}}")

class PlainError(Exception):
    pass

class Sample:
    made = 0
    def __init__(self, value):
        Sample.made += 1
        self.value = value

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 2:
            raise MyError(index, "odd")
        if index == 3:
            raise PlainError(index)
        return Sample(torch.full((3,), index))

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (Sample(i) for i in range(2))

def first(samples):
    return samples[0]

def use(iterator):
    method = Sample.__init__
    for _ in range(4):
        try:
            sample = next(iterator)
            print(type(sample) is Sample, sample.value.tolist())
        except MyError as error:
            print("MyError", error)
        except PlainError as error:
            print("PlainError", error)
    print(Sample.__init__ is method, Sample.made)

def task(value, fail=None):
    if fail is not None:
        raise fail(value, "bad") if fail is MyError else fail(value)
    return Sample(value)

def ready():
    assert Sample(0).value == 0

def rank(number, sample):
    assert type(sample) is Sample and sample.value == 5
    raise MyError(number, "rank")
"""

LOADER = """
    use(iter(DataLoader(Data(), num_workers=1, collate_fn=first, multiprocessing_context={method!r})))
    use(iter(DataLoader(Data(), num_workers=1, collate_fn=lambda b: b[0], multiprocessing_context={method!r})))
    streamed = list(DataLoader(Stream(), num_workers=1, collate_fn=first, multiprocessing_context={method!r}))
    print([type(sample) is Sample for sample in streamed])
"""
LOADED = "True [0, 0, 0]\nTrue [1, 1, 1]\nMyError odd at 2\nPlainError 3\nTrue 0\n" * 2 + "[True, True]\n"

POOL = """
    with Pool(1, {method!r}, ready, policy=Policy(retry_on=(PlainError,))) as pool:
        sample = pool.submit(task, 1).result()
        print(type(sample) is Sample, sample.value)
        print([type(sample) is Sample for sample in pool.map(task, range(3), chunksize=3)])
        for kind in (MyError, PlainError):
            try:
                pool.submit(task, 2, fail=kind).result()
            except kind as error:
                print(kind.__name__, error)
        class Late:
            pass
        globals()["Late"] = Late
        Late.__qualname__ = "Late"
        print(type(pool.submit(lambda: Late()).result()) is Late, Sample.made)
"""
POOLED = "True 1\n[True, True, True]\nMyError bad at 2\nPlainError 2\nTrue 0\n"

RANKS = """
    try:
        holdfast.spawn(rank, (Sample(5),), nprocs=1, start_method={method!r})
    except holdfast.RankRaised as error:
        print(type(error.__cause__) is MyError, error.__cause__)
"""
RANKED = "True rank at 0\n"

# A kernel executes cells in a module of its own, which has no file.
NOTEBOOK = """
import sys, types
kernel = sys.modules["__main__"]
main = sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile({cell!r}, "<cell 1>", "exec"), vars(main))
"""


def run(words, text=None, **more):
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False, timeout=100, **more)
    return done.returncode, done.stdout, done.stderr


def started(how, program, tmp_path):
    """(status, stdout, stderr) of the program, started like that."""
    if how == "-c":
        return run([sys.executable, "-c", program])
    if how == "stdin":
        return run([sys.executable, "-"], program)
    if how == "notebook":
        return run([sys.executable, "-c", NOTEBOOK.format(cell=program)])
    if how == "prompt":
        (tmp_path / "mine.py").write_text("begin = 'a file that defines nothing of it'\n")
        cell = f"exec(compile({program!r}, '<typed>', 'exec'))\nexit()\n"
        return run([sys.executable, "-i", "-q", str(tmp_path / "mine.py")], cell)
    (tmp_path / "mine.py").write_text(program)
    words = [sys.executable, *(["-m", "holdfast", "run"] if how == "holdfast run" else []), str(tmp_path / "mine.py")]
    return run(words)


MAIN = '\nif __name__ == "__main__":'
HOWS = ["-c", "stdin", "notebook", "prompt", "file", "holdfast run"]


def both(*parts):
    """With each start method that makes new processes, in one program."""
    bodies = [part.format(method=method) for method in ("spawn", "forkserver") for part in parts]
    return PROGRAM.format() + MAIN + "".join(bodies)


@pytest.mark.parametrize("how", HOWS)
def test_samples_results_and_errors(how, tmp_path):
    """`isinstance` and `except` work with the trainer's own class, and that class stays as it was."""
    code, out, err = started(how, both(LOADER, POOL), tmp_path)
    assert (code, out) == (0, (LOADED + POOLED) * 2), err


@pytest.mark.parametrize("how", ["-c", "notebook", "file"])
def test_arguments_and_errors_of_ranks(how, tmp_path):
    code, out, err = started(how, both(RANKS), tmp_path)
    assert (code, out) == (0, RANKED * 2), err


def test_an_error_that_cannot_be_made_again_from_its_args_is_of_the_trainers_class(tmp_path):
    """With fork, too: its parts travel, and its class goes by name."""
    code, out, err = started("file", (PROGRAM + MAIN + LOADER + POOL).format(method="fork"), tmp_path)
    assert (code, out) == (0, LOADED + POOLED), err


def test_a_script_with_a_file_stays_by_reference(tmp_path):
    """Workers import it: what the initializer sets there, the tasks see."""
    program = """
from holdfast import Pool
seen = None
def set_seen(value):
    global seen
    seen = value
def look(kind):
    return seen, kind is Kind
class Kind: pass
if __name__ == "__main__":
    with Pool(1, "spawn", set_seen, (7,)) as pool:
        print(pool.submit(look, Kind).result())
"""
    assert started("file", program, tmp_path) == (0, "(7, True)\n", "")


def test_a_class_that_is_defined_again_is_the_new_one():
    """A cell that is run twice, with a pool that goes on."""
    program = """
from holdfast import Pool
pool = Pool(1, "spawn")
for version in (1, 2):
    exec("class Kind: pass")
    exec(f"def make(): kind = Kind(); kind.version = {version}; return kind")
    made = pool.submit(make).result()
    print(type(made) is Kind, made.version)
pool.shutdown()
"""
    assert run([sys.executable, "-c", program]) == (0, "True 1\nTrue 2\n", "")


def test_a_saved_state_is_of_the_scripts_class(tmp_path):
    """Another worker loads it; it may ask what it gets."""
    program = """
import os, sys, time, torch
from holdfast import DataLoader
class State:
    def __init__(self, at):
        self.at = at
class Stream(torch.utils.data.IterableDataset):
    at = 0
    def state_dict(self):
        return State(self.at)
    def load_state_dict(self, state):
        print(isinstance(state, State), state.at > 0, flush=True)
        self.at = state.at
    def __iter__(self):
        while self.at < 6:
            if self.at == 5 and not os.path.exists("died"):
                open("died", "w").close()
                os.kill(os.getpid(), 9)
            self.at += 1
            time.sleep(0.7)  # a state is saved once a second
            yield self.at
if __name__ == "__main__":
    print([batch.item() for batch in DataLoader(Stream(), num_workers=1, multiprocessing_context="fork")])
"""
    (tmp_path / "mine.py").write_text(program)
    code, out, err = run([sys.executable, "mine.py"], cwd=tmp_path)
    assert (code, out) == (0, "True True\n[1, 2, 3, 4, 5, 6]\n"), err


# Globals that are dragged along ---------------------------------------------------------------------------------------


DRAGS = """
import numpy
from holdfast import DataLoader, Pool
TABLE = [0.5] * (8 << 20)
ARRAY = numpy.zeros(9 << 20)
SMALL = numpy.zeros(1000)
class Data:
    def __len__(self): return 2
    def __getitem__(self, index): return TABLE[0] + SMALL[0] + index
def use(index): return ARRAY[0] + index
if __name__ == "__main__":
    print(len(list(DataLoader(Data(), num_workers=1, multiprocessing_context="spawn"))))
    with Pool(1, "spawn") as pool:
        print(len([pool.submit(use, i).result() for i in range(2)]))
"""


def test_a_large_global_of_a_notebook_is_named():
    code, out, err = run([sys.executable, "-c", DRAGS])
    assert (code, out) == (0, "2\n2\n"), err
    assert "the global TABLE (72 MiB) is sent to the worker processes, because Data.__getitem__ uses it" in err
    assert err.count("the global ARRAY (72 MiB) is sent to the worker processes, because use uses it") == 1
    assert "SMALL" not in err


def test_a_large_global_of_a_script_goes_nowhere(tmp_path):
    code, out, err = started("file", DRAGS, tmp_path)
    assert (code, out, err) == (0, "2\n2\n", "")


# No main guard --------------------------------------------------------------------------------------------------------


UNGUARDED = {
    "loader": """
from holdfast import DataLoader
list(DataLoader([1, 2], num_workers=2, multiprocessing_context={method!r}))
""",
    "pool": """
from holdfast import Pool
def f(x): return x
Pool(2, {method!r}).submit(f, 1).result()
""",
    "ranks": """
import holdfast
def f(rank): pass
holdfast.spawn(f, nprocs=2, start_method={method!r})
""",
}


@pytest.mark.parametrize(
    ("face", "method"), [("loader", "spawn"), ("loader", "forkserver"), ("pool", "forkserver"), ("ranks", "spawn")]
)
def test_without_a_main_guard_the_error_says_what_to_do(face, method, tmp_path):
    """It comes at once, leads with the advice, and multiprocessing's own text is not there."""
    code, out, err = started("file", UNGUARDED[face].format(method=method), tmp_path)
    kinds = {"loader": "errors.WorkerLost", "pool": "errors.PoolBroken", "ranks": "launch.cause.RankExited"}
    error = f'holdfast.{kinds[face]}: put your training under `if __name__ == "__main__":`\n'
    assert (code, out) == (1, ""), err
    assert error in err and "freeze_support" not in err
    assert err.count("Traceback") == 1
    assert len(err.partition(error)[2].splitlines()) <= 10, err


def test_a_process_of_others_without_a_guard_gets_the_same_words(tmp_path):
    program = """
import multiprocessing
from holdfast import DataLoader
def f(): pass
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=f)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
list(DataLoader([1, 2], num_workers=2, multiprocessing_context="spawn"))
"""
    code, _, err = started("file", program, tmp_path)
    assert code == 1
    assert 'RuntimeError: put your training under `if __name__ == "__main__":`' in err
