"""The table: *where* a fault strikes, *how*, and what is owed. A new bug is first a new row.

owed: "once"    the fault comes once: the epoch is whole, in order, nothing twice
      "raises"  it comes each time: next() raises for its batch, naming what `words` say; the rest arrives
      "skips"   it comes each time, under bad_sample="skip": all but the bad index arrives
      "nobody"  it comes when a worker leaves: the epoch is whole, and nobody hears of it
      "breaks"  it comes in each worker that starts: no batch arrives, each next() raises
      "alone"   it ends the trainer: its workers and its keeper go with it

start: the start method. Each row runs forked; those that start in another way where that can matter, or all with
HOLDFAST_SLOW=1.
"""

import os
from dataclasses import dataclass, replace

from holdfast.system import signal_origin, snapshot

# Who has the GIL is known by the compiled signal handler, or by py-spy.
KNOWS_GIL = signal_origin.install is not None or snapshot.find() is not None


@dataclass(frozen=True)
class Row:
    where: str
    how: str
    owed: str
    words: tuple[str, ...] = ()
    raises: str = "WorkerLost"
    finding: str = ""
    start: str = "fork"

    def __str__(self) -> str:
        return f"{self.where}-{self.how}-{self.owed}" + (f"-{self.start}" if self.start != "fork" else "")


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

# How code of the user's ends a worker, wherever it runs.
DIES = ("sigkill", "segfault", "os-exit", "hang")

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
    Row("worker_init_fn", "raise", "breaks", ("injected", "while it started"), "ValueError", "worker-init-raised"),
    Row(
        "worker_init_fn", "sys-exit", "breaks", ("SystemExit", "while it started"), "SampleError", "worker-init-raised"
    ),
    Row("worker_init_fn", "segfault", "breaks", ("SIGSEGV", "before they are ready"), finding="worker-segfault"),
    *(Row("late-import", how, "once", (DEATHS[how][0],), finding=DEATHS[how][1]) for how in DIES),
    *(Row("late-import", how, "raises", (DEATHS[how][0], "index 37"), finding=DEATHS[how][1]) for how in DIES),
    Row("late-import", "raise", "raises", ("injected", "index 37"), "ValueError", "sample-raised"),
    Row("late-import", "sys-exit", "raises", ("SystemExit", "index 37"), "SampleError", "sample-raised"),
    *(Row("at-exit", how, "nobody") for how in ("raise", "sys-exit", *DIES)),
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

# A spawned worker imports the module of the dataset's class; a forked one has it.
IMPORT_ROWS = [
    *(
        Row("import", how, "once", (DEATHS[how][0],), finding=DEATHS[how][1], start="spawn")
        for how in ("sigkill", "segfault", "os-exit")
    ),
    *(
        Row("import", how, "breaks", (DEATHS[how][0], "while starting"), finding=DEATHS[how][1], start="spawn")
        for how in ("segfault", "os-exit")
    ),
    Row("import", "raise", "breaks", ("injected", "while it started"), "ValueError", "worker-init-raised", "spawn"),
    Row(
        "import", "sys-exit", "breaks", ("SystemExit", "while it started"), "SampleError", "worker-init-raised", "spawn"
    ),
]

TRAINER_ROWS = [
    Row("trainer", how, "alone", start=start)
    for how, start in (
        *((how, "fork") for how in ("sigkill", "sigterm", "sigint", "segfault", "raise", "sys-exit", "os-exit")),
        *((how, "spawn") for how in ("sigkill", "sys-exit")),
    )
]

# Cells in which a spawned keeper, or a job that it holds as bytes, can make a difference.
_OTHER_START = {
    ("dataset", "sigkill", "once"),
    ("dataset", "hang", "once"),
    ("dataset", "segfault", "raises"),
    ("dataset", "segfault", "skips"),
    ("dataset", "raise-unpicklable", "raises"),
    ("collate", "sigkill", "once"),
    ("send", "segfault", "raises"),
    ("late-import", "os-exit", "raises"),
    ("at-exit", "raise", "nobody"),
    ("at-exit", "hang", "nobody"),
    ("idle", "sigterm", "once"),
    ("between-epochs", "sigkill", "once"),
    ("stream", "sigkill", "once"),
    ("stream", "segfault", "raises"),
    ("stream", "raise", "raises"),
}
_OTHER_PLACES = {"worker_init_fn", "keeper", "group"}


def _spawned(rows: list[Row]) -> list[Row]:
    every = bool(os.environ.get("HOLDFAST_SLOW"))
    return [
        replace(row, start="spawn")
        for row in rows
        if every or row.where in _OTHER_PLACES or (row.where, row.how, row.owed) in _OTHER_START
    ]


MAP_ROWS += [*_spawned(MAP_ROWS), *IMPORT_ROWS]
STREAM_ROWS += _spawned(STREAM_ROWS)
