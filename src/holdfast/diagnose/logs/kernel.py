"""What the kernel writes (dmesg, journalctl -k) when it kills, refuses or waits."""

from holdfast.diagnose.logs.clue import Clue, Family

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
