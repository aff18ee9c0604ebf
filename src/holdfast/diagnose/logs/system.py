"""What the system's own error texts mean, wherever they stand. Asked last: others know their own lines better."""

from holdfast.diagnose.logs import Clue, Family

_PROCESSES = (
    "this is a limit of processes and threads, not of files: ulimit -u, the cgroup's pids.max, docker --pids-limit. "
    "Fewer workers, and OMP_NUM_THREADS=1 (OPENBLAS_NUM_THREADS=1) so that each starts no pool of threads"
)
_FILES = (
    "ulimit -n 65536; close what is opened in __getitem__ (Image.open keeps its file until it is loaded). Holdfast "
    "raises the limit, recycles a leaking worker and names the paths"
)
_MEMORY = "a smaller sample or batch, fewer workers; with Holdfast, Policy(worker_memory=...) names the sample"
_FORK = (
    "multiprocessing_context='forkserver' or 'spawn'; or start the workers before anything starts threads; "
    "cv2.setNumThreads(0), OMP_NUM_THREADS=1"
)
_PICKLE = (
    "under spawn and forkserver the dataset and its functions travel by pickle: define them at the top of a module, no "
    "lambdas, and open files, locks and connections in the worker. Holdfast ships functions with cloudpickle"
)

_OWN_HANDLE = (
    "open the file in each worker, at its first sample (holdfast.FileCache does). To see whether the file is well, "
    "read all of it in one process: h5dump FILE > /dev/null, or num_workers=0"
)

_POOL = (
    "look for that process's own last words, and in dmesg: memory, a crash in native code (PYTHONFAULTHANDLER=1), "
    "os._exit; or a main script without `if __name__ == '__main__':`. In a holdfast.Pool only the task that did it "
    "fails, and its error says why"
)

_LIMITS = (
    Clue(
        name="cannot-start-process",
        pattern=r"fork: (?:retry: )?Resource temporarily unavailable|pthread_create(?: failed[^:]*)?: Resource "
        r"temporarily|\bthread: Resource temporarily unavailable|can't start new thread|libgomp: Thread creation "
        r"failed|unable to create (?:new )?native thread",
        says="the system refused a new process or thread (EAGAIN)",
        advice=_PROCESSES,
    ),
    Clue(
        name="cannot-start-process",
        pattern=r"pthread_create failed[^:]*: Operation not permitted",
        says="the container runtime forbids what a new thread needs (EPERM from its seccomp profile)",
        advice="a newer docker or runc: old ones do not know clone3; --security-opt seccomp=unconfined shows whether "
        "that is it",
        confidence="likely",
    ),
    Clue(
        name="sample-raised",
        pattern=r"unable to lock file, errno = 11",
        says="HDF5 found its file locked by another process (EAGAIN here is the lock, not a limit)",
        advice="open it for reading only (mode 'r') in every process; HDF5_USE_FILE_LOCKING=FALSE if nobody writes",
    ),
    Clue(
        name="cannot-start-process",
        pattern=r"\[Errno 11\] Resource temporarily unavailable",
        above=r"os\.fork\(\)|\bfork\b|_launch|popen_|subprocess\.py|Popen|start_new_thread",
        says="the system refused a new process (EAGAIN from fork)",
        advice=_PROCESSES,
    ),
    Clue(
        name="cannot-start-process",
        pattern=r"\bResource temporarily unavailable\b",
        above=r"\A(?![\s\S]*unable to lock file, errno = 11,\s*\Z)",
        says="EAGAIN: most often a limit of processes or threads; never one of open files",
        advice=_PROCESSES + ". If it came from a socket or a locked file, it only means: try again",
        confidence="possible",
    ),
    Clue(
        name="descriptors-exhausted",
        pattern=r"\bToo many open files\b",
        says="no more files could be opened (EMFILE)",
        advice=_FILES,
    ),
    Clue(
        name="shm-too-small",
        pattern=r"\[Errno 28\] No space left on device",
        above=r"SemLock|synchronize\.py|shared_memory\.py",
        says="/dev/shm is full: a semaphore or shared block could not be made there",
        advice="docker run --shm-size=8g or --ipc=host; remove what dead processes left in /dev/shm",
    ),
    Clue(
        name="disk-full",
        pattern=r"\[Errno 28\]|: No space left on device",
        says="a disk is full (ENOSPC)",
        advice="df -h and df -i (files can run out before bytes), quota -s; /tmp and /dev/shm count too",
    ),
    Clue(
        name="quota-exceeded",
        pattern=r"\[Errno 122\]|Disk quota exceeded",
        says="the quota of this user, group or project is used up (EDQUOT)",
        advice="quota -s (Lustre: lfs quota -hu $USER PATH); bytes and files count; TMPDIR and caches elsewhere",
    ),
)

_DATA = (
    Clue(
        name="handle-shared-by-fork",
        pattern=r"\binflate\(\) failed",
        above=r"in DataLoader worker process|\bForkPoolWorker-\d|\bProcess-\d",
        says="HDF5 read compressed bytes that are not those that were written, in a worker: mostly a file that was "
        "opened before the workers were forked, else a damaged file",
        advice=_OWN_HANDLE,
        confidence="likely",
    ),
    Clue(
        name="handle-shared-by-fork",
        pattern=r"\binflate\(\) failed",
        says="HDF5 read compressed bytes that are not those that were written: the file is damaged or being written, "
        "or processes or threads share one open handle of it",
        advice=_OWN_HANDLE,
        confidence="possible",
    ),
    Clue(
        name="stale-file",
        pattern=r"\[Errno 116\]|Stale (?:NFS )?file handle",
        says="a file on a network file system was replaced or removed while it was open (ESTALE)",
        advice="open it again: retries help; do not rewrite data while it is being read",
    ),
    Clue(
        name="permission-denied",
        pattern=r"PermissionError: \[Errno (?:1|13)\]",
        says="the process may not open or write that path",
        advice="ls -ld on the path and its parents; in a container, the user it runs as",
    ),
    Clue(
        name="shm-removed",
        pattern=r"FileNotFoundError: \[Errno 2\] No such file or directory",
        above=r"_rebuild|SemLock|shared_memory\.py",
        says="a semaphore or shared block of another process was gone from /dev/shm before it was opened",
        advice="systemd removes them when the last session ends (RemoveIPC): loginctl enable-linger; or the "
        "process that made them has died",
        confidence="likely",
    ),
    Clue(
        name="file-missing",
        pattern=r"FileNotFoundError: \[Errno 2\] No such file or directory(?:: (?P<path>.+))?",
        says="a file is not there: {path}",
        advice="check the path as this machine sees it (mounts, working directory, upper and lower case, \\ for /)",
    ),
)

_MEMORIES = (
    Clue(
        name="gpu-memory-full",
        pattern=r"(?:torch\.cuda\.|torch\.)?OutOfMemoryError: CUDA out of memory|RuntimeError: CUDA out of memory",
        says="the GPU's memory is full; host memory and data loading have no part in it",
        advice="a smaller batch or model, gradient checkpointing; nvidia-smi shows who else uses the GPU",
    ),
    Clue(
        name="allocation-refused",
        pattern=r"DefaultCPUAllocator: (?:can't|not enough|cannot).*?allocate (?P<bytes>\d+) bytes",
        says="the system refused {bytes} bytes",
        advice=_MEMORY,
    ),
    Clue(
        name="allocation-refused",
        pattern=r"(?:^|[\s.])(?:_Array)?MemoryError\b(?!['\"`,)])|\[Errno 12\] Cannot allocate memory|std::bad_alloc",
        says="the system refused memory",
        advice=_MEMORY,
    ),
)

_PYTHON = (
    Clue(
        name="main-not-guarded",
        pattern=r"An attempt has been made to start a new process before the|finished its bootstrapping phase",
        says="the main script starts processes while a new process imports it (spawn or forkserver)",
        advice="put what the script does, not what it defines, under `if __name__ == '__main__':`",
    ),
    Clue(
        name="value-not-picklable",
        pattern=r"A task has failed to un-serialize",
        says="what was sent to a worker process could not be unpickled there",
        advice=_PICKLE,
    ),
    Clue(
        name="worker-killed",
        pattern=r"The exit codes of the workers are \{[^}]*SIGKILL",
        says="a worker process of joblib (loky) was ended by SIGKILL; the kernel for memory is the usual one",
        advice="dmesg -T | grep -i oom; fewer processes (n_jobs) if it was memory",
    ),
    Clue(
        name="worker-exited",
        pattern=r"\bBrokenProcessPool\b|[Pp]rocess (?:in the process pool was )?terminated abruptly|"
        r"\bTerminatedWorkerError\b",
        says="a process of the pool is gone, and so all its tasks fail; Python does not say which task it was, nor why",
        advice=_POOL,
        confidence="possible",
    ),
    Clue(
        name="value-not-picklable",
        pattern=r"Can't pickle (?:local object )?\S+|Can't get local object \S+|TypeError: cannot pickle \S+|"
        r"Can't get attribute '\S+' on <module '__main__'",
        says="something that must go to another process cannot be pickled",
        advice=_PICKLE,
    ),
    Clue(
        name="fork-after-threads",
        pattern=r"fork\(\) called from a process already using GNU OpenMP|may have been in progress in another thread "
        r"when fork\(\) was called",
        says="a process was forked while a library had threads, and that library gave up",
        advice=_FORK,
    ),
    Clue(
        name="fork-after-threads",
        pattern=r"is multi-threaded, use of fork\(\) may lead to deadlocks in the child"
        r"|Other threads are currently calling into gRPC, skipping fork",
        says="a process was forked while it had threads: the child may wait for ever on a lock nobody holds",
        advice="only a warning; if a worker hangs, this is the first suspect. " + _FORK,
        confidence="possible",
    ),
    Clue(
        name="worker-exited",
        pattern=r"^(?:\[rank\d+\]: )?EOFError|^(?:\[rank\d+\]: )?ConnectionResetError: \[Errno 104\]"
        r"|^(?:\[rank\d+\]: )?BrokenPipeError: \[Errno 32\]",
        above=r"multiprocessing/(?:connection|resource_sharer|reduction|managers|queues)\.py",
        says="the process at the other end of a pipe is gone: the visible side of a worker's death",
        advice="find that process's own last words, and dmesg",
        confidence="possible",
    ),
    Clue(
        name="interrupted",
        pattern=r"^(?:\[rank\d+\]: )?KeyboardInterrupt\b",
        says="somebody pressed Ctrl-C, or sent SIGINT",
        advice="nothing, if that was you; a batch system can send SIGINT too",
    ),
    Clue(
        name="worker-segfault",
        pattern=r"^Fatal Python error: Segmentation fault|^[ \t]*Segmentation fault(?: \(core dumped\))?\s*$",
        says="a process crashed in native code (SIGSEGV)",
        advice="PYTHONFAULTHANDLER=1 shows the Python line; the library called there is the suspect",
    ),
    Clue(
        name="worker-aborted",
        pattern=r"^Fatal Python error: Aborted|^[ \t]*Aborted \(core dumped\)\s*$|terminate called after throwing an "
        r"instance",
        says="a native library gave up (SIGABRT)",
        advice="it usually says why in the lines before or after",
    ),
    Clue(
        name="worker-bus-error",
        pattern=r"^Fatal Python error: Bus error|^[ \t]*Bus error(?: \(core dumped\))?\s*$",
        says="a process died of SIGBUS: a full /dev/shm, or a mapped file that was cut short",
        advice="df -h /dev/shm while it runs",
    ),
    Clue(
        name="worker-illegal-instruction",
        pattern=r"^Fatal Python error: Illegal instruction|^[ \t]*Illegal instruction(?: \(core dumped\))?\s*$",
        says="a process met an instruction this processor does not have (SIGILL)",
        advice="install a build made for this processor",
    ),
    Clue(
        name="worker-killed",
        pattern=r"^[ \t]*Killed\s*$|^\W*SIGKILL\W*$|\b[Ss]ignal:? (?:9\b|SIGKILL\b)|: line \d+:\s+\d+ Killed\b",
        says="a process was ended by SIGKILL (signal 9); most often the kernel did it for memory",
        advice="dmesg -T | grep -i oom; the scheduler's log",
    ),
)

SYSTEM = Family("Python and system errors (errno texts, the shell's last words)", _LIMITS + _DATA + _MEMORIES + _PYTHON)


# What the kernel writes (dmesg, journalctl -k) when it kills, refuses or waits.


_LESS_MEMORY = (
    "fewer workers, a smaller prefetch_factor or batch; or a higher memory limit of the job. With Holdfast, "
    "Policy(worker_memory=...) turns this into an error that names the sample and the line"
)

KERNEL = Family(
    "the kernel's log (dmesg)",
    (
        Clue(
            name="worker-oom-killed",
            pattern=r"Memory cgroup out of memory: Kill(?:ed)? process (?P<pid>\d+) \((?P<what>[^)]*)\)",
            says="the kernel killed process {pid} ({what}): the job or container reached its memory limit",
            advice=_LESS_MEMORY,
        ),
        Clue(
            name="worker-oom-killed",
            pattern=r"Out of memory: Kill(?:ed)? process (?P<pid>\d+) \((?P<what>[^)]*)\)",
            says="the kernel killed process {pid} ({what}): the whole machine ran out of memory",
            advice=_LESS_MEMORY,
        ),
        Clue(
            name="worker-oom-killed",
            pattern=r"\boom-kill:constraint=\S*|\binvoked oom-killer: ",
            says="the kernel's OOM killer was at work",
            advice=_LESS_MEMORY,
        ),
        Clue(
            name="cannot-start-process",
            pattern=r"cgroup: fork rejected by pids controller in (?P<where>\S+)",
            says="the kernel refused a fork: the cgroup {where} reached its pids.max",
            advice="raise the limit of processes (docker --pids-limit, Kubernetes podPidsLimit), or start fewer "
            "workers with fewer threads each (OMP_NUM_THREADS=1)",
        ),
        Clue(
            name="worker-segfault",
            pattern=r"(?P<what>\S+)\[(?P<pid>\d+)\]: segfault at \S+ ip \S+ sp \S+ error \d+"
            r"(?: in (?P<where>[^\s\[]+))?",
            says="process {pid} ({what}) touched memory that is not its own, in {where}",
            advice="the library named there crashed: update it, or find the sample that makes it crash "
            "(holdfast names the sample and the Python line)",
        ),
        Clue(
            name="worker-segfault",
            pattern=r"traps: (?P<what>\S+)\[(?P<pid>\d+)\] general protection",
            says="process {pid} ({what}) crashed in native code (general protection)",
            advice="update the library that crashed, or find the sample that makes it crash",
        ),
        Clue(
            name="worker-illegal-instruction",
            pattern=r"traps: (?P<what>\S+)\[(?P<pid>\d+)\] trap invalid opcode",
            says="process {pid} ({what}) met an instruction this processor does not have",
            advice="install a build made for this processor: wheels built for AVX2 or AVX-512 fail on older ones",
        ),
        Clue(
            name="hang-uninterruptible",
            pattern=r"INFO: task (?P<what>\S+):(?P<pid>\d+) blocked for more than (?P<seconds>\d+) seconds",
            says="process {pid} ({what}) waited in the kernel for more than {seconds} s; not even SIGKILL ends that",
            advice="look at the disk or network file system it waits on",
        ),
        Clue(
            name="hang-io",
            pattern=r"nfs: server (?P<where>\S+) not responding",
            says="the NFS server {where} does not answer: whoever reads from it waits",
            advice="look at the server; with Holdfast, sample_timeout names the sample and goes on",
        ),
    ),
)
