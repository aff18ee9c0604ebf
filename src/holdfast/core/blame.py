"""Is this sample guilty, or was it only unlucky?

A crash (SIGSEGV, an exit, our deadline) is the doing of what was running. A SIGKILL or SIGTERM may be: a sample that
makes the kernel kill its worker looks just like a scheduler that kills workers at random. So such a death counts only
as far as chance does not explain it.

If the kills are random, each of the `deaths` seen so far fell somewhere into the time that all workers together have
lived. The chance that one of them fell on this sample is its share of that time: the seconds it was being loaded
whenever it was hit. At least `hits` of `deaths` falling there by chance is then a binomial tail. A poison sample dies
again within milliseconds of a life that lasts longer than that, so its tail shrinks with each strike; an innocent one
gets through sooner or later, and is cleared.
"""

import math

# An innocent sample may be blamed less than once in a million.
CHANCE = 1e-6
# When the loader would otherwise give up, this much doubt is enough.
LAST_CHANCE = 1e-2
# Kills come in clusters and in rhythms, and a sample that was hit is tried again at once, so it may be in step with
# them: it is taken to be hit this many times as often as any other moment.
RHYTHM = 1.5


def tail(hits: int, deaths: int, share: float) -> float:
    """Chance of `hits` or more of `deaths` falling on a `share` of the time."""
    if hits <= 0 or share >= 1.0:
        return 1.0
    if share <= 0.0:
        return 0.0
    log_in, log_out = math.log(share), math.log1p(-share)
    total = 0.0
    for k in range(hits, deaths + 1):
        term = (
            math.lgamma(deaths + 1)
            - math.lgamma(k + 1)
            - math.lgamma(deaths - k + 1)
            + k * log_in
            + (deaths - k) * log_out
        )
        total += math.exp(term)
    return min(total, 1.0)


def luck(hits: int, deaths: int, exposed_s: float, lived_s: float) -> float:
    """The chance of `hits` on one sample, exposed for `exposed_s` of `lived_s`, by plain bad luck."""
    weight = RHYTHM * exposed_s
    rest = max(lived_s - exposed_s, 0.0)
    share = weight / (weight + rest) if weight + rest > 0 else 1.0
    return tail(hits, max(deaths, hits), share)
