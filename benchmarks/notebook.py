"""examples/ddp.ipynb, executed again and again: is rank 1 named each time, and does it train to the end?

    make notebook            20 runs, in an environment with Jupyter

Each run is a `jupyter nbconvert --execute` of its own: a new kernel, new ranks.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NOTEBOOK = Path(__file__).parents[1] / "examples" / "ddp.ipynb"
NAMED = "caught: process 1 terminated with signal SIGKILL (rank 1 of 2"
TRAINED = "trained to the end: 10 steps"
# A kernel, two times two ranks that import torch, and two trainings.
PATIENCE_S = 300


def text_of(notebook: Path) -> str:
    """All that its cells have printed."""
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join("".join(output.get("text", [])) for output in outputs)


def execute(folder: str) -> str:
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--output-dir", folder]
    subprocess.run([*command, str(NOTEBOOK)], check=True, capture_output=True, timeout=PATIENCE_S, env=os.environ)
    return text_of(Path(folder) / NOTEBOOK.name)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("runs", type=int, nargs="?", default=20)
    runs = options.parse_args().runs
    named = trained = 0
    for run in range(runs):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            text = execute(folder)
        named += NAMED in text
        trained += TRAINED in text
        print(f"run {run + 1}: {time.monotonic() - began:.1f} s, named {named}, trained {trained}", flush=True)
        if NAMED not in text or TRAINED not in text:
            print(text)
    print(f"rank 1 and SIGKILL named as the cause: {named} of {runs}; with restarts trained to the end: {trained}")
    return 0 if named == trained == runs else 1


if __name__ == "__main__":
    sys.exit(main())
