"""The first finding of every cause that can be made here is the right one, with its evidence."""

import os
import shutil

import pytest

from .causes import CAUSES, named


@pytest.mark.timeout(100)
@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_the_cause_is_named(cause):
    if "java" in repr(cause.words) and shutil.which("java") is None:
        pytest.skip("no JVM here")
    if (cause.within or cause.finding == "permission-denied") and os.getuid() != 0:
        pytest.skip("needs root")
    if "/sys/fs/cgroup/" in cause.within and not os.path.isdir("/sys/fs/cgroup/memory"):
        pytest.skip("no cgroup version 1 here")
    finding, said = named(cause)
    assert finding == cause.finding, said
    assert all(word in said for word in cause.words), said
