"""Vigil: waits until a worker, the keeper or another thread has something to say.

Small batches come close one after another, and falling asleep and being woken takes longer than waiting for them does:
after a short wait the next one is a few looks.
"""

import os
import select
import time

# A wait is short below this, and looking takes no longer.
SPIN_S = 150e-6


class Vigil:
    """`results`, `control`: what to wait for besides the bell, which any thread may ring."""

    def __init__(self, results: int) -> None:
        self._results = results
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.rung = False  # somebody wants whoever waits to stop waiting
        self._quick = False  # the last wait was short
        self._poll = select.poll()

    def begin(self, *control: int) -> None:
        """There is a keeper, perhaps another one; or none for now."""
        self._poll = select.poll()
        for fd in (self._results, *control, self.bell):
            self._poll.register(fd, select.POLLIN)

    def ring(self) -> None:
        """From any thread, but not while another closes this."""
        if self.bell >= 0:
            os.eventfd_write(self.bell, 1)

    def answer(self) -> None:
        """It has rung."""
        os.eventfd_read(self.bell)
        self.rung = True

    def look(self) -> list[tuple[int, int]]:
        """Who has something to say now."""
        return self._poll.poll(0)

    def wait(self, until: float) -> list[tuple[int, int]]:
        """Who has something to say, as soon as somebody has; nobody at that time."""
        now = time.monotonic()
        wait_ms = None if until == float("inf") else max(0.0, until - now) * 1000
        ready = self._look_a_while() or self._poll.poll(wait_ms)
        self._quick = time.monotonic() - now < SPIN_S
        return ready

    def _look_a_while(self) -> list[tuple[int, int]]:
        """What has come within a moment, if the last wait was as short.

        Others who want this processor get it between two looks; where that cannot be had, there is one look.
        """
        if self._quick:
            end = time.monotonic() + SPIN_S
            while time.monotonic() < end:
                ready = self._poll.poll(0)
                if ready:
                    return ready
                try:
                    os.sched_yield()
                except OSError:  # a sandbox may refuse it
                    break
        return []

    def close(self) -> None:
        """Nobody is heard any more: other files will have these numbers."""
        self._poll = select.poll()
        bell, self.bell = self.bell, -1
        if bell >= 0:
            os.close(bell)
