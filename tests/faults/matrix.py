"""The table: *where* a fault strikes, *how*, and what is owed. A new bug is first a new row.

owed: "once"    the fault comes once: the epoch is whole, in order, nothing twice
      "raises"  it comes each time: next() raises for its batch, naming what `words` say; the rest arrives
      "skips"   it comes each time, under bad_sample="skip": all but the bad index arrives
"""

from dataclasses import dataclass

from holdfast.system import signals, snapshot

# Who has the GIL is known by the compiled signal handler, or by py-spy.
KNOWS_GIL = signals.install is not None or snapshot.find() is not None


@dataclass(frozen=True)
class Row:
    where: str
    how: str
    owed: str
    words: tuple[str, ...] = ()
    raises: str = "WorkerLost"
    finding: str = ""

    def __str__(self) -> str:
        return f"{self.where}-{self.how}-{self.owed}"


DEATHS = {
    "sigkill": ("SIGKILL", "worker-killed"),
    "segfault": ("SIGSEGV", "worker-segfault"),
    "abort": ("SIGABRT", "worker-aborted"),
    "os-exit": ("code 5", "worker-exited"),
    "os-exit-0": ("code 0", "worker-exited"),
    "hang": ("hanging", "sample-hung"),
    "hang-holding-gil": ("hanging", "hang-native" if KNOWS_GIL else "sample-hung"),
    "sigstop": ("hanging", "worker-stopped"),
}
RAISES = {
    "raise": ("ValueError", "injected", "sample-raised"),
    "raise-unpicklable": ("Local", "injected", "exception-not-picklable"),
    "raise-os-error": ("FileNotFoundError", "missing.png", "file-missing"),
    "stop-iteration": ("SampleError", "StopIteration", "sample-raised"),
    "keyboard-interrupt": ("SampleError", "KeyboardInterrupt", "sample-raised"),
    "sys-exit": ("SampleError", "SystemExit", "sample-raised"),
    "out-of-memory": ("MemoryError", "", "allocation-refused"),
    "out-of-descriptors": ("OSError", "Too many open files", "descriptors-exhausted"),
}

MAP_ROWS = [
    *(Row("dataset", how, "once", (words,), finding=finding) for how, (words, finding) in DEATHS.items()),
    *(Row("dataset", how, "raises", (words, "index 37"), finding=finding) for how, (words, finding) in DEATHS.items()),
    *(Row("dataset", how, "skips", (words, "index 37"), finding=finding) for how, (words, finding) in DEATHS.items()),
    *(Row("dataset", how, "raises", (text, "index 37"), name, found) for how, (name, text, found) in RAISES.items()),
    *(Row("dataset", how, "skips", ("index 37",), finding=found) for how, (_, _, found) in RAISES.items()),
    Row("dataset", "sigterm", "once", ("SIGTERM",), finding="worker-signalled"),
    *(Row("collate", how, "once", (words,), finding=f) for how, (words, f) in DEATHS.items() if "gil" not in how),
    *(
        Row("collate", how, "raises", (DEATHS[how][0], "collating"), finding=DEATHS[how][1])
        for how in ("sigkill", "segfault", "os-exit", "hang")
    ),
    Row("collate", "raise", "raises", ("injected", "collating"), "ValueError", "collate-raised"),
    Row("collate", "stop-iteration", "raises", ("StopIteration", "collating"), "SampleError", "collate-raised"),
    *(
        Row("send", how, "once", (words,), finding=f)
        for how, (words, f) in DEATHS.items()
        if how in ("sigkill", "segfault", "os-exit", "hang")
    ),
    Row("send", "segfault", "raises", ("SIGSEGV", "sending"), finding="worker-segfault"),
    Row("send", "raise", "raises", ("cannot be sent", "index 37", "['bomb']"), "CannotSend"),
    *(
        Row("worker_init_fn", how, "once", (words,), finding=f)
        for how, (words, f) in DEATHS.items()
        if how in ("sigkill", "segfault", "os-exit")
    ),
    Row("worker_init_fn", "raise", "raises", ("injected", "while it started"), "ValueError", "worker-init-raised"),
    Row(
        "worker_init_fn", "sys-exit", "raises", ("SystemExit", "while it started"), "SampleError", "worker-init-raised"
    ),
    Row("worker_init_fn", "segfault", "raises", ("SIGSEGV", "before they are ready"), finding="worker-segfault"),
    *(Row("idle", how, "once", (how.upper(),)) for how in ("sigkill", "sigterm", "sighup", "sigint", "sigusr1")),
    *(Row("between-epochs", how, "once", (how.upper(),)) for how in ("sigkill", "sigterm")),
    *(Row("keeper", how, "once", ()) for how in ("sigkill", "sigterm", "sigsegv")),
    *(Row("group", how, "once", ()) for how in ("sigterm", "sighup")),
]

STREAM_ROWS = [
    *(Row("stream", how, "once", (words,), finding=f) for how, (words, f) in DEATHS.items()),
    *(
        Row("stream", how, "raises", (DEATHS[how][0],), finding=DEATHS[how][1])
        for how in ("segfault", "os-exit", "hang")
    ),
    *(
        Row("stream", how, "raises", (text,), name, found)
        for how, (name, text, found) in RAISES.items()
        if how != "stop-iteration"
    ),
]
