"""The environment of a rank, and whether that many fit: pure."""

import socket

from holdfast.diagnose.machine import Machine
from holdfast.launch.attempts import HeldPort, environment_of, threads_per_rank
from holdfast.launch.rank_narrator import too_many
from holdfast.system.cgroups import ControlGroup

GIB = 1 << 30


def test_ranks_of_one_machine_meet_there():
    env = environment_of(1, 4, 2, 4711, 3, {"HOME": "/root"})
    assert env["HOME"] == "/root"
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "4711")
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("1", "4", "1", "4")
    assert (env["HOLDFAST_ATTEMPT"], env["TORCHELASTIC_RESTART_COUNT"]) == ("2", "1")
    assert env["OMP_NUM_THREADS"] == "3"


def test_a_meeting_place_of_the_users_own_stands():
    env = environment_of(1, 4, 1, 4711, 3, {"MASTER_ADDR": "node7", "MASTER_PORT": "29400", "WORLD_SIZE": "16"})
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["WORLD_SIZE"]) == ("node7", "29400", "16")
    assert env["RANK"] == "1"  # not set by the user


def test_ranks_of_a_rank_have_a_meeting_place_of_their_own():
    outer = environment_of(3, 4, 1, 4711, 1, {})
    inner = environment_of(0, 2, 1, 4712, 1, outer)
    assert (inner["MASTER_PORT"], inner["RANK"], inner["WORLD_SIZE"]) == ("4712", "0", "2")


def test_the_users_threads_stand():
    assert environment_of(0, 1, 1, 1, 8, {"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "2"


def test_threads_of_all_ranks_together_fit_the_processors():
    assert [threads_per_rank(n, 8) for n in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]


def test_who_does_not_fit_is_told_so_with_numbers():
    assert too_many(8, Machine(), "spawn", GIB) == []
    (cpus,) = too_many(9, Machine(), "spawn", GIB)
    assert "9 ranks share 8 processors" in cpus
    (quota,) = too_many(4, Machine(cgroup=ControlGroup(cpus=2.0)), "spawn", GIB)
    assert "cgroup quota 2" in quota and "nprocs=2 fits" in quota
    (memory,) = too_many(8, Machine(memory_available=5 * GIB), "spawn", GIB)
    assert "8192 MiB" in memory and "5120 MiB are free" in memory and "nprocs=5 fits" in memory
    assert too_many(8, Machine(memory_available=5 * GIB), "fork", GIB) == []  # a fork shares what there is


def test_a_held_port_can_be_bound_by_a_rank_and_is_given_to_nobody_else():
    meeting = HeldPort()
    with socket.socket() as rank_0:
        rank_0.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank_0.bind(("", meeting.port))
        rank_0.listen()
    others = {HeldPort() for _ in range(50)}
    assert meeting.port not in {other.port for other in others}
    for held in (meeting, *others):
        held.close()
