"""Run something in a child of this process and get its answer. What ends the child does not end the command."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

from holdfast.cli import leave_pipe, reader_gone, show
from holdfast.system.linux import die_with_parent, signal_name

T = TypeVar("T")
Say = Callable[[str], None]


class Died(Exception):
    """The child ended without an answer. `how`: its signal or exit code; `doing`: what it did last."""

    def __init__(self, how: str, doing: str) -> None:
        super().__init__(how, doing)
        self.how = how
        self.doing = doing


def apart(work: Callable[[Say], T], told: tuple[type[Exception], ...] = ()) -> T:
    """Run `work` in a child; gives its answer. `work` may say what it is doing. Exceptions of the kinds `told` are
    raised here again.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def child() -> int:
        ours.close()
        faulthandler.enable() if sys.stderr is sys.__stderr__ else faulthandler.disable()
        try:
            theirs.send(("answer", work(lambda doing: theirs.send(("doing", doing)))))
        except told as error:
            theirs.send(("raised", error))
        return 0

    pid = start_child(child)
    theirs.close()
    doing, answer = "", None
    try:
        while answer is None:
            kind, value = ours.recv()
            if kind == "doing":
                doing = value
            else:
                answer = (kind, value)
    except EOFError:
        pass  # the child ended: its status says how
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        ours.close()
        _, status = os.waitpid(pid, 0)
    if answer is None:
        code = os.waitstatus_to_exitcode(status)
        raise Died(signal_name(-code) if code < 0 else f"exit code {code}", doing)
    kind, value = answer
    if kind == "raised":
        raise value
    result: T = value
    return result


def start_child(main: Callable[[], int]) -> int:
    """The pid of a fork that runs `main`, exits with its status, and does not outlive this process."""
    from holdfast.local.trainer.keeper_birth import flush_output  # here: it imports torch

    flush_output()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent(parent)
        status = main()
    except BrokenPipeError:
        if not reader_gone(sys.stdout):
            show(traceback.format_exc().rstrip(), sys.stderr)
        leave_pipe(sys.stdout)
    except BaseException:
        show(traceback.format_exc().rstrip(), sys.stderr)
    finally:
        flush_output()
        os._exit(status)
