"""Who signals the trainer? A process beside it that waits for the note of a signal, and tells; opt-in.

A trainer that is told to end mostly does, at once or in a handler of its own, and a Python handler of ours would come
too late, or hold it up while native code runs. So the compiled handler (system/_sender.c) notes the sender, wakes this
process, and then does what would have been done without it: the trainer's own handler runs, or it dies by the signal,
with the status that everybody expects. The witness has all the time it needs.

It is a grandchild, so that the trainer has no child that it does not know of; it ignores what is sent to the whole
group; it ends with the trainer.
"""

import os
import select
import signal
from collections.abc import Callable
from typing import Any

from holdfast.shm.memory_file import Memory, new_file
from holdfast.system import linux
from holdfast.system.evidence import Evidence, worlds
from holdfast.system.signal_origin import SenderNote, can_note

_SIZE = 4096
# Where there is no pidfd, the trainer's end is noticed this late.
_LOOK_S = 0.5

Tell = Callable[[int, Evidence], None]


class SignalWitness:
    """Which process: the trainer, once, before user code runs."""

    def __init__(self, tell: Tell) -> None:
        """`tell(number, evidence)` is called in the witness."""
        self._tell = tell
        self._trainer = os.getpid()
        fd = new_file("witness", _SIZE)
        self._memory = Memory(fd, _SIZE)
        os.close(fd)
        self._note = SenderNote(self._memory, 0, _SIZE)
        self._wake = -1

    def start(self) -> bool:
        """False where it cannot be: built without a compiler."""
        if not can_note():
            return False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if os.fork() == 0:
                    self._watch()
                status = 0
            finally:
                os._exit(status)
        os.waitpid(child, 0)
        for number in linux.NOTED_SIGNALS:
            self._note_from_now_on(number)
        self._stay_installed()
        return True

    def _note_from_now_on(self, number: int) -> None:
        """What is ignored stays so: a program that the trainer starts inherits that, but not a handler."""
        if signal.getsignal(number) is not signal.SIG_IGN:
            self._note.install((number,), self._wake)

    def _stay_installed(self) -> None:
        """A handler that the script sets later takes our place; we go in front of it again."""
        original = signal.signal

        def set_and_note(number: int, handler: Any) -> Any:
            before = original(number, handler)
            if number in linux.NOTED_SIGNALS and os.getpid() == self._trainer:
                self._note_from_now_on(number)
            return before

        set_and_note.__doc__, set_and_note.__wrapped__ = original.__doc__, original  # type: ignore[attr-defined]
        signal.signal = set_and_note  # type: ignore[assignment]

    # In the witness --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        for number in linux.NOTED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        nowhere = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1):  # stderr is for telling; nobody shall wait for the end of the others because of us
            os.dup2(nowhere, fd)
        pidfd = linux.open_pidfd(self._trainer)
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if pidfd is not None:
            poll.register(pidfd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll(None if pidfd is not None else _LOOK_S * 1000)]
            if self._wake in ready:
                os.eventfd_read(self._wake)
                noted = self._note.number
                evidence = Evidence(pid=self._trainer, sender=self._note.last(noted), worlds=worlds())
                self._tell(noted, evidence)
            elif pidfd in ready or not linux.process_state(self._trainer):
                return
