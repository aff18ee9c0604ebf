"""Who waits for whom? Asked of a loader's totals, not of an incident."""

from holdfast.diagnose.finding import Finding
from holdfast.diagnose.stats import LoaderStats

# Below this nothing can be said: the first batches always wait.
_LEAST_S = 2.0
_WAITS = 0.2
_NEVER_WAITS = 0.02


def of_stats(stats: LoaderStats) -> list[Finding]:
    """What the totals show. Where the device itself told how long it waited, that counts: next() may wait while the
    device is busy.
    """
    found = []
    workers, cpus, ran, waited = stats.workers, stats.cpus, stats.ran_s, stats.waited_s
    if cpus and workers > cpus:
        found.append(
            Finding(
                "too-many-workers",
                f"{workers} workers share {cpus} processors",
                (f"this process may run on {cpus} processors",),
                f"num_workers={cpus}, unless the samples mostly wait for a disk or a network",
                "possible",
            )
        )
    who = "next()"
    if stats.device_ran_s is not None and stats.device_waited_s is not None:
        who, ran, waited = "the device", stats.device_ran_s, stats.device_waited_s
    if ran < _LEAST_S or not workers:
        return found
    share = waited / ran
    seen = (f"{who} waited {waited:.1f} of {ran:.1f} s ({share:.0%})",)
    if share > _WAITS:
        more = f"num_workers={cpus}" if cpus > workers else "cheaper samples (smaller, decoded before, cached)"
        found.append(Finding("loader-slow", "the trainer waits for batches", seen, more, "likely"))
    elif share < _NEVER_WAITS:
        found.append(
            Finding(
                "trainer-slow",
                "batches wait for the trainer: the loader is fast enough",
                seen,
                "nothing; fewer workers might do, and take less memory",
                "likely",
            )
        )
    return found
