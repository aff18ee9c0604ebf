"""spawn, with torch's signature and return value; and Ranks, the object behind it.

A thread of its own watches one attempt after another. So it notices a death when it happens, and not only when `join`
is called, and it stops the other ranks even if nobody waits.
"""

import logging
import multiprocessing
import os
import socket
import threading
from _thread import allocate_lock
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from typing import Any

from torch.multiprocessing.spawn import ProcessContext

from holdfast.diagnose.machine import Machine, read_machine
from holdfast.diagnose.run_folder import RunFolder
from holdfast.launch.cause import RootCause
from holdfast.launch.output import RankOutput
from holdfast.launch.rank_group import RankGroup
from holdfast.launch.rank_main import ShippedFunction
from holdfast.launch.rank_narrator import FailedAttempt, too_many
from holdfast.policy import Policy
from holdfast.shm import forks
from holdfast.system.cgroups import growth_bytes
from holdfast.system.evidence import facts_of
from holdfast.system.linux import resident_bytes
from holdfast.system.signal_origin import warn

log = logging.getLogger("holdfast")
# The grace period after Ctrl-C: somebody is waiting at the terminal. A second Ctrl-C kills at once.
INTERRUPTED_S = 5.0
_METHODS = ("spawn", "fork", "forkserver")
# Where ranks of one machine meet, unless the user has named an address.
LOCALHOST = "127.0.0.1"
THREADS = "OMP_NUM_THREADS"


# The environment of a rank: where ranks meet, and how many threads each takes. The trainer's own stays as it is.


class HeldPort:
    """A free port for this attempt. It is bound and never listened on, so that the system gives it to nobody else.

    Rank 0 can still bind it, because both sides set SO_REUSEADDR, as torch's store does.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((LOCALHOST, 0))
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

    If the user has set MASTER_ADDR, the ranks meet where the user says: MASTER_ADDR and MASTER_PORT stay as they are,
    and so do RANK and WORLD_SIZE where they are set. Inside a rank of ours these four are ours, and are made anew.
    """
    env = dict(trainers)
    theirs = "MASTER_ADDR" in env and "HOLDFAST_ATTEMPT" not in env
    meeting = {"MASTER_ADDR": LOCALHOST, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(nprocs)}
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
    """How many threads each rank gets, so that all ranks together have one for each processor."""
    return max(1, cpus // nprocs)


class _End:
    """What threads wait for. A signal handler that raises inside threading.Event may leave its lock taken for ever."""

    def __init__(self) -> None:
        self._come = False
        self._bells: list[Any] = []

    def set(self) -> None:
        self._come = True
        while self._bells:
            self._bells.pop().release()

    def wait(self, timeout: float | None = None) -> bool:
        bell = allocate_lock()
        bell.acquire()
        self._bells.append(bell)  # before the look: `set` comes after this, or was seen
        try:
            return self._come or bool(bell.acquire(timeout=-1 if timeout is None else max(0.0, timeout)))
        finally:
            with suppress(ValueError):
                self._bells.remove(bell)


class Ranks(ProcessContext):
    """What `spawn(join=False)` gives: torch's ProcessContext, over all attempts."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        nprocs: int,
        daemon: bool,
        start_method: str,
        policy: Policy | None,
        log_dir: str | os.PathLike[str] | None,
        joined: bool,
    ) -> None:
        """`joined`: the caller of spawn waits, so the exception tells of the last failure, and no log line."""
        # torch's own __init__ is not called: processes and sentinels change with each attempt.
        self._fn, self._args, self._nprocs = fn, args, nprocs
        self._daemon, self._method, self._log_dir = daemon, start_method, log_dir
        self._restarts = 0 if policy is None else policy.group_restarts
        self._growth_bytes = None if policy is None else growth_bytes(policy.worker_bytes, nprocs)
        self._folder = RunFolder.from_environment("ranks")
        self._machine: Machine = read_machine()
        self._joined = joined
        self._owner = os.getpid()
        self._earlier: list[str] = []  # headlines of earlier attempts
        self._grace_s: float | None = None
        self._interrupted = False
        self._error: BaseException | None = None
        self._over = _End()
        self._claim = threading.Lock()  # taken once: by the thread when it begins, or by `end`
        self._begun = ExitStack()  # ends what the attempt has begun
        self.attempt = 1
        for worry in too_many(nprocs, self._machine, start_method, resident_bytes(os.getpid())):
            warn(worry)

    def begin(self) -> None:
        """Start all ranks. If this raises anything, the caller calls `end`."""
        self._start()
        self._thread = threading.Thread(target=self._run, name="holdfast-launch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End what was started. (An interrupt may leave Thread.start after the thread has begun.)"""
        if self._claim.acquire(blocking=False):
            self._begun.close()
        else:
            self.stop()

    # torch's attributes --------------------------------------------------------------------------------------------

    @property
    def processes(self) -> list[Any]:
        """The processes of the present attempt."""
        return [rank.process for rank in self._group.ranks]

    @property
    def sentinels(self) -> dict[int, int]:  # type: ignore[override]
        """The rank of each sentinel, for ranks that have not ended."""
        return {rank.process.sentinel: rank.number for rank in self._group.ranks if rank.code is None}

    @property
    def error_files(self) -> list[str]:
        """Where tracebacks are: torch has files for them; here they are in the files of `log_dir`."""
        return [str(path or "") for path in self._group.output.files]

    def pids(self) -> list[int]:
        return [rank.pid for rank in self._group.ranks]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """True when all ranks have returned, False when `timeout` passed before that; raises when a rank failed.

        `grace_period`: seconds in which the others may end by themselves after a failure, and again after SIGTERM.
        """
        self._check_process()
        try:
            if grace_period is not None:
                self._grace_s = grace_period
                self._group.allow(grace_period)
            over = self._over.wait(timeout)
        except BaseException:  # Ctrl-C: the caller waits no more
            self.stop()
            raise
        if not over:
            return False
        self._thread.join()
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """End all ranks: SIGTERM first, then SIGKILL for those that ignore it."""
        self._check_process()
        self._interrupted = True
        self._group.stop(INTERRUPTED_S)
        try:
            self._over.wait()
        except BaseException:  # a second Ctrl-C
            self._group.stop(0.0)
            self._over.wait()
            raise

    def _check_process(self) -> None:
        """A forked child has no thread that watches: it would wait for ever."""
        if os.getpid() != self._owner:
            raise forks.wrong_process("group of ranks", self._owner, "call join() and stop() in that process")

    # Attempts ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        output = RankOutput(self._nprocs, self.attempt, self._log_dir, prefixed=self._nprocs > 1)
        self._group = group = RankGroup(output)
        threads = threads_per_rank(self._nprocs, self._machine.cpus)
        chosen = THREADS in os.environ
        try:
            self._begun.callback(group.abandon)
            meeting = self._begun.enter_context(closing(HeldPort()))
            group.open()
            output.open()
            for rank in range(self._nprocs):
                env = environment_of(rank, self._nprocs, self.attempt, meeting.port, threads, os.environ)
                function = ShippedFunction(self._fn, self._args)
                own_threads = None if chosen else threads
                group.start(self._method, self._daemon, function, rank, env, own_threads, self._growth_bytes)
        except OSError as error:
            error.add_note("; ".join(("while the ranks were started", *facts_of(error).texts)))
            raise

    def _run(self) -> None:
        """Which thread: our own. `join` raises what goes wrong here."""
        if not self._claim.acquire(blocking=False):
            return  # `end` came first
        try:
            while True:
                with self._begun:
                    self._group.allow(self._grace_s)
                    verdict = self._group.watch()
                if not self._again(verdict):
                    return
                self.attempt += 1
                self._start()
                if self._interrupted:
                    self._group.stop(INTERRUPTED_S)
        except BaseException as error:
            self._error = error
        finally:
            self._begun.close()
            self._over.set()

    def _again(self, verdict: RootCause) -> bool:
        """True if another attempt follows. Else all is over, and `_error` is what `join` raises."""
        if self._interrupted:
            self._error = KeyboardInterrupt("the ranks were stopped")
            return False
        if verdict.cause is None:
            return False
        most = self._restarts + 1
        last = self.attempt >= most
        attempt = FailedAttempt(self._group, verdict, self.attempt, most, "" if last else "starts all ranks again")
        over = last or attempt.boot
        if self._folder is not None:
            self._folder.write(asdict(attempt.incident))
        if not (over and self._joined):  # else the exception says so
            log.warning("%s", attempt.incident.line)
        if over:
            self._error = attempt.error(self._earlier)
            return False
        self._earlier.append(attempt.incident.headline)
        return True


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str | None = "spawn",
    *,
    policy: Policy | None = None,
    log_dir: str | os.PathLike[str] | None = None,
) -> Ranks | None:
    """Run `fn(rank, *args)` in `nprocs` processes, as torch.multiprocessing.spawn does.

    The error names the first rank that failed as the cause, with a finding and its last output; the others are stopped.
    With `Policy(restarts=n)` all ranks start again, up to n times; without `restarts` they never do. With
    `Policy(worker_memory=...)` an allocation of a rank beyond that raises MemoryError at its line. Ranks use no other
    field of a policy. `log_dir`: a folder for what ranks print, with a file per rank and attempt. All start methods
    work, and so do functions of a notebook, lambdas and closures. Gives None, or with `join=False` the ranks as torch's
    ProcessContext.
    """
    start_method = start_method or multiprocessing.get_start_method()
    if start_method not in _METHODS:
        raise ValueError(f"start_method={start_method!r}: it must be one of {', '.join(_METHODS)}")
    if nprocs < 1:
        raise ValueError(f"nprocs={nprocs}: it must be at least 1")
    ranks = Ranks(fn, tuple(args), nprocs, daemon, start_method, policy, log_dir, join)
    try:
        ranks.begin()
        if join:
            ranks.join()
        return None if join else ranks
    except BaseException:  # Ctrl-C, at any moment
        ranks.end()
        raise
