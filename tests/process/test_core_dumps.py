"""A worker that crashes while core dumps are allowed: its core is as small as that of any process with its data.

Our memory files are sparse: gigabytes of address space of which little was ever touched. A core dump would read all of
it, and make pages of the holes.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data import Dataset

from holdfast import CachedDataset, DataLoader
from holdfast.shm.memory_file import Memory, new_file

# A worker with torch in it has about 150 MB; the slots' strides alone are gigabytes.
SMALL_CORE = 600 << 20

# Its own program: it lives in a folder of its own, where the kernel leaves the core.
PROGRAM = """
import ctypes, resource, sys
from torch.utils.data import Dataset
import torch
from holdfast import DataLoader, Policy

class Crashes(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        if index == 7:
            resource.setrlimit(resource.RLIMIT_CORE, (1 << 30, 1 << 30))
            ctypes.string_at(0)
        return torch.full((3, 400, 400), float(index))

if __name__ == "__main__":
    policy = Policy(bad_sample="skip", strikes=1, max_bad=1.0)
    loader = DataLoader(Crashes(), batch_size=2, num_workers=1, policy=policy, multiprocessing_context=sys.argv[1])
    print(sorted(int(image[0, 0, 0]) for batch in loader for image in batch))
"""


def flags_of_ours(pid):
    """VmFlags of each mapping of a file of ours."""
    found, ours = {}, ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            ours = line if "memfd:holdfast" in line else ""
        elif ours and first == "VmFlags:":
            found[ours] = line.split()[1:]
    return found


class Looks(Dataset):
    """What the worker itself sees of its mappings: those that a core dump would have."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        flags = flags_of_ours(os.getpid())
        return len(flags), [mapping for mapping, words in flags.items() if "dd" not in words]


def the_same(samples):
    return samples


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_no_mapping_of_ours_is_part_of_a_core_dump(method):
    """Neither in a worker nor in the trainer; the caches' memory, too."""
    loader = DataLoader(
        CachedDataset(Looks(), "1MiB"),
        batch_size=1,
        num_workers=2,
        collate_fn=the_same,
        multiprocessing_context=method,
    )
    batches = iter(loader)
    samples = next(batches)
    mine = flags_of_ours(os.getpid())
    assert len(mine) >= 3  # pulses, a file for each worker
    assert [mapping for mapping, words in mine.items() if "dd" not in words] == []
    for seen, dumped in [*samples, *(sample for batch in batches for sample in batch)]:
        assert seen >= 2
        assert dumped == []


@pytest.mark.parametrize("private", [False, True])
def test_a_mapping_is_not_dumped_from_its_first_moment(private):
    fd = new_file("test", 1 << 20)
    memory = Memory(fd, 1 << 20, private=private)
    os.close(fd)
    at = f"{memory.address:x}-"
    assert ["dd" in words for mapping, words in flags_of_ours(os.getpid()).items() if mapping.startswith(at)] == [True]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_core_of_a_crashed_worker_is_small(method, tmp_path):
    """A real crash and a real core file, where this machine writes such files into the folder of the process."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if pattern.startswith("|") or "/" in pattern:
        pytest.skip(f"cores go elsewhere here: {pattern}")
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    if hard != resource.RLIM_INFINITY and hard < 1 << 30:
        pytest.skip("core dumps are limited here")
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py", method], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    cores = [file for file in tmp_path.iterdir() if file.name.startswith("core")]
    sizes = [os.stat(core).st_blocks * 512 for core in cores]
    for core in cores:
        core.unlink()
    assert done.stdout.strip() == str([0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]), done.stderr
    assert len(sizes) == 1
    assert sizes[0] < SMALL_CORE
