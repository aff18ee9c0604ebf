"""spawn: torch's signature and return value; and the object behind it, which lives on a thread of its own.

The thread watches one attempt after another, so that a death is noticed when it happens and not when somebody calls
`join`, and the other ranks are stopped whether or not anybody waits.
"""

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import Any

from torch.multiprocessing.spawn import ProcessContext

from holdfast.diagnose.machine import Machine, read_machine
from holdfast.diagnose.run_folder import RunFolder
from holdfast.launch.cause import RootCause
from holdfast.launch.environment import THREADS, Meeting, environment_of, threads_per_rank, too_many
from holdfast.launch.narrator import Attempt
from holdfast.launch.output import Output
from holdfast.launch.rank_group import RankGroup
from holdfast.launch.shipped_function import ShippedFunction
from holdfast.policy import Policy
from holdfast.shm import forks
from holdfast.system.cgroups import growth_bytes
from holdfast.system.evidence import facts_of
from holdfast.system.linux import resident_bytes
from holdfast.system.signals import warn

log = logging.getLogger("holdfast")
# After Ctrl-C somebody is waiting at the terminal; a second one kills at once.
INTERRUPTED_S = 5.0
_METHODS = ("spawn", "fork", "forkserver")


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
        """`joined`: somebody waits from the beginning."""
        # torch's own __init__ is not called: processes and sentinels change with each attempt.
        self._fn, self._args, self._nprocs = fn, args, nprocs
        self._daemon, self._method, self._log_dir = daemon, start_method, log_dir
        self._restarts = 0 if policy is None else policy.group_restarts
        self._growth = None if policy is None else growth_bytes(policy.worker_bytes, nprocs)
        self._folder = RunFolder.from_environment("ranks")
        self._machine: Machine = read_machine()
        self._joined = joined
        self._owner = os.getpid()
        self._told: list[str] = []  # of earlier attempts
        self._grace_s: float | None = None
        self._interrupted = False
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._claim = threading.Lock()  # taken once: by the thread as it begins, or by who gives the start up
        self._begun = ExitStack()  # ends what the attempt has begun
        self.attempt = 1
        for worry in too_many(nprocs, self._machine, start_method, resident_bytes(os.getpid())):
            warn(worry)

    def begin(self) -> None:
        """Start them all. Whoever calls it calls `end` if it raises, whatever that is."""
        self._start()
        self._thread = threading.Thread(target=self._run, name="holdfast-launch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """End what was started. (Thread.start may be interrupted after the thread has begun.)"""
        if self._claim.acquire(blocking=False):
            self._begun.close()
        else:
            self.stop()

    # torch's attributes --------------------------------------------------------------------------------------------

    @property
    def processes(self) -> list[Any]:
        """Those of the present attempt."""
        return [rank.process for rank in self._group.ranks]

    @property
    def sentinels(self) -> dict[int, int]:  # type: ignore[override]
        """Of ranks that have not ended."""
        return {rank.process.sentinel: rank.number for rank in self._group.ranks if rank.code is None}

    @property
    def error_files(self) -> list[str]:
        """torch keeps tracebacks in files; here the files of `log_dir` have them."""
        return [str(path or "") for path in self._group.output.files]

    def pids(self) -> list[int]:
        return [rank.pid for rank in self._group.ranks]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """True when all ranks have returned, False when `timeout` passed before; raises when a rank failed.

        `grace_period`: seconds for the others to end by themselves after a failure, and again after SIGTERM.
        """
        self._check_process()
        try:
            if grace_period is not None:
                self._grace_s = grace_period
                self._group.allow(grace_period)
            over = self._over.wait(timeout)
        except BaseException:  # Ctrl-C: nobody waits for the ranks any more
            self.stop()
            raise
        if not over:
            return False
        self._thread.join()
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """End all ranks: SIGTERM, and SIGKILL for who does not mind it."""
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
        """In a forked child there is no thread that watches, and its end would be waited for in vain."""
        if os.getpid() != self._owner:
            raise forks.wrong_process("group of ranks", self._owner, "call join() and stop() in that process")

    # Attempts ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        output = Output(self._nprocs, self.attempt, self._log_dir, prefixed=self._nprocs > 1)
        self._group = group = RankGroup(output)
        threads = threads_per_rank(self._nprocs, self._machine.cpus)
        chosen = THREADS in os.environ
        try:
            self._begun.callback(group.abandon)
            meeting = self._begun.enter_context(closing(Meeting()))
            group.open()
            output.open()
            for rank in range(self._nprocs):
                env = environment_of(rank, self._nprocs, self.attempt, meeting.port, threads, os.environ)
                parcel = ShippedFunction(self._fn, self._args)
                group.start(self._method, self._daemon, parcel, rank, env, None if chosen else threads, self._growth)
        except OSError as error:
            error.add_note("; ".join(("while the ranks were started", *facts_of(error))))
            raise

    def _run(self) -> None:
        """Which thread: our own. What goes wrong here is raised from `join`."""
        if not self._claim.acquire(blocking=False):
            return  # nobody wants them any more
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
        """True for another attempt; else it is over, and `_error` says how."""
        if self._interrupted:
            self._error = KeyboardInterrupt("the ranks were stopped")
            return False
        if verdict.cause is None:
            return False
        most = self._restarts + 1
        last = self.attempt >= most
        attempt = Attempt(self._group, verdict, self.attempt, most, "" if last else "starts all ranks again")
        over = last or attempt.boot
        if self._folder is not None:
            self._folder.write(asdict(attempt.incident))
        if not (over and self._joined):  # else the exception says it
            log.warning("%s", attempt.incident.line)
        if over:
            self._error = attempt.error(self._told)
            return False
        self._told.append(attempt.incident.headline)
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

    The first rank to fail is named as the cause, with a finding and its last output; the others are stopped. With
    `Policy(restarts=n)` all ranks start again, up to n times; without `restarts` never. With
    `Policy(worker_memory=...)` an allocation of a rank beyond that raises MemoryError at its line. Nothing else of a
    policy is for ranks. `log_dir`: a folder for what ranks print, a file per rank and attempt. All start methods work,
    and so do functions of a notebook, lambdas and closures. Gives None, or with `join=False` the ranks: torch's
    ProcessContext.
    """
    start_method = start_method or multiprocessing.get_start_method()
    if start_method not in _METHODS:
        raise ValueError(f"start_method={start_method!r}: it must be one of {', '.join(_METHODS)}")
    if nprocs < 1:
        raise ValueError(f"nprocs={nprocs}: there must be one rank at least")
    ranks = Ranks(fn, tuple(args), nprocs, daemon, start_method, policy, log_dir, join)
    try:
        ranks.begin()
        if join:
            ranks.join()
        return None if join else ranks
    except BaseException:  # Ctrl-C, at any moment
        ranks.end()
        raise
