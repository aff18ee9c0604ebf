"""The dataset raised: which kind of trouble is it?"""

import errno
import re

from holdfast.core.messages import Stage, What
from holdfast.diagnose.finding import Case, Finding
from holdfast.system.evidence import Sign

_FILES = {
    errno.ESTALE: (
        "stale-file",
        "the file was replaced or removed on the server while it was open",
        "reopen it and try again: Policy(retries=3)",
    ),
    errno.EACCES: ("permission-denied", "this user may not read it", "ls -l, and id: who runs the job?"),
    errno.EPERM: ("permission-denied", "this user may not do that", "ls -l, and id: who runs the job?"),
    errno.ENOENT: ("file-missing", "there is no such file", "is the data mounted on this machine, under this path?"),
}
# Raised by what reads a file whose bytes make no sense; by name, or by the code that raised.
_NONSENSE = frozenset(
    ("BadZipFile", "BadGzipFile", "ReadError", "UnpicklingError", "EOFError", "UnidentifiedImageError")
)
_READERS = re.compile(r"\b(zipfile|tarfile|gzip|bz2|lzma|zlib|pickle|struct|h5py|tables|netCDF4|PIL|numpy/lib)\b")
_TAIL = 600


def retried(case: Case) -> Finding | None:
    """It raised, and then it did not."""
    if case.what is not What.RETRIED or case.raised is None:
        return None
    return Finding(
        "sample-retried",
        f"it raised {case.raised.type_name}: {case.raised.text}; attempt {case.attempt} succeeded",
        (f"{case.attempt - 1} failed attempts", *case.raised.facts),
        "a service that fails now and then; the time it costs is in the report",
    )


def stateless(case: Case) -> Finding | None:
    """state_dict() of an iterable dataset raised when a snapshot was to be taken."""
    if case.what is not What.STATELESS or case.raised is None:
        return None
    return Finding(
        "stream-without-state",
        f"state_dict() of the dataset raised {case.raised.type_name}: {case.raised.text}",
        ("it was called in the worker, between two batches, without arguments",),
        "nothing, if replaying is quick enough; else a state_dict() that needs no arguments, and load_state_dict()",
    )


def about_a_file(case: Case) -> Finding | None:
    """The number of the error says what is wrong with the file."""
    if case.raised is None or case.raised.errno not in _FILES or case.what is What.BOOT:
        return None
    name, says, advice = _FILES[case.raised.errno]
    return Finding(name, f"{says}: {case.raised.text}", case.raised.facts, advice)


def cuda_in_fork(case: Case) -> Finding | None:
    """A forked process cannot use CUDA if its parent had initialised it."""
    if case.raised is None or "re-initialize CUDA in forked subprocess" not in case.raised.text:
        return None
    return Finding(
        "cuda-in-forked-worker",
        "the dataset uses CUDA in a worker that was forked from a trainer which uses it too",
        (f"{case.raised.type_name}: {case.raised.text}",),
        'keep samples on the CPU (and DataLoader(pin_memory=True)), or multiprocessing_context="spawn"',
    )


def shared_since_fork(case: Case) -> Finding | None:
    """A reader met bytes that make no sense, and a file is open that all workers read at one position."""
    raised = case.raised
    if raised is None or Sign.SHARED_FILE not in raised.signs:
        return None
    if raised.type_name not in _NONSENSE and not _READERS.search(raised.traceback[-_TAIL:]):
        return None
    return Finding(
        "handle-shared-by-fork",
        "a file that was opened before the workers were forked is read by all of them at one shared position: they "
        f"get each other's bytes, and not always with an error; {raised.type_name}: {raised.text}",
        raised.facts,
        "open it in the worker, at its first sample: keep the path, not the handle; holdfast.FileCache does that",
        "likely",
    )


def open_at_fork(case: Case) -> Finding | None:
    """The dataset holds files open when its workers are forked."""
    if case.what is not What.SHARED or case.evidence is None:
        return None
    return Finding(
        "handle-shared-by-fork",
        "workers that seek and read there move one position: they get each other's bytes, mostly without an error",
        case.evidence.facts,
        "open it in the worker, at its first sample (keep the path, not the handle; holdfast.FileCache does that), or "
        'multiprocessing_context="spawn"; Policy(shared_files="ignore") if workers do not read it',
        "likely",
    )


def samples_differ(case: Case) -> Finding | None:
    """The default collate needs samples that are alike."""
    if case.raised is None or case.stage is not Stage.COLLATE or Sign.UNLIKE not in case.raised.signs:
        return None
    which, *more = case.raised.facts
    return Finding(
        "samples-differ",
        f"the samples of this batch differ, and cannot be stacked: {which}",
        (*more, f"{case.raised.type_name}: {case.raised.text}"),
        "resize, crop or pad them in the dataset, or give a collate_fn that does; "
        'Policy(bad_sample="skip") goes on without a few samples that differ from most',
    )


def task_raised(case: Case) -> Finding | None:
    """A task of a pool raised."""
    if case.raised is None or not case.of_pool:
        return None
    return Finding(
        "task-raised",
        f"the task raised {case.raised.type_name}: {case.raised.text}",
        (f"after {case.attempt} attempt(s)", *case.raised.facts),
        "the traceback ends on the line that raised; submit_with(..., retries=3) tries again what raised one of "
        "Policy(retry_on=...)",
    )


def unsendable(case: Case) -> Finding | None:
    """What the sample holds cannot leave its process."""
    if case.raised is None or case.raised.type_name != "CannotSend":
        return None
    return Finding(
        "value-not-picklable",
        case.raised.text.partition("\n")[0],
        ("pickle and cloudpickle refused it",),
        "return plain data (tensors, arrays, numbers, strings) instead, or give its class __reduce__",
    )


def diverged(case: Case) -> Finding | None:
    """A stream that was replayed gave other items."""
    if case.raised is None or Sign.DIVERGED not in case.raised.signs:
        return None
    return Finding(
        "stream-diverged",
        case.raised.text.partition("\n")[0],
        ("fingerprints of the items differ from those of the life before",),
        "draw from the seeded generators only, or give the dataset state_dict and load_state_dict",
    )


def raised(case: Case) -> Finding | None:
    """An exception in a sample or in collate."""
    if case.raised is None:
        return None
    stage = "collate_fn" if case.stage is Stage.COLLATE else "the dataset"
    text = f"{stage} raised {case.raised.type_name}: {case.raised.text}"
    if case.raised.pickled is None:
        return Finding(
            "exception-not-picklable",
            text,
            ("the exception itself cannot be pickled; its class, text and attributes came as far as they could",),
            "give it a plain __init__(self, *args) that passes them to super().__init__, and no lock or file in it",
        )
    if case.raised.transform and case.stage is not Stage.COLLATE:
        return Finding(
            "transform-raised",
            f"the dataset's transform ({case.raised.transform}) raised {case.raised.type_name}: {case.raised.text}",
            ("the dataset had given the sample; the traceback goes on inside its transform", *case.raised.facts),
            "look at what this sample is before the transform (its mode, size, type); the data may be well",
        )
    if case.stage is Stage.COLLATE:
        return Finding(
            "collate-raised",
            text,
            case.raised.facts,
            "look at the line that raised: it belongs to no single sample, and is raised under any bad_sample",
        )
    return Finding(
        "sample-raised",
        text,
        (f"after {case.attempt} attempt(s)", *case.raised.facts),
        'fix or remove the sample; Policy(bad_sample="skip") goes on without it, Policy(retries=3) tries again',
    )


RULES = (
    retried,
    stateless,
    about_a_file,
    cuda_in_fork,
    shared_since_fork,
    open_at_fork,
    samples_differ,
    unsendable,
    diverged,
    task_raised,
    raised,
)
