"""CPython's own tests of ProcessPoolExecutor, pointed at `holdfast.Pool`.

    python -m tests.parity.executor [--tests FOLDER] [NAME ...]

The tests are those that come with this interpreter. Some distributions leave them out; then they are taken from FOLDER
(where test_concurrent_futures.py lies), or from Debian's package of them, which is fetched to a temporary folder and
not kept. NAME: only tests whose name has it in it. What is not run is listed below, each with its reason.
"""

import argparse
import atexit
import concurrent.futures
import importlib
import importlib.util
import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast import Pool

PRIVATE = "looks at private parts of the standard library's pool: "
EXCEPTIONS = {
    "test_killed_child": "wants the whole pool to be broken by one killed worker; here only its task is lost",
    "test_traceback": PRIVATE + "the type of the cause (_RemoteTraceback); ours is holdfast.RemoteTraceback",
    "test_del_shutdown": PRIVATE + "_executor_manager_thread, _call_queue",
    "test_shutdown_no_wait": PRIVATE + "_executor_manager_thread, _call_queue",
    "test_shutdown_deadlock_pickle": PRIVATE + "_executor_manager_thread",
    "test_processes_terminate": PRIVATE + "_processes, counted before they can be up",
    "test_saturation": PRIVATE + "_processes; its tasks cannot be pickled, so no worker is needed here",
    "fork: test_max_tasks_per_child": "wants fork to be refused, which works here",
    "test_max_tasks_per_child_defaults_to_spawn_context": PRIVATE + "_mp_context; fork works with it here",
}


class ProcessPoolExecutor(Pool):
    """Under the name that the tests print."""


def find_tests(folder: str | None) -> tuple[str, str]:
    """(folder to import from or "", name of the module)."""
    if folder is None and importlib.util.find_spec("test.test_concurrent_futures") is not None:
        return "", "test.test_concurrent_futures"
    if folder is None:
        folder = fetch_tests()
    return folder, "test_concurrent_futures"


def fetch_tests() -> str:
    place = tempfile.mkdtemp(prefix="cpython-tests-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    package = f"libpython3.{sys.version_info.minor}-testsuite"
    print(f"this interpreter came without its tests; fetching Debian's {package}", flush=True)
    subprocess.run(["apt-get", "download", "-qq", package], cwd=place, check=True)
    subprocess.run(["dpkg", "-x", *map(str, Path(place).glob("*.deb")), place], check=True)
    return str(next(Path(place).rglob("test_concurrent_futures.py")).parent.rename(Path(place) / "tests"))


def load(folder: str, name: str) -> list[ModuleType]:
    """One module; from Python 3.12 on a package of them."""
    if folder:
        # Only that file: the folder holds a whole `test` package, and names that hide the standard library's.
        alone = Path(folder).parent / "alone"
        alone.mkdir(exist_ok=True)
        source = Path(folder) / "test_concurrent_futures.py"
        (alone / source.name).write_bytes(source.read_bytes())
        sys.path.insert(0, str(alone))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(alone), os.environ.get("PYTHONPATH", "")])
    whole = importlib.import_module(name)
    parts = [whole]
    for found in pkgutil.iter_modules(getattr(whole, "__path__", ())):
        if found.name.startswith("test_") or found.name in ("util", "executor"):
            parts.append(importlib.import_module(f"{name}.{found.name}"))
    return parts


def point_at_pool(module: ModuleType) -> None:
    for thing in vars(module).values():
        kind = getattr(thing, "executor_type", None)
        if isinstance(thing, type) and kind is not None and "Process" in kind.__name__:
            thing.executor_type = ProcessPoolExecutor
    if hasattr(module, "assert_python_ok"):
        module.assert_python_ok = run_script  # type: ignore[attr-defined]


def run_script(*args: str) -> tuple[int, bytes, bytes]:
    """A script of the tests in an interpreter of its own, with our pool under the other's name."""
    *flags, script = args
    script = script.replace("from concurrent.futures import ProcessPoolExecutor", "from holdfast import Pool")
    script = script.replace("ProcessPoolExecutor", "Pool")
    if importlib.util.find_spec("test.test_concurrent_futures") is None:
        script = script.replace("from test.test_concurrent_futures", "from test_concurrent_futures")
    done = subprocess.run([sys.executable, *flags, script], capture_output=True, check=False)
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}\n{done.stdout.decode()}\n{done.stderr.decode()}")
    return done.returncode, done.stdout, done.stderr


def cases(suite: Any) -> Iterator[unittest.TestCase]:
    for part in suite:
        if isinstance(part, unittest.TestSuite):
            yield from cases(part)
        else:
            yield part


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests")
    parser.add_argument("names", nargs="*")
    wanted = parser.parse_args()
    modules = load(*find_tests(wanted.tests))
    for module in modules:
        point_at_pool(module)
    concurrent.futures.ProcessPoolExecutor = ProcessPoolExecutor  # type: ignore[misc, assignment]
    chosen, left_out = unittest.TestSuite(), set()
    for module in modules:
        for case in cases(unittest.defaultTestLoader.loadTestsFromModule(module)):
            if getattr(case, "executor_type", None) is not ProcessPoolExecutor:
                continue  # thread pools, and futures by themselves
            name = case.id().rpartition(".")[2]
            if getattr(case, "ctx", "") == "fork" and f"fork: {name}" in EXCEPTIONS:
                name = f"fork: {name}"
            if name in EXCEPTIONS:
                left_out.add(name)
            elif not wanted.names or any(part in case.id() for part in wanted.names):
                chosen.addTest(case)
    result = unittest.TextTestRunner(verbosity=2).run(chosen)
    print("\nLeft out:")
    for name in sorted(left_out):
        print(f"  {name}: {EXCEPTIONS[name]}")
    return not result.wasSuccessful()


if __name__ == "__main__":
    sys.exit(main())
