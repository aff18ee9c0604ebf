"""Crew: how many workers there shall be at work. Plain arithmetic, no clock: who asks says what time it is.

Three say how many: the *wish* (num_workers; with "auto" it is looked for, see below), the *room* (what fits into
memory, told by the host), and the *berths* (what the system let us start). The least of them counts.

Looking for the best number, with "auto": while the trainer waits for batches, more workers are tried; if the next
stretch brought more batches per second, that was right, and still more are tried; if not, the number before is taken
again and kept for a while, longer each time. Where the trainer does not wait there is nothing to gain. At first each
step doubles what there is, since samples that wait for a disk or a network may need many more workers than processors;
steps become smaller when one was too large.
"""

from holdfast.core.messages import Allowed

# A stretch must be long enough to tell 5 % from chance.
STRETCH_S = 0.5
STRETCH_BATCHES = 16
# Workers that come up or go need this long to be counted.
SETTLE_S = 0.25
# Below this share of waiting there is nothing to gain by more workers.
WAITS = 0.05
# What more workers must bring to be kept.
WORTH = 1.05
# After a try that brought nothing: how long the next one is put off; twice as long each time.
REST_S = 5.0
LONGEST_REST_S = 300.0
# A refused process is asked for again after this; twice as long each time.
AGAIN_S = 10.0


class Crew:
    """`most`: how many there may ever be. `adapt`: look for the best number, from `start` on."""

    def __init__(self, most: int, start: int, adapt: bool) -> None:
        self._most = most
        self._adapt = adapt and most > 1
        self._wish = start if self._adapt else most
        self._room = most
        self._paused = False
        self._berths = most
        self._again_at = 0.0
        self._again_s = AGAIN_S
        self._search = Search(self._wish)

    @property
    def allowed(self) -> Allowed:
        return Allowed(max(1, min(self._wish, self._room, self._berths)), self._paused)

    @property
    def wish(self) -> int:
        """What the search has come to: a later epoch begins with it."""
        return self._wish

    def room(self, workers: int, paused: bool) -> None:
        """The host says what fits into memory."""
        self._room, self._paused = workers, paused

    def refused(self, present: int, at: float) -> None:
        """The system refused a process; `present` are there."""
        self._berths = max(1, present)
        self._again_at = at + self._again_s
        self._again_s *= 2

    def rest(self) -> None:
        """Between two epochs: what was measured over the gap would say nothing."""
        self._search.rest()

    def look(self, at: float, batches: int, waited_s: float) -> None:
        """Which moment it is, and the totals so far of batches and of the trainer's waiting."""
        if self._berths < self._most and at >= self._again_at:
            self._berths = self._most
        if self._adapt:
            able = min(self._most, self._room, self._berths)
            self._wish = self._search.look(at, batches, waited_s, min(self._wish, able), able)


class Search:
    """Hill climbing, see the module."""

    def __init__(self, start: int) -> None:
        self._since: tuple[float, int, float] | None = None
        self._settling = False  # the stretch in which workers come up or go says nothing
        self._before: tuple[int, float] | None = None  # (workers, batches per second) of the stretch before a try
        self._step = max(1, start)
        self._rest_until = 0.0
        self._rest_s = REST_S

    def rest(self) -> None:
        """Forget the stretch at hand."""
        self._since = self._before = None

    def look(self, at: float, batches: int, waited_s: float, now: int, most: int) -> int:
        """How many it shall be from now on; `now` there are."""
        if self._since is None:
            self._since = (at, batches, waited_s)
            return now
        began, had, had_waited = self._since
        seconds, done = at - began, batches - had
        if self._settling and seconds >= SETTLE_S:
            self._settling = False
            self._since = (at, batches, waited_s)
            return now
        if self._settling or seconds < STRETCH_S or (done < STRETCH_BATCHES and seconds < 10 * STRETCH_S):
            return now
        self._since = (at, batches, waited_s)
        rate, waits = done / seconds, (waited_s - had_waited) / seconds
        if self._before is not None:
            workers, was = self._before
            self._before = None
            if rate < WORTH * was:
                return self._take_back(at, workers)
            self._rest_s = REST_S
            self._step = max(1, now)
        if waits < WAITS or now >= most or at < self._rest_until:
            return now
        self._before = (now, rate)
        self._settling = True
        return min(most, now + self._step)

    def _take_back(self, at: float, workers: int) -> int:
        self._settling = True
        if self._step > 1:
            self._step = max(1, self._step // 2)  # fewer more, at once
        else:
            self._rest_until = at + self._rest_s
            self._rest_s = min(LONGEST_REST_S, 2 * self._rest_s)
        return workers
