"""Under torchrun and Elastic: error files that carry our findings.

    from holdfast.launch.elastic import record  # was: torch.distributed.elastic.multiprocessing.errors

torch takes its handler from `record(fn, error_handler=...)` and from nowhere else, so that is where ours is given. What
it writes torch reads as its own: the summary that torchrun prints shows the finding above the traceback, and the JSON
has it under `extraInfo.holdfast`. A rank that is killed or crashes has an error file too, see witness.py.

torchrun calls the failure with the least timestamp the root cause, in whole seconds. A rank that says that it lost a
peer is never the first to fail, so its timestamp is set ECHO_S later; when it really was is in `extraInfo.holdfast.at`.
"""

import faulthandler
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing import errors

from holdfast.core.messages import Cause, What
from holdfast.diagnose.finding import Case, Finding
from holdfast.errors import legible
from holdfast.launch.cause import How, RankEnd, how
from holdfast.launch.narrator import ending, finding_of
from holdfast.launch.rank_main import ENTERED, PAGE, tell_senders
from holdfast.local.trainer.keeper_birth import flush_output
from holdfast.remote_exception import capture
from holdfast.shm.memory import Memory, new_file
from holdfast.system import linux
from holdfast.system.cgroups import LOOK_S, OomWatch, group_of
from holdfast.system.evidence import Evidence, shm_free, worlds
from holdfast.system.signals import SenderNote

# More than the agent takes to notice a death (0.1 s) on the busiest machine.
ECHO_S = 10

_LOST_PEER = Finding(
    "rank-failed-first",
    "this rank lost the connection to another one, which had died or left before",
    (),
    "look at the rank that failed first; this one only noticed",
    "likely",
)
_Main = TypeVar("_Main", bound=Callable[..., Any])


class ErrorHandler(errors.ErrorHandler):
    """torch's, with findings."""

    def initialize(self) -> None:
        """Before the main function: from now on a death leaves an error file."""
        super().initialize()
        path = self._get_error_file_path()
        if path is not None:
            DeathWitness(lambda case, at: self._record(path, case, at)).begin()

    def record_exception(self, e: BaseException) -> None:
        """The main function raised."""
        path = self._get_error_file_path()
        if path is None:
            return
        rank = int(os.environ.get("RANK", "0"))
        case = Case(what=What.RAISED, worker=rank, pid=os.getpid(), raised=capture(e))
        self._record(path, case, time.time())

    def _record(self, path: str, case: Case, at: float) -> None:
        if os.path.exists(path):
            return  # it raised, and then died
        raised = case.raised
        said = f"{raised.type_name}: {raised.text}" if raised is not None else ""
        echo = how(RankEnd(case.worker, 0, 1, said)) is How.ECHO
        finding = _LOST_PEER if echo else finding_of(case)
        advice = finding.advice.replace("Policy(restarts=3)", "torchrun --max-restarts=3")
        finding = replace(finding, advice=advice)
        stack = raised.traceback if raised is not None else case.evidence.stack if case.evidence is not None else ""
        data = {
            "message": {
                "message": said or f"rank {case.worker} {ending(case)}",
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
        os.rename(new, path)  # whole or not at all: torchrun may look at any moment


def _text(case: Case, finding: Finding) -> str:
    lines = [f"rank {case.worker} {ending(case)}", f"  {finding.name}: {finding.says}"]
    lines += [f"    seen   {'; '.join(finding.seen)}"] if finding.seen else []
    lines += [f"    try    {finding.advice}", f"    more   holdfast explain {finding.name}"]
    return "\n".join(lines)


def record(fn: _Main) -> Callable[..., Any]:
    """torch's `record` with our handler: a decorator for the main function of a script that torchrun runs."""
    return errors.record(fn, error_handler=ErrorHandler())


# A witness for a rank of somebody else's launcher: a small fork of the rank that waits for its death and writes why.
#
# torchrun learns of a killed rank only that it is gone, and reads its error file at its next look, a tenth of a second
# later at most. A rank that is killed or crashes cannot write that file; its witness can, in a few milliseconds: it is
# woken by the death itself, reads the exit status while the launcher has not reaped yet, and asks the rules. If torchrun
# looks sooner, its summary is as it would have been without us.


STACK_BYTES = 32 << 10


class DeathWitness:
    """`write(case, at_s)` is called in the witness, once, if the rank ends badly; `at_s` in seconds since 1970."""

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
        """Which process: the rank, at the start of its main function. Nothing happens on kernels without pidfd."""
        pidfd = linux.open_pidfd(self._rank)
        if pidfd is None:
            return
        flush_output()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads: what follows takes no lock of theirs
            witness = os.fork()
        if witness == 0:
            self._be(pidfd)
        os.close(pidfd)
        faulthandler.enable(file=self._crash, all_threads=True)
        tell_senders(self._memory)
        os.register_at_fork(after_in_child=faulthandler.disable)

    def _be(self, pidfd: int) -> None:
        """Never returns."""
        status = 1
        try:
            for number in linux.NOTED_SIGNALS:
                signal.signal(number, signal.SIG_IGN)  # it ends when the rank has ended
            self._wait(pidfd)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)

    def _wait(self, pidfd: int) -> None:
        oom = OomWatch(time.monotonic())
        here = worlds()
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        readings: list[tuple[float, int]] = []
        self._rehearse()
        while not poll.poll(LOOK_S * 1000):
            oom.look(time.monotonic())
            readings = [*readings[-3:], (time.monotonic(), linux.resident_bytes(self._rank))]
        code = exit_status(self._rank)  # first of all: the launcher may reap it now
        at, now = time.time(), time.monotonic()
        sender = self._note.last(-code) if code is not None and code < 0 else None
        if not code or (sender is not None and sender.pid == self._launcher):
            return  # it returned, or its launcher stopped it; or nobody can say
        stack = os.pread(self._crash, STACK_BYTES, 0).decode(errors="replace").rstrip()
        evidence = Evidence(
            pid=self._rank,
            lived_s=now - self._began,
            stack=stack,
            memory=tuple((now - then, size) for then, size in readings),
            oom=oom.claim(now) if code == -signal.SIGKILL else None,
            counters=oom.readable,
            group=group_of(),
            shm_free=shm_free(),
            sender=sender,
            worlds=here,
        )
        self._write(self._case(code, evidence), at)
        if stack:
            os.write(2, f"{stack}\n".encode())  # where it would have gone

    def _case(self, code: int, evidence: Evidence) -> Case:
        cause = Cause.SIGNAL if code < 0 else Cause.EXIT
        return Case(
            what=What.EXITED, worker=self._number, pid=self._rank, cause=cause, code=abs(code), evidence=evidence
        )

    def _rehearse(self) -> None:
        """Once for nothing: what is touched for the first time after a fork is slow, and the launcher does not wait."""
        exit_status(self._rank)
        finding_of(self._case(-signal.SIGKILL, Evidence(pid=self._rank, group=group_of())))
        json.dumps({})


def exit_status(pid: int) -> int | None:
    """Of a process that has ended and was not reaped yet, as multiprocessing has it; None when nobody can say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == "Z" else None
