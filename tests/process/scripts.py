"""Programs of the tests in interpreters of their own."""

import subprocess
import sys


def script(text, **more):
    """Run it in an interpreter of its own: (exit code, stdout, stderr)."""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=60, **more)
    return done.returncode, done.stdout, done.stderr
