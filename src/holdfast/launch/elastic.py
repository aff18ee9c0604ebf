"""Under torchrun and Elastic: error files that carry our findings.

    from holdfast.launch.elastic import record  # was: torch.distributed.elastic.multiprocessing.errors

torch takes its handler from `record(fn, error_handler=...)` and from nowhere else, so that is where ours is given. What
it writes torch reads as its own: the summary that torchrun prints shows the finding above the traceback, and the JSON
has it under `extraInfo.holdfast`. A rank that is killed or crashes has an error file too, see witness.py.

torchrun calls the failure with the least timestamp the root cause, in whole seconds. A rank that says that it lost a
peer is never the first to fail, so its timestamp is set ECHO_S later; when it really was is in `extraInfo.holdfast.at`.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from torch.distributed.elastic.multiprocessing import errors

from holdfast.diagnose.finding import Case, Finding
from holdfast.errors import legible
from holdfast.launch.cause import End, How, how
from holdfast.launch.tell import ending, finding_of
from holdfast.launch.witness import Witness
from holdfast.local.raised import capture

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
            Witness(lambda case, at: self._record(path, case, at)).begin()

    def record_exception(self, e: BaseException) -> None:
        """The main function raised."""
        path = self._get_error_file_path()
        if path is None:
            return
        rank = int(os.environ.get("RANK", "0"))
        case = Case(what="raised", worker=rank, pid=os.getpid(), raised=capture(e))
        self._record(path, case, time.time())

    def _record(self, path: str, case: Case, at: float) -> None:
        if os.path.exists(path):
            return  # it raised, and then died
        raised = case.raised
        said = f"{raised.type_name}: {raised.text}" if raised is not None else ""
        echo = how(End(case.worker, 0, 1, said)) is How.ECHO
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
