"""Limits that a worker sets for itself, once it is up."""

import resource

from holdfast.local import linux

# More than this many open files is a leak, and a table that large costs at each fork.
MOST_DESCRIPTORS = 65_536


def raise_descriptor_limit() -> None:
    """The soft limit on open files goes up to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit_growth(size: int) -> None:
    """An allocation fails, in Python with its line, once this process has `size` bytes more than now."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = linux.data_bytes() + size
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
