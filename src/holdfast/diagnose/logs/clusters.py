"""What clusters write. Schedulers: Slurm, LSF, PBS; containers: Kubernetes, YARN, systemd; and Ray and Spark."""

from holdfast.diagnose.logs import Clue, Family

_LESS_MEMORY = "fewer workers, a smaller prefetch_factor or batch; or ask the scheduler for more memory"
_RESUME = (
    "ask for more time, and save a checkpoint when the warning comes: with Holdfast the workers go on after SIGTERM, "
    "so a handler of the trainer can still save"
)
_EXIT = (
    r"\b(?:exit(?:ed)?(?: (?:with|with a non-zero|is))*[ _]?(?:status|code)|status code|[Ee]xit ?Code\"?)(?: is)?[:= ]*"
)

SLURM = Family(
    "Slurm, LSF and PBS",
    (
        Clue(
            name="worker-oom-killed",
            pattern=r"slurmstepd: error: Detected [1-9]\d* oom[-_]kill event",
            says="the kernel killed a process of this Slurm step: the job reached the memory it had asked for",
            advice=_LESS_MEMORY + " (--mem, --mem-per-cpu)",
        ),
        Clue(
            name="worker-oom-killed",
            pattern=r"srun: error: \S+ task \S+: Out Of Memory",
            says="Slurm reports a task that ran out of the job's memory",
            advice=_LESS_MEMORY + " (--mem, --mem-per-cpu)",
        ),
        Clue(
            name="job-over-memory",
            pattern=r"[Ee]xceeded (?:job|step) memory limit at some point",
            says="the job touched its memory limit; that alone need not have killed it (files being written count too)",
            advice=_LESS_MEMORY + " (--mem, --mem-per-cpu)",
            confidence="possible",
        ),
        Clue(
            name="job-over-memory",
            pattern=r"[Ee]xceeded (?:job|step) memory limit|exceeded memory limit \(\d+ > \d+\), being killed",
            says="Slurm itself killed the job: it measured more memory than was asked for",
            advice=_LESS_MEMORY + " (--mem, --mem-per-cpu)",
        ),
        Clue(
            name="terminated-by-scheduler",
            pattern=r"CANCELLED AT (?P<when>\S+) DUE TO TIME LIMIT",
            says="Slurm ended the job at {when}: its time was over",
            advice=_RESUME + "; #SBATCH --signal=B:TERM@120 gives two minutes of warning",
        ),
        Clue(
            name="terminated-by-scheduler",
            pattern=r"CANCELLED AT (?P<when>\S+) DUE TO (?P<why>PREEMPTION|NODE FAILURE|[A-Z ]+?) \*\*\*",
            says="Slurm ended the job at {when}: {why}",
            advice=_RESUME,
        ),
        Clue(
            name="terminated-by-scheduler",
            pattern=r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT (?P<when>\S+)",
            says="the Slurm job or step was cancelled at {when}: by scancel, or because another task of it failed",
            advice="look at the lines before: srun cancels the rest of a step when one task fails (--kill-on-bad-exit)",
        ),
        Clue(
            name="worker-killed",
            pattern=r"srun: error: \S+ tasks? \S+: Killed",
            says="a task of the Slurm step was ended by SIGKILL",
            advice="sacct -j JOB --format=State,ExitCode,MaxRSS says whether it was memory",
        ),
        Clue(
            name="worker-segfault",
            pattern=r"srun: error: \S+ tasks? \S+: Segmentation fault",
            says="a task of the Slurm step crashed in native code (SIGSEGV)",
            advice="run it with PYTHONFAULTHANDLER=1 to see the Python line",
        ),
        Clue(
            name="job-over-memory",
            pattern=r"TERM_MEMLIMIT: job killed",
            says="LSF killed the job for its memory",
            advice=_LESS_MEMORY + " (-M, rusage[mem=...])",
        ),
        Clue(
            name="terminated-by-scheduler",
            pattern=r"TERM_RUNLIMIT: job killed|PBS: job killed: walltime \d+ exceeded limit \d+",
            says="the scheduler ended the job: its time was over",
            advice=_RESUME,
        ),
    ),
)

CONTAINERS = Family(
    "Kubernetes, Docker, systemd and YARN",
    (
        Clue(
            name="worker-oom-killed",
            pattern=r"\bOOMKilled\b(?!\"?\s*[:=]\s*(?:false|0\b|\"?false))",
            says="the container reached its memory limit and the kernel killed a process in it",
            advice=_LESS_MEMORY + " (resources.limits.memory). /dev/shm of type Memory counts towards the limit",
        ),
        Clue(
            name="node-evicted",
            pattern=r"The node was low on resource: (?P<what>[\w-]+)",
            says="Kubernetes evicted the pod: its node ran short of {what}",
            advice="set requests for {what}; keep caches and checkpoints on a volume, not in the container",
        ),
        Clue(
            name="node-evicted",
            pattern=r"(?:ephemeral local storage usage|Usage of EmptyDir volume \S+) exceeds the (?:total )?limit",
            says="Kubernetes evicted the pod: it wrote more into its local storage than it may",
            advice="raise the limit of ephemeral-storage or sizeLimit, and keep caches on a volume",
        ),
        Clue(
            name="node-evicted",
            pattern=r"\b[Rr]eason\"?:\s+\"?Evicted\b|The node had condition: \[(?:Disk|Memory|PID)Pressure\]",
            says="Kubernetes evicted the pod from its node",
            advice="kubectl describe pod says which resource ran short; requests close to what is used protect a pod",
        ),
        Clue(
            name="terminated-by-scheduler",
            pattern=r"imminent node shutdown|\b[Rr]eason\"?:\s+\"?Preempt(?:ed|ing)\b|Preempted by (?:a )?pod",
            says="the cluster took the node or the place of this pod away",
            advice=_RESUME,
        ),
        Clue(
            name="job-over-memory",
            pattern=r"Container killed by YARN for exceeding (?:\w+ )?memory limits",
            says="YARN killed the container: Java and Python together used more than it had asked for",
            advice="raise spark.executor.memoryOverhead (Python's memory is in it, not in spark.executor.memory), or "
            "run fewer tasks per executor (spark.executor.cores). If it says virtual memory: "
            "yarn.nodemanager.vmem-check-enabled=false",
        ),
        Clue(
            name="job-over-memory",
            pattern=r"is running (?:\S+ )?beyond (?:the )?'?(?:physical|virtual|PHYSICAL|VIRTUAL)'? memory limit",
            says="YARN's node manager found the container over its memory limit and killed it",
            advice="raise spark.executor.memoryOverhead, or run fewer tasks per executor",
        ),
        Clue(
            name="worker-oom-killed",
            pattern=r"Failed with result 'oom-kill'",
            says="systemd reports that the kernel killed a process of the unit for memory",
            advice=_LESS_MEMORY + " (MemoryMax= of the unit)",
        ),
        Clue(
            name="worker-killed",
            pattern=r"Main process exited, code=killed, status=9/KILL",
            says="systemd reports that the main process was ended by SIGKILL",
            advice="journalctl -k | grep -i oom; else TimeoutStopSec= ran out after SIGTERM",
        ),
        Clue(
            name="worker-killed",
            pattern=_EXIT + r"137\b",
            says="a process or container ended with 137, that is 128 + 9: SIGKILL",
            advice="most often memory: look at dmesg, `kubectl describe pod` (OOMKilled) or the scheduler's log; else "
            "somebody's patience after SIGTERM was over",
        ),
        Clue(
            name="terminated-by-scheduler",
            pattern=_EXIT + r"143\b|Container killed on request\. Exit code is 143",
            says="a process or container ended with 143, that is 128 + 15: it was asked to stop (SIGTERM)",
            advice="look for who stopped it: the resource manager's log; pre-emption, a time limit, a lost driver, or "
            "a container over its memory",
            confidence="likely",
        ),
        Clue(
            name="worker-segfault",
            pattern=_EXIT + r"139\b",
            says="a process ended with 139, that is 128 + 11: SIGSEGV, a crash in native code",
            advice="run it with PYTHONFAULTHANDLER=1 to see the Python line",
        ),
        Clue(
            name="worker-aborted",
            pattern=_EXIT + r"134\b",
            says="a process ended with 134, that is 128 + 6: SIGABRT, a native library gave up",
            advice="the library usually says why in the lines before",
        ),
        Clue(
            name="terminated-by-scheduler",
            pattern=r"^[ \t]*Killed by external signal",
            says="the container was ended by a signal from outside",
            advice="look at the node manager's log for the reason",
            supports=True,
        ),
    ),
)


# What Ray says of its workers and nodes.


_LESS_OF_RAY = (
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
            advice=_LESS_OF_RAY,
        ),
        Clue(
            name="job-over-memory",
            pattern=r"\b(?P<count>[1-9]\d*) Workers \(tasks / actors\) killed due to memory pressure",
            says="Ray's memory monitor killed {count} workers of this node",
            advice=_LESS_OF_RAY,
        ),
        Clue(
            name="job-over-memory",
            pattern=r"RayOutOfMemoryError: More than (?P<percent>\d+)% of the memory on node",
            says="more than {percent} % of the node's memory was used, and Ray refused to go on",
            advice=_LESS_OF_RAY,
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
            pattern=r"\bjava\.lang\.InterruptedException\b|\b[Jj]ava [Ii]nterrupted ?[Ee]xception\b|"
            r"\bClosedByInterruptException\b|\bTaskKilledException\b",
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
