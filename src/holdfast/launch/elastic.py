"""Under torchrun and Elastic: error files that carry our findings.

    from holdfast.launch.elastic import record  # was: torch.distributed.elastic.multiprocessing.errors

torch takes its error handler only from `record(fn, error_handler=...)`, so `record` here passes ours. torch reads what
it writes as its own file: the summary that torchrun prints shows the finding above the traceback, and the JSON has it
under `extraInfo.holdfast`. A rank that is killed or crashes has an error file too: its DeathWitness writes it.

torchrun calls the failure with the least timestamp the root cause, in whole seconds. A rank that says that it lost a
peer is never the first to fail, so its timestamp is set ECHO_S later. `extraInfo.holdfast.at` has the true time.
"""

import faulthandler
import json
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing import errors

from holdfast.core.messages import Cause, What
from holdfast.diagnose.finding import Case, Finding
from holdfast.errors import legible
from holdfast.launch.cause import EndKind, RankEnd, kind_of
from holdfast.launch.rank_main import ENTERED, PAGE, note_senders
from holdfast.launch.rank_narrator import ending, finding_of
from holdfast.local.trainer.keeper_birth import be, flush_output
from holdfast.remote_exception import capture
from holdfast.shm.memory_file import Memory, new_file
from holdfast.system import linux, procfs
from holdfast.system.cgroups import LOOK_S, OomWatch
from holdfast.system.evidence import Evidence, at_death
from holdfast.system.signal_origin import SenderNote

# More than torchrun's agent takes to notice a death (0.1 s), also on a busy machine.
ECHO_S = 10

_LOST_PEER = Finding(
    "rank-failed-first",
    "this rank lost the connection to another rank, which had died or left before",
    (),
    "look at the rank that failed first; this one only noticed",
    "likely",
)
_Main = TypeVar("_Main", bound=Callable[..., Any])


class ErrorHandler(errors.ErrorHandler):
    """torch's error handler, with findings."""

    def initialize(self) -> None:
        """Called before the main function: from now on a death leaves an error file."""
        super().initialize()
        path = self._get_error_file_path()
        if path is not None:
            DeathWitness(lambda case, at: self._record(path, case, at)).begin()

    def record_exception(self, e: BaseException) -> None:
        """Called when the main function raised."""
        path = self._get_error_file_path()
        if path is None:
            return
        rank = int(os.environ.get("RANK", "0"))
        case = Case(what=What.RAISED, worker=rank, pid=os.getpid(), raised=capture(e))
        self._record(path, case, time.time())

    def _record(self, path: str, case: Case, at: float) -> None:
        if os.path.exists(path):
            return  # the rank raised before it died
        raised = case.raised
        error = f"{raised.type_name}: {raised.text}" if raised is not None else ""
        echo = kind_of(RankEnd(case.worker, 0, 1, error)) is EndKind.ECHO
        finding = _LOST_PEER if echo else finding_of(case)
        advice = finding.advice.replace("Policy(restarts=3)", "torchrun --max-restarts=3")
        finding = replace(finding, advice=advice)
        stack = raised.traceback if raised is not None else case.evidence.stack if case.evidence is not None else ""
        data = {
            "message": {
                "message": error or f"rank {case.worker} {ending(case)}",
                "extraInfo": {
                    "py_callstack": legible(f"{_text(case, finding)}\n{stack}".rstrip()),
                    "timestamp": str(int(at) + (ECHO_S if echo else 0)),
                    "holdfast": {
                        "rank": case.worker,
                        "pid": case.pid,
                        "at": at,
                        "finding": finding.name,
                        "says": finding.says,
                        "seen": finding.seen,
                        "advice": finding.advice,
                        "confidence": finding.confidence,
                    },
                },
            }
        }
        new = f"{path}.{os.getpid()}"
        with open(new, "w") as file:
            json.dump(data, file)
        os.rename(new, path)  # torchrun may look at any moment, and finds a whole file or none


def _text(case: Case, finding: Finding) -> str:
    lines = [f"rank {case.worker} {ending(case)}", f"  {finding.name}: {finding.says}"]
    lines += [f"    seen   {'; '.join(finding.seen)}"] if finding.seen else []
    lines += [f"    try    {finding.advice}", f"    more   holdfast explain {finding.name}"]
    return "\n".join(lines)


def record(fn: _Main) -> Callable[..., Any]:
    """torch's `record` with our error handler: a decorator for the main function of a script that torchrun runs."""
    return errors.record(fn, error_handler=ErrorHandler())


# A witness for a rank of another launcher: a small fork of the rank that waits for its death and writes why it died.
#
# torchrun learns of a killed rank only that it is gone. It reads the rank's error file at its next look, at most 0.1 s
# later. A rank that is killed or crashes cannot write that file. Its witness can, in a few milliseconds: the death
# itself wakes it, it reads the exit status before the launcher reaps the rank, and it asks the rules. If torchrun looks
# sooner, its summary is what it would be without us.


class DeathWitness:
    """If the rank ends badly, the witness calls `write(case, at_s)` once; `at_s` is in seconds since 1970."""

    def __init__(self, write: Callable[[Case, float], None]) -> None:
        self._write = write
        self._rank = os.getpid()
        self._launcher = os.getppid()
        self._crash = new_file("crash", 0)
        page = new_file("page", PAGE)
        self._memory = Memory(page, PAGE)
        os.close(page)
        self._note = SenderNote(self._memory, 0, ENTERED)
        self._began = time.monotonic()
        self._number = int(os.environ.get("RANK", "0"))

    def begin(self) -> None:
        """Which process: the rank, when its main function starts. On kernels without pidfd this does nothing."""
        pidfd = linux.open_pidfd(self._rank)
        if pidfd is None:
            return
        flush_output()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the witness takes no lock of other threads
            witness = os.fork()
        if witness == 0:
            be(lambda: self._wait(pidfd))
        os.close(pidfd)
        faulthandler.enable(file=self._crash, all_threads=True)
        note_senders(self._memory)
        os.register_at_fork(after_in_child=faulthandler.disable)

    def _wait(self, pidfd: int) -> None:
        """Which process: the witness."""
        for number in linux.NOTED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # it ends when the rank has ended
        oom = OomWatch(time.monotonic())
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        readings: list[tuple[float, int]] = []
        self._rehearse(oom)
        while not poll.poll(LOOK_S * 1000):
            oom.look(time.monotonic())
            readings = [*readings[-3:], (time.monotonic(), linux.resident_bytes(self._rank))]
        code = procfs.exit_status(self._rank)  # first of all: the launcher may reap it now
        at, now = time.time(), time.monotonic()
        sender = self._note.last(-code) if code is not None and code < 0 else None
        if not code or (sender is not None and sender.pid == self._launcher):
            return  # the rank returned, its launcher stopped it, or its end is unknown
        stack = linux.written_stack(self._crash)
        seen = Evidence(
            pid=self._rank,
            lived_s=now - self._began,
            stack=stack,
            memory=tuple((now - then, size) for then, size in readings),
            sender=sender,
        )
        evidence = at_death(seen, oom, now, killed=code == -signal.SIGKILL, read_log=False)
        self._write(self._case(code, evidence), at)
        if stack:
            os.write(2, f"{stack}\n".encode())  # faulthandler would have written it there

    def _case(self, code: int, evidence: Evidence) -> Case:
        cause = Cause.SIGNAL if code < 0 else Cause.EXIT
        return Case(
            what=What.EXITED, worker=self._number, pid=self._rank, cause=cause, code=abs(code), evidence=evidence
        )

    def _rehearse(self, oom: OomWatch) -> None:
        """Do all once without effect: the first time after a fork is slow, and the launcher does not wait."""
        procfs.exit_status(self._rank)
        seen = at_death(Evidence(pid=self._rank), oom, time.monotonic(), killed=False)
        finding_of(self._case(-signal.SIGKILL, seen))
        json.dumps({})
