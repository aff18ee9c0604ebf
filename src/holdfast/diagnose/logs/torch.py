"""What torch says: its DataLoader, and the launchers of ranks (torch.multiprocessing.spawn, torchrun, gloo, NCCL)."""

from holdfast.diagnose.logs import Clue, Family

# (people who quote it write XXX for the pid, and old shells a number for the signal)
_WORKER = r"DataLoader worker \(pid\(?s?\)? ?(?P<pid>[\w, ]+)\) "
_KILLED = _WORKER + r"is killed by signal: "
_CAUGHT = r"Caught (?P<error>[\w.]+) in DataLoader worker process (?P<worker>\d+)"
_TRANSPORT = (
    "raise the limit (ulimit -n 65536), keep clones of the batches you hold on to, fewer workers. "
    "torch.multiprocessing.set_sharing_strategy('file_system') needs no descriptors but leaves files behind when a "
    "process dies. Holdfast uses a constant number per worker"
)
_SHM = (
    "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir with medium: Memory on /dev/shm. Holdfast does "
    "not use /dev/shm"
)
_CRASH = (
    "the Python line at the crash: PYTHONFAULTHANDLER=1. Suspects are decoders, OpenCV, HDF5, and extensions built "
    "for another version. Holdfast names the sample and the line and goes on"
)
_SAMPLE = "the traceback below it is the worker's own. Holdfast raises the error as itself, with index and worker"

_DEATHS = (
    Clue(
        name="worker-killed",
        pattern=_KILLED + r"(?:Killed|9\b)",
        says="a worker was ended by SIGKILL. Who sent it is not in this line; the kernel for memory is the usual one",
        advice="dmesg -T | grep -i -E 'oom|killed process', or the scheduler's log; fewer workers or a smaller "
        "prefetch_factor if it was memory",
    ),
    Clue(
        name="worker-terminated",
        pattern=_KILLED + r"(?:Terminated|15\b)",
        says="a worker was sent SIGTERM: somebody asked it to stop (a scheduler, a launcher, a person)",
        advice="look for who ends the job: time limit, pre-emption, or another rank that failed first",
    ),
    Clue(
        name="worker-segfault",
        pattern=_KILLED + r"(?:Segmentation fault|11\b)|Unexpected segmentation fault encountered in worker",
        says="native code in a worker crashed (SIGSEGV)",
        advice=_CRASH,
    ),
    Clue(
        name="worker-aborted",
        pattern=_KILLED + r"(?:Aborted|6\b)",
        says="a native library in a worker gave up (SIGABRT)",
        advice="it usually says why in the lines before (an assertion, malloc, std::terminate). " + _CRASH,
    ),
    Clue(
        name="shm-too-small",
        pattern=r"insufficient shared memory \(shm\)",
        says="a worker touched shared memory that /dev/shm had no room for (torch's guess, and nearly always right)",
        advice=_SHM,
        confidence="likely",
    ),
    Clue(
        name="worker-bus-error",
        pattern=_KILLED + r"(?:Bus error|7\b)",
        says="a worker died of SIGBUS: a page it had mapped could not be had; nearly always /dev/shm is full, else a "
        "mapped file was cut short",
        advice="df -h /dev/shm while it runs. " + _SHM,
    ),
    Clue(
        name="worker-illegal-instruction",
        pattern=_KILLED + r"(?:Illegal instruction|4\b)",
        says="a worker met an instruction this processor does not have (SIGILL)",
        advice="install a build made for this processor",
    ),
    Clue(
        name="worker-arithmetic-fault",
        pattern=_KILLED + r"(?:Floating point exception|8\b)",
        says="native code in a worker divided an integer by zero (SIGFPE)",
        advice=_CRASH,
    ),
    Clue(
        name="worker-terminated",
        pattern=_KILLED + r"(?P<signal>[\w ]+)",
        says="a worker was ended by a signal: {signal}",
        advice="look for who sends it",
    ),
    Clue(
        name="worker-exited",
        pattern=_WORKER + "exited unexpectedly",
        says="a worker is gone, and torch noticed only that; the reason is elsewhere",
        advice="look at the worker's own output just before (in a notebook: the terminal that runs Jupyter), and dmesg",
        confidence="possible",
    ),
)

_SHARING = (
    Clue(
        name="torch-descriptor-transport",
        pattern=r"received \d+ items of ancdata",
        says="no descriptor was left to receive a batch: torch sends each tensor of a batch as an open file",
        advice=_TRANSPORT,
    ),
    Clue(
        name="shm-removed",
        pattern=r"unable to open shared memory object <?/?torch_\S+ in read-write mode: No such file"
        r"|could not unlink the shared memory file",
        says="the shared memory of a batch was gone before it was read: its worker died, or somebody emptied /dev/shm",
        advice="on a login session, systemd removes it when you log out (RemoveIPC): loginctl enable-linger; or use "
        "the file_descriptor strategy",
        confidence="likely",
    ),
    Clue(
        name="torch-descriptor-transport",
        pattern=r"unable to open shared memory object <?/?torch_\S+ in read-write mode",
        says="torch could not open the shared memory of a tensor: each one takes a descriptor",
        advice=_TRANSPORT,
        confidence="likely",
    ),
    Clue(
        name="torch-descriptor-transport",
        pattern=r"Too many open files",
        above=r"resource_sharer\.py|rebuild_storage_fd|reduce_storage|recvfds|DupFd",
        says="descriptors ran out in torch's own transport: it sends each tensor of a batch as an open file",
        advice=_TRANSPORT,
    ),
    Clue(
        name="allocation-refused",
        pattern=r"unable to mmap \d+ bytes from file <\S*torch_\S*: Cannot allocate memory",
        says="mapping a batch was refused: memory, or the number of mappings (vm.max_map_count), is at its limit",
        advice="fewer batches held at once, smaller prefetch_factor; sysctl vm.max_map_count",
    ),
    Clue(
        name="shm-too-small",
        pattern=r"unable to (?:write to|resize|allocate shared memory)[^<]*<\S*torch_\S*(?:.*No space left)?",
        says="/dev/shm has no room for a batch",
        advice=_SHM,
    ),
    Clue(
        name="pin-thread-lost",
        pattern=r"Pin memory thread exited unexpectedly",
        says="the trainer's own pin-memory thread ended with an exception; this line only notices",
        advice="its exception is printed above (Exception in thread ...): descriptors, a dead worker, or in torch 1.7 "
        "persistent_workers together with pin_memory",
        confidence="possible",
    ),
    Clue(
        name="pin-thread-lost",
        pattern=r"ValueError: not enough values to unpack \(expected 2, got 0\)",
        above=r"in _pin_memory_loop",
        says="torch's pin-memory thread got an answer it does not know: a fault of torch 1.7 with persistent workers",
        advice="a newer torch, or pin_memory=False or persistent_workers=False",
    ),
)

_CODE = (
    Clue(
        name="cuda-in-forked-worker",
        pattern=r"Cannot re-initialize CUDA in forked subprocess",
        says="a worker made by fork used CUDA, which cannot survive a fork",
        advice="return CPU tensors from the dataset and move them in the training loop; or "
        "multiprocessing_context='spawn'",
    ),
    Clue(
        name="sample-hung",
        pattern=r"DataLoader timed out after (?P<seconds>[\d.]+) seconds",
        says="no batch came for {seconds} s; torch does not say which sample, nor on which line",
        advice="py-spy dump --pid WORKER while it hangs. With Holdfast, sample_timeout names the sample and the line, "
        "and goes on",
    ),
    Clue(
        name="samples-differ",
        pattern=r"stack expects each tensor to be equal size, but got (?P<one>\[[^\]]*\]) at entry \d+ and "
        r"(?P<two>\[[^\]]*\])",
        says="samples of one batch have different shapes: {one} and {two}",
        advice="resize or pad in the dataset, or give a collate_fn that pads",
    ),
    Clue(
        name="samples-differ",
        pattern=r"RuntimeError: each element in list of batch should be of equal size",
        says="samples of one batch are lists of different length",
        advice="pad them, or give a collate_fn that keeps them as lists",
    ),
    Clue(
        name="collate-raised",
        pattern=r"default_collate: batch must contain tensors, \S+ .*found <class '(?P<kind>[^']+)'>",
        says="a sample holds a {kind}, which default_collate cannot stack",
        advice="return tensors or numbers (None often means a loader that failed quietly), or give a collate_fn",
    ),
    Clue(
        name="worker-init-raised",
        pattern=_CAUGHT,
        below=r"(?<!_)init_fn\(worker_id\)",
        says="worker_init_fn raised {error} in worker {worker}",
        advice=_SAMPLE,
    ),
    Clue(
        name="collate-raised",
        pattern=_CAUGHT,
        below=r"self\.collate_fn\(data\)",
        says="collate_fn raised {error} in worker {worker}",
        advice=_SAMPLE,
    ),
    Clue(
        name="sample-raised",
        pattern=_CAUGHT,
        says="the dataset raised {error} in worker {worker}; the worker itself is well",
        advice=_SAMPLE,
    ),
    Clue(
        name="exception-not-picklable",
        pattern=r"TypeError: \S*__init__\(\) missing \d+ required",
        above=r"\breraise\b",
        says="the dataset's exception could not be made again in the trainer: its class needs more arguments than a "
        "message",
        advice="give the exception class defaults, or raise a plain one from it",
    ),
    Clue(
        name="too-many-workers",
        pattern=r"This DataLoader will create (?P<asked>\d+) worker processes in total\. Our suggested max number of "
        r"worker in current system is (?P<fit>\d+)",
        says="{asked} workers were asked for where {fit} fit the processors",
        advice="num_workers={fit}; with Holdfast num_workers='auto'",
    ),
)

TORCH = Family("torch's DataLoader", _DEATHS + _SHARING + _CODE)


# The launchers of ranks.


_NOTEBOOK = (
    "a rank that dies while it starts leaves no traceback: in a notebook the function lives in __main__ and cannot be "
    "imported; put it into a module. Also look for exit() or sys.exit() at the end of the function"
)
_FIRST = (
    "find the first death by time: the launcher's 'root cause' is the first it looked at. The others only report "
    "broken connections or were stopped by the launcher"
)
_CRASHED_RANK = "run with PYTHONFAULTHANDLER=1 to see the Python line of the rank that crashed"
_OOM = "dmesg -T | grep -i oom, the scheduler's log; fewer ranks or workers per machine if it was memory"

# How a launcher says that signal N ended a rank: spawn, torchrun (twice), subprocess, deepspeed.
_ENDED = (
    r"process (?P<rank>\d+) terminated with signal {name}\b|exitcode\s*: -{number}\b(?: \(pid: (?P<pid>\d+)\))?|"
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
        _ended("worker-segfault", "SIGSEGV", 11, "a rank crashed in native code (SIGSEGV)", _CRASHED_RANK),
        _ended("worker-aborted", "SIGABRT", 6, "a native library in a rank gave up (SIGABRT)", _CRASHED_RANK),
        _ended("worker-bus-error", "SIGBUS", 7, "a rank died of SIGBUS, most often a full /dev/shm", "df -h /dev/shm"),
        _ended(
            "worker-illegal-instruction", "SIGILL", 4, "a rank met an instruction this processor lacks", _CRASHED_RANK
        ),
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
            pattern=r"\bProcess(?:Exited|Raised)Exception\b(?!:)",
            says="torch.multiprocessing.spawn stops all ranks when one of them has ended; this name alone does not say "
            "why. The text behind it has the rank, and its signal or exit code",
            advice=_NOTEBOOK + ". With holdfast.spawn the error names the first failure and its cause",
            confidence="possible",
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
