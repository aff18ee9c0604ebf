"""Without the C extensions a loader loses nothing either. `make test-pure` runs whole suites that way."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

PURE = Path(__file__).parents[1] / "pure"
SOURCE = Path(holdfast.__file__).parents[1]

SCRIPT = """
import os
import signal
import sys

import torch
from torch.utils.data import Dataset

from holdfast import DataLoader
from holdfast.local.protocol.pulse import PlainRecorder, new_words, recorder
from holdfast.shm import slot_writer
from holdfast.system.signal_origin import can_note


class Images(Dataset):
    def __init__(self, mark):
        self.mark = mark

    def __len__(self):
        return 64

    def __getitem__(self, index):
        assert slot_writer.copy_all is None and slot_writer.stack is None and not can_note()
        assert type(recorder(new_words())) is PlainRecorder
        if index == 22 and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((3, 64, 64), float(index))


if __name__ == "__main__":
    method, mark = sys.argv[1:]
    loader = DataLoader(Images(mark), batch_size=8, num_workers=2, multiprocessing_context=method)
    assert [image for batch in loader for image in batch[:, 2, 63, 63].tolist()] == [*range(64)]
    assert loader.stats()["restarts"] == 1
    (incident,) = loader.incidents
    print(incident.index, flush=True)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_killed_worker_costs_nothing_without_extensions(method, tmp_path):
    """The extensions are hidden from the trainer, the keeper and the workers."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": f"{PURE}{os.pathsep}{SOURCE}"}
    command = [sys.executable, str(script), method, str(tmp_path / "mark")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["22"]
