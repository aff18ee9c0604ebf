"""Autoscale: how many workers should be at work. Plain arithmetic, no clock: the caller says what time it is.

Three numbers limit how many, and the smallest counts. The *wish* is num_workers; with "auto" a search looks for it. The
*room* is what fits into memory, as the host says. The *berths* are the processes that the system let us start.

The search looks for the best number while the trainer waits for batches; if the trainer does not wait, there is nothing
to gain. It tries another number and measures it. More workers are kept if they bring more batches, fewer workers if
they bring as many. At first the search doubles the number, as long as each doubling brings a third of what it could:
samples that wait for a disk or a network may need many more workers than there are processors. Then it tries a quarter
fewer and a quarter more in turn, with rests that grow each time. So tries cost little, and changes are still noticed.

Two things make measuring hard. Batches come in order, so a whole round may come at once: all batches that the workers
have places for. So the search counts whole rounds only, and leaves out what was on its way when the number changed.
Other programs use the machine as well. So a try ends as soon as its outcome is plain, or after it was measured for long
enough.
"""

from dataclasses import dataclass

from holdfast.core.messages import Allowed

# Places of each worker: torch's default for prefetch_factor. So many batches of each worker make a round.
PLACES = 2
# Seconds, batches and rounds that tell 5 % from chance. A quarter of them shows what is plain.
ENOUGH_S, ENOUGH_BATCHES, ENOUGH_ROUNDS = 2.0, 16, 2
HINT = 0.25
# What is plain: this far from the gain that is needed once enough was measured, twice as far with half of that.
PLAIN = 0.1
# The present number is measured for this many times as long; not for ever, since conditions change.
LONG = 4.0
# How long workers usually take to start, at least and at most. A try that is slower than before by the factor SLOW,
# while old batches are still on their way, is too slow.
SETTLE_S, PATIENCE_S = 0.25, 3.0
SLOW = 1.6
# Below this share of waiting there is nothing to gain.
WAITS = 0.05
# The gain that more workers must bring to be kept, and fewer workers; and the share of the possible gain that is a
# reason to double the number again.
WORTH, AS_GOOD, STEEP = 1.05, 0.98, 0.3
# After a try: rest this many times as long as the try took, and twice as many times after the next. In seconds: at
# least and at most.
REST = 4.0
LEAST_REST_S, LONGEST_REST_S = 5.0, 300.0
# A process that was refused is asked for again after this time, and after twice the time if it is refused again.
AGAIN_S = 10.0


class Autoscale:
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
        # Nothing changes by itself: `look` has nothing to look for. An attribute, since the way of a batch asks.
        self.steady = not self._adapt

    @property
    def allowed(self) -> Allowed:
        return Allowed(max(1, min(self._wish, self._room, self._berths)), self._paused)

    @property
    def wish(self) -> int:
        """What the search has found: a later epoch begins with it."""
        return self._wish

    def room(self, workers: int, paused: bool) -> None:
        """The host says what fits into memory."""
        self._room, self._paused = workers, paused

    def refused(self, present: int, at: float) -> None:
        """The system refused a process; `present` workers are there."""
        self._berths, self.steady = max(1, present), False
        self._again_at = at + self._again_s
        self._again_s *= 2

    def rest(self) -> None:
        """Call this between two epochs: what is measured over the gap says nothing."""
        self._search.rest()

    def look(self, at: float, batches: int, waited_s: float) -> None:
        """`at`: the time. `batches`, `waited_s`: the totals so far, of batches and of the trainer's waiting."""
        if self._berths < self._most and at >= self._again_at:
            self._berths, self.steady = self._most, not self._adapt
        if self._adapt:
            able = max(1, min(self._most, self._room, self._berths))
            now = min(self._wish, able)
            found = self._search.look(at, batches, waited_s, now, able)
            if found != now:  # if not, the wish stays as it is, for when there is room again
                self._wish = found


@dataclass(frozen=True, slots=True)
class Before:
    """The state when a try began."""

    workers: int
    rate: float
    at: float


class Search:
    """See the module. It measures the present number of workers, or, during a try, another one."""

    def __init__(self, start: int) -> None:
        self._now = start
        self._since: tuple[float, int, float] | None = None  # when this measurement began, and the totals then
        self._settling = start  # batches that must pass before the number shows: all workers start at first
        self._counted = 0  # batches of this measurement, in whole rounds
        self._before: Before | None = None  # set during a try
        self._up = True  # where the next try goes
        self._leap = True  # double the number; if not, a quarter more or fewer
        self._rest = REST
        self._rest_until = 0.0

    def rest(self) -> None:
        """Forget this measurement, and the try."""
        self._since = self._before = None
        self._settling = max(self._now, self._settling)

    def look(self, at: float, batches: int, waited_s: float, now: int, most: int) -> int:
        """How many workers there should be from now on. `now`: how many there are."""
        if now != self._now:  # memory or the system has changed it
            self._before = None
            self._change(now)
        if self._since is None:
            self._begin(at, batches, waited_s)
            return now
        began, had, had_waited = self._since
        seconds, done = at - began, batches - had
        if self._settling:
            if seconds >= SETTLE_S and done >= self._settling:
                self._settling = 0
                self._begin(at, batches, waited_s)
            elif self._before is not None and seconds > self._patience_s(self._before):
                return self._take_back(at, self._before)
            return now
        counted = done - done % (PLACES * now)
        if counted == self._counted:
            return now  # in the middle of a round
        self._counted = counted
        rate, waits = counted / seconds, (waited_s - had_waited) / seconds
        sure = min(seconds / ENOUGH_S, counted / ENOUGH_BATCHES, counted / (ENOUGH_ROUNDS * PLACES * now))
        if self._before is not None:
            return self._judge(at, self._before, rate, sure, most)
        if sure >= (HINT if self._leap else 1) and waits >= WAITS and at >= self._rest_until:
            return self._try(at, rate, most)
        if sure >= LONG:
            self._begin(at, batches, waited_s)
        return now

    def _begin(self, at: float, batches: int, waited_s: float) -> None:
        self._since, self._counted = (at, batches, waited_s), 0

    def _patience_s(self, before: Before) -> float:
        return max(PATIENCE_S, SLOW * self._settling / before.rate)

    def _judge(self, at: float, before: Before, rate: float, sure: float, most: int) -> int:
        """Was it right to try this number?"""
        gain, share = rate / before.rate, self._now / before.workers
        needed = WORTH if share > 1 else AS_GOOD
        if sure < HINT or (sure < 1 and abs(gain - needed) * sure < PLAIN):
            return self._now
        if gain < needed:
            return self._take_back(at, before)
        self._before = None
        if share > 1:
            steep = gain - 1 >= STEEP * (share - 1)
            if steep and self._leap:
                self._rest = REST  # this is no chance: the work has changed
            self._up = steep or not self._leap  # a doubling that brought little perhaps went too far
            self._leap = steep
        if self._now == (most if self._up else 1):
            self._rest_from(at, before)
            return self._now
        return self._try(at, max(rate, before.rate), most)

    def _try(self, at: float, rate: float, most: int) -> int:
        now = self._now
        if now == (most if self._up else 1):
            self._up, self._leap = not self._up, False
        step = now if self._leap else max(1, now // 4)
        to = min(most, now + step) if self._up else max(1, now - step)
        if to == now:
            return now
        self._before = Before(now, rate, at)
        return self._change(to)

    def _take_back(self, at: float, before: Before) -> int:
        if self._leap:
            self._leap = False  # at once, a smaller step the other way
        else:
            self._rest_from(at, before)
        self._before = None
        self._up = self._now < before.workers
        return self._change(before.workers)

    def _rest_from(self, at: float, before: Before) -> None:
        self._rest_until = at + min(LONGEST_REST_S, max(LEAST_REST_S, self._rest * (at - before.at)))
        self._rest *= 2

    def _change(self, to: int) -> int:
        self._settling = PLACES * max(self._now, to)
        self._since, self._now = None, to
        return to
