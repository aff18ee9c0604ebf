"""What Ray says of its workers and nodes."""

from holdfast.diagnose.logs.clue import Clue, Family

_LESS_MEMORY = (
    "fewer tasks at once (num_cpus or memory per task), fewer loader workers per task, or a larger node; "
    "RAY_memory_usage_threshold moves the line, RAY_memory_monitor_refresh_ms=0 leaves it to the kernel"
)

RAY = Family(
    "Ray",
    (
        Clue(
            name="job-over-memory",
            pattern=r"OutOfMemoryError: Task was killed due to the node running low on memory",
            says="Ray's memory monitor killed the worker, before the kernel would have: the node was nearly full",
            advice=_LESS_MEMORY,
        ),
        Clue(
            name="job-over-memory",
            pattern=r"\b(?P<count>[1-9]\d*) Workers \(tasks / actors\) killed due to memory pressure",
            says="Ray's memory monitor killed {count} workers of this node",
            advice=_LESS_MEMORY,
        ),
        Clue(
            name="job-over-memory",
            pattern=r"RayOutOfMemoryError: More than (?P<percent>\d+)% of the memory on node",
            says="more than {percent} % of the node's memory was used, and Ray refused to go on",
            advice=_LESS_MEMORY,
        ),
        Clue(
            name="worker-terminated",
            pattern=r"[Ww]orker (?:died|exit|was killed)\b.*\bSIGTERM\b(?!.*SIGSEGV)",
            says="a Ray worker was sent SIGTERM: its node was drained, its job stopped, or its owner died",
            advice="ray logs raylet.out on that node, and the autoscaler's log",
        ),
        Clue(
            name="worker-exited",
            pattern=r"worker died or was killed while executing (?:a )?task"
            r"|Worker exit type: SYSTEM_ERROR|\bActorDiedError: |\bWorkerCrashedError: ",
            says="a Ray worker is gone; the causes Ray lists are guesses, the same three each time",
            advice="the dead worker's own file (ray logs worker-...err) and dmesg of that node",
            confidence="possible",
        ),
    ),
)
