"""What Spark, Py4J and the JVM say around a Python job."""

from holdfast.diagnose.logs.clue import Clue, Family

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
