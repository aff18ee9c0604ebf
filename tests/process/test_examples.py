"""The examples, as a user runs them: workers are killed, hang, raise, eat memory; only these are lost."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
GOOD = {"apple": "APPLE", "pear": "PEAR", "plum": "PLUM", "fig": "FIG", "lime": "LIME"}
LOST = {
    "killed": ("TaskLost", "SIGKILL"),
    "hangs": ("TaskTimeout", "killed for hanging"),
    "raises": ("ValueError", "cannot process 'raises'"),
    "eats memory": ("MemoryError", ""),
}


@pytest.mark.parametrize("name", ["pool_with_error_handling", "process_per_item", "worker_loop"])
def test_only_the_guilty_items_are_lost(name):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    told = dict(re.findall(r"^([a-z ]+): ([A-Z].*)$", done.stdout, re.MULTILINE))
    assert told.keys() == GOOD.keys() | LOST.keys()
    for item, result in GOOD.items():
        assert told[item] == result
    for item, (kind, words) in LOST.items():
        assert told[item].startswith(f"LOST, {kind}: ") and words in told[item]
