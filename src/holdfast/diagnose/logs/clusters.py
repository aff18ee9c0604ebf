"""What the launchers of ranks say: torch.multiprocessing.spawn, torchrun (elastic), gloo and NCCL."""

from holdfast.diagnose.logs import Clue, Family

_NOTEBOOK = (
    "a rank that dies while it starts leaves no traceback: in a notebook the function lives in __main__ and cannot be "
    "imported; put it into a module. Also look for exit() or sys.exit() at the end of the function"
)
_FIRST = (
    "find the first death by time: the launcher's 'root cause' is the first it looked at. The others only report "
    "broken connections or were stopped by the launcher"
)
_CRASH = "run with PYTHONFAULTHANDLER=1 to see the Python line of the rank that crashed"
_OOM = "dmesg -T | grep -i oom, the scheduler's log; fewer ranks or workers per machine if it was memory"

# How a launcher says that signal N ended a rank: spawn, torchrun (twice), subprocess, deepspeed.
_ENDED = (
    r"process (?P<rank>\d+) terminated with signal {name}\b|exitcode\s*: -{number}\b|"
    r"Signal {number} \({name}\) received by PID|died with <Signals\.{name}\b|exits with return code = -{number}\b"
)


def _ended(name: str, signal: str, number: int, says: str, advice: str) -> Clue:
    return Clue(name=name, pattern=_ENDED.format(name=signal, number=number), says=says, advice=advice)


DISTRIBUTED = Family(
    "torchrun, torch.multiprocessing.spawn, gloo and NCCL",
    (
        _ended(
            "worker-killed", "SIGKILL", 9, "a rank was ended by SIGKILL; the kernel for memory is the usual one", _OOM
        ),
        _ended("worker-segfault", "SIGSEGV", 11, "a rank crashed in native code (SIGSEGV)", _CRASH),
        _ended("worker-aborted", "SIGABRT", 6, "a native library in a rank gave up (SIGABRT)", _CRASH),
        _ended("worker-bus-error", "SIGBUS", 7, "a rank died of SIGBUS, most often a full /dev/shm", "df -h /dev/shm"),
        _ended("worker-illegal-instruction", "SIGILL", 4, "a rank met an instruction this processor lacks", _CRASH),
        _ended("worker-terminated", "SIGTERM", 15, "a rank was sent SIGTERM: by the launcher or a scheduler", _FIRST),
        Clue(
            name="interrupted",
            pattern=r"SignalException: Process \d+ got signal: 1\b|Received 1 death signal",
            says="torchrun got SIGHUP: the terminal it belonged to was closed (nohup does not help: torchrun listens)",
            advice="start it in tmux or screen, with setsid, or from a scheduler",
        ),
        Clue(
            name="interrupted",
            pattern=r"SignalException: Process \d+ got signal: 2\b|Received 2 death signal",
            says="torchrun got SIGINT: somebody pressed Ctrl-C",
            advice="nothing, if that was you",
        ),
        Clue(
            name="terminated-by-scheduler",
            pattern=r"SignalException: Process \d+ got signal: (?P<signal>\d+)|Received \d+ death signal",
            says="torchrun itself was told to stop by a signal (15 is SIGTERM): a scheduler, or a person",
            advice="look at the scheduler's log: time limit, pre-emption, cancellation",
        ),
        Clue(
            name="rank-failed-first",
            pattern=r"process (?P<rank>\d+) terminated with exit code (?P<code>\d+)",
            says="rank {rank} ended with status {code} without a traceback",
            advice=_NOTEBOOK,
        ),
        Clue(
            name="rank-failed-first",
            pattern=r"-- Process (?P<rank>\d+) terminated with the following error:",
            says="rank {rank} raised; its own traceback follows",
            advice="read the traceback below that line; " + _FIRST,
        ),
        Clue(
            name="rank-failed-first",
            pattern=r"Root Cause \(first observed failure\)|\bexitcode\s*: [1-9]\d*\b",
            says="torchrun saw one rank fail first and stopped the rest",
            advice=_FIRST,
            confidence="likely",
        ),
        Clue(
            name="rank-failed-first",
            pattern=r"gloo\S*\] Connection closed by peer|gloo\S*\] Read error .*Connection reset by peer"
            r"|NCCL WARN .*Connection closed by remote peer|\bncclRemoteError: "
            r"|Did the remote server shutdown or crash\?",
            says="this rank lost the connection to another one, which had died or left",
            advice=_FIRST,
            confidence="likely",
        ),
        Clue(
            name="rank-failed-first",
            pattern=r"Watchdog caught collective operation timeout",
            says="this rank waited in a collective for one that never came: dead, or far behind in its data",
            advice="look at what the missing rank did at that time; " + _FIRST,
            confidence="possible",
        ),
        Clue(
            name="rank-failed-first",
            pattern=r"Sending process \d+ closing signal SIG\w+|Closing process \d+ via signal SIG\w+",
            says="the launcher stopped the other ranks",
            advice=_FIRST,
            supports=True,
        ),
    ),
)


# What Ray says of its workers and nodes.


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


# What Spark, Py4J and the JVM say around a Python job.


_WHO_INTERRUPTED = (
    "look in the driver's log, just before that time, for the reason: 'Cancelling stage', 'another attempt succeeded' "
    "(spark.speculation=false), a failed stage, a lost executor, pre-emption, a timeout (spark.network.timeout, "
    "spark.task.reaper). Save and resume, so that a cancelled attempt costs little"
)
_PYTHON_DIED = (
    "look at the executor's stderr for what Python said last: memory (raise spark.executor.memoryOverhead), a crash in "
    "native code (spark.python.worker.faulthandler.enabled=true), sys.exit, or two different Python versions"
)
_LIMIT = (
    "unset spark.executor.pyspark.memory and use spark.executor.memoryOverhead; RLIMIT_AS counts address space, and "
    "torch takes gigabytes of it at import without using them"
)

SPARK = Family(
    "Spark, PySpark and Py4J",
    (
        Clue(
            name="jvm-interrupted",
            pattern=r"\bjava\.lang\.InterruptedException\b|\bClosedByInterruptException\b|\bTaskKilledException\b",
            says="the JVM interrupted its own task thread: the task was cancelled, its stage failed, a timeout ran "
            "out, its executor went, or it was pre-empted. Python raised nothing like it: this follows, it is not why",
            advice=_WHO_INTERRUPTED,
        ),
        Clue(
            name="jvm-interrupted",
            pattern=r"\bTaskKilled \((?P<why>[^)]+)\)",
            says="Spark killed the task: {why}",
            advice=_WHO_INTERRUPTED,
        ),
        Clue(
            name="jvm-interrupted",
            pattern=r"Executor is trying to kill task .*reason: |Stage \d+ was cancelled|Cancelling stage \d+",
            says="Spark stopped the task on purpose",
            advice=_WHO_INTERRUPTED,
            supports=True,
        ),
        Clue(
            name="spark-python-worker-lost",
            pattern=r"Python worker exited unexpectedly \(crashed\)",
            says="the Python process of a Spark task died, and the JVM noticed the end of its socket",
            advice=_PYTHON_DIED,
        ),
        Clue(
            name="spark-python-worker-lost",
            pattern=r"Python worker failed to connect back",
            says="the Python process of a Spark task never came up",
            advice="PYSPARK_PYTHON must name a Python that works on every node, of the driver's version; then the "
            "executor's stderr",
        ),
        Clue(
            name="spark-python-worker-lost",
            pattern=r"Caused by: java\.io\.EOFException",
            says="the JVM met the end of the socket to Python",
            advice=_PYTHON_DIED,
            supports=True,
        ),
        Clue(
            name="executor-lost",
            pattern=r"\bExecutorLostFailure\b|(?:ERROR|WARN) \S*(?:Scheduler\w*|Backend\w*): Lost executor",
            says="a Spark executor went away, and its tasks with it",
            advice="the reason stands behind 'Reason:' or in the resource manager's log: memory (memoryOverhead), "
            "pre-emption, a lost node. Barrier stages are not retried task by task: save and resume",
        ),
        Clue(
            name="executor-lost",
            pattern=r"Executor heartbeat timed out after (?P<ms>\d+) ms",
            says="a Spark executor did not answer for {ms} ms and was given up: long garbage collection, or dead",
            advice="look at the executor's own log at that time; spark.network.timeout if it was only slow",
        ),
        Clue(
            name="address-space-limited",
            pattern=r"(?:^|[\s.])(?:_Array)?MemoryError\b",
            above=r"spark\.executor\.pyspark\.memory|PYSPARK_EXECUTOR_MEMORY_MB",
            says="spark.executor.pyspark.memory is set: it limits address space (RLIMIT_AS), not memory in use",
            advice=_LIMIT,
            confidence="likely",
        ),
        Clue(
            name="address-space-limited",
            pattern=r"(?:^|[\s.])(?:_Array)?MemoryError\b",
            above=r"pyspark(?:\.zip)?/pyspark/worker\.py|PythonException: Traceback|pyspark/worker\.py",
            says="Python got no memory inside a Spark task; if spark.executor.pyspark.memory is set, that is why",
            advice=_LIMIT,
            confidence="possible",
        ),
        Clue(
            name="address-space-limited",
            pattern=r"ValueError: not allowed to raise maximum limit",
            above=r"RLIMIT_AS",
            says="address space is already limited (RLIMIT_AS) and cannot be raised again",
            advice=_LIMIT,
        ),
        Clue(
            name="jvm-raised",
            pattern=r"java\.lang\.OutOfMemoryError: (?:Java heap space|GC overhead limit exceeded)",
            says="the JVM's own heap is full; Python's memory is another matter",
            advice="spark.driver.memory or spark.executor.memory; collect() less to the driver",
        ),
        Clue(
            name="jvm-raised",
            pattern=r"\bPy4JJavaError: An error occurred while calling\b|\bPy4JNetworkError\b",
            says="a call into the JVM failed; the reason is the last 'Caused by:' below",
            advice="read the last 'Caused by:' of the Java traceback, and the executor's log",
            confidence="possible",
        ),
    ),
)
