"""Programs of the tests in interpreters of their own."""

import subprocess
import sys


def script(text, **more):
    """Run it in an interpreter of its own: (exit code, stdout, stderr)."""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=60, **more)
    return done.returncode, done.stdout, done.stderr


CHILD = """
import resource, sys, torch, holdfast
sys.path.insert(0, {root!r})
from tests.process.data import *
{body}
"""


def run_child(body, *, prefix=(), timeout=90):
    import pathlib

    root = str(pathlib.Path(__file__).parents[2])
    code = CHILD.format(root=root, body=body)
    return subprocess.run(
        [*prefix, sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        start_new_session=True,
        check=False,
    )
