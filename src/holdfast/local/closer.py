"""A closer look at a worker that hangs or is about to be killed. Which process: the keeper.

What it waits for is seen from outside first, before anything is done that may wake it; then py-spy, where there is one,
gives its opinion; then the worker is asked for its Python stack.
"""

import os
import time
from dataclasses import replace

from holdfast.local import linux, procfs
from holdfast.local.evidence import view_of
from holdfast.local.life import Life
from holdfast.local.pulse import DUMPABLE, GIL
from holdfast.local.spy import Spy

# A silent worker is looked at for this long, to see whether it computes; a clock tick is 10 ms.
BUSY_S = 0.06


class CloserLook:
    def __init__(self, spy: Spy) -> None:
        self._spy = spy

    def second_opinion_awaited(self, life: Life) -> bool:
        """True while py-spy still looks at this hang. (A worker that goes on meanwhile was only slow, and lives.)"""
        if self._spy.path is None:
            return False
        self._see(life)
        stopped = life.view is not None and life.view.state in ("T", "t")  # py-spy cannot look at such a one
        return not stopped and self._spy.awaited(life.pid, life.hang)

    def _see(self, life: Life) -> None:
        """What it waits for and what it has; once per hang."""
        if life.seen == life.hang:
            return
        life.seen = life.hang
        before, began = procfs.processor_s(life.pid), time.monotonic()
        time.sleep(BUSY_S)
        busy = (procfs.processor_s(life.pid) - before) / (time.monotonic() - began)
        life.view = view_of(life.pid, busy)
        life.look_closely(time.monotonic())

    def dump(self, life: Life) -> None:
        """Ask the worker for its stack."""
        self._see(life)
        if not life.pulse.words[DUMPABLE] or life.view is None or life.view.state in ("T", "t", "Z", ""):
            return
        life.pulse.words[GIL] = 0
        os.ftruncate(life.crash, 0)
        os.lseek(life.crash, 0, os.SEEK_SET)
        linux.ask_for_stack(life.pid, life.crash)
        life.stack = life.crash_text()
        seen = self._spy.answer(life.hang)
        gil = {1: False, 2: True}.get(life.pulse.words[GIL], seen.gil)
        life.view = replace(life.view, line=procfs.source_line(life.stack), gil=gil, native=seen.frames)
