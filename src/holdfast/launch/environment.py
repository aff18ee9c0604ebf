"""The environment of a rank: where ranks meet, how many threads each takes; and do that many fit here?

Only ranks see it: the trainer's own `os.environ` stays as it is.
"""

import socket
from collections.abc import Mapping

from holdfast.diagnose.machine import Machine

# Where ranks of one machine meet, unless the user has named a place.
HOME = "127.0.0.1"
THREADS = "OMP_NUM_THREADS"


class Meeting:
    """A free port, held for this attempt: bound and never listened on, so that nobody else is given it.

    Rank 0 may bind it all the same, since both sides set SO_REUSEADDR, as torch's store does.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((HOME, 0))
            self.port: int = self._socket.getsockname()[1]
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()


def environment_of(
    rank: int, nprocs: int, attempt: int, port: int, threads: int, trainers: Mapping[str, str]
) -> dict[str, str]:
    """The trainer's variables and a rank's own. `attempt` counts from 1.

    A user who has set MASTER_ADDR meets other machines, or a port of his choice: then that stands, and RANK and
    WORLD_SIZE as far as they are set. (Inside a rank of ours they are ours, and made anew.)
    """
    env = dict(trainers)
    theirs = "MASTER_ADDR" in env and "HOLDFAST_ATTEMPT" not in env
    meeting = {"MASTER_ADDR": HOME, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(nprocs)}
    env = {**meeting, **env} if theirs else {**env, **meeting}
    env |= {
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "HOLDFAST_ATTEMPT": str(attempt),
        "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),
    }
    env.setdefault(THREADS, str(threads))
    return env


def threads_per_rank(nprocs: int, cpus: int) -> int:
    """So many that all ranks together take each processor once."""
    return max(1, cpus // nprocs)


def too_many(nprocs: int, machine: Machine, method: str, own_bytes: int) -> list[str]:
    """Why that many ranks may not fit. `own_bytes`: what this process holds, as the measure of what one will."""
    found = []
    if nprocs > machine.cpus:
        quota = "" if machine.cgroup.cpus is None else f", cgroup quota {machine.cgroup.cpus:g}"
        found.append(
            f"{nprocs} ranks share {machine.cpus} processors (affinity {machine.cpus_allowed}{quota}): each waits for "
            f"the others; nprocs={machine.cpus} fits"
        )
    wanted = nprocs * own_bytes
    if method != "fork" and wanted > machine.memory_free:
        found.append(
            f"{nprocs} ranks may take {wanted >> 20} MiB at their start (this process holds {own_bytes >> 20} MiB), "
            f"and {machine.memory_free >> 20} MiB are free: the kernel may kill one; "
            f"nprocs={max(1, machine.memory_free // max(1, own_bytes))} fits"
        )
    return found
