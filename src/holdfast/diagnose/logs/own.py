"""What Holdfast itself says: the text of its errors, its log lines, and the names of its errors alone.

Its errors and log lines name their finding: that is what they mean, in their own words.
"""

from holdfast.diagnose.logs import Clue, Family

_FINDING = r"(?P<finding>[a-z]+(?:-[a-z]+)+|unknown|interrupted)"
# Headlines begin so: see diagnose/incident.py and launch/rank_narrator.py.
_DOES = r"(?:was|went|exited|raised|got|has|had|made|could|cannot|ended|died)\b"
_WHO = (
    rf"worker \d+ {_DOES}",
    rf"the keeper {_DOES}",
    rf"the trainer {_DOES}",
    rf"rank \d+ {_DOES}",
    "memory is short",
)

# The type of an error of ours, where no finding stands below it: what a caller can do.
_TYPES = {
    "PolicyError": ("a Policy field has a value that is not accepted", "the text lists the values that are"),
    "WorkerLost": ("a sample or batch ended its workers too often, or workers cannot live here", ""),
    "SampleError": ("a sample raised what cannot be raised as itself in the trainer", ""),
    "CannotSend": ("a batch holds something that cannot cross to another process", "the text leads to it"),
    "TooManyBad": ("more samples were bad than Policy(max_bad=...) allows", "print(loader.report()) lists them"),
    "StreamBroken": ("the stream of an iterable dataset cannot go on where it broke", ""),
    "TaskLost": ("a task of a Pool ended its worker; the pool goes on", ""),
    "TaskTimeout": ("a task of a Pool took longer than its timeout, and was killed", ""),
    "PoolBroken": ("no worker of this Pool comes up or stays", "mend what the text names, and make another pool"),
    "FileShared": ("forked workers would read an open file at one position", "open the file in the worker"),
    "BatchTimeout": ("no batch came within the loader's own timeout", "Policy(sample_timeout=...) names the sample"),
    "LoaderTorn": ("an interrupt came in the middle of the loader's bookkeeping", "make a new iterator: iter(loader)"),
    "WrongProcess": ("a forked child used what belongs to its parent", "make another loader or pool in the child"),
    "RankExited": ("holdfast.spawn: a rank was killed, crashed or exited", ""),
    "RankRaised": ("holdfast.spawn: a rank raised", "its own traceback stands below"),
}
_NO_FINDING = r"\A(?!\s+(?:[a-z]+(?:-[a-z]+)+|unknown|interrupted): )"
# The user's own exception comes back as itself; a note under it says where.
_RAISED = r"(?m)^(?P<error>[\w.]+(?:: .*)?)(?:\nin worker .*)*\Z"
_USERS_OWN = "the traceback above 'was the direct cause' is the worker's own; its last frame in your code is the place"
_READ = "read the lines below it: they say why, how Holdfast knows, and what to do"


def _type(name: str, says: str, advice: str) -> Clue:
    return Clue(
        name="holdfast-raised",
        pattern=rf"(?:^|[\s.]){name}: \S|\bholdfast\.(?:errors|launch\.cause)\.{name}\b",
        below=_NO_FINDING,
        says=f"{name}: {says}",
        advice=advice or _READ,
    )


OWN = Family(
    "Holdfast's own errors, log lines and run folders",
    (
        Clue(
            name="{finding}",
            pattern=r"^\s*more +holdfast explain [a-z-]+\s*$",
            above=rf"(?P<headline>[^\n]*)\n\s*{_FINDING}: (?P<says>[^\n]+)\n"
            r"(?:\s+(?:seen|did|stack)[^\n]*\n)*\s+try +(?P<advice>[^\n]+)\s*\Z",
            says="{says}. Holdfast said it of this: {headline}",
            advice="{advice}",
        ),
        Clue(
            name="worker-init-raised",
            pattern=r"^in worker (?P<worker>\d+)(?: \(pid \d+\))? while it started$",
            above=_RAISED,
            says="worker {worker} could not start: {error}",
            advice=_USERS_OWN,
        ),
        Clue(
            name="sample-raised",
            pattern=r"^in worker (?P<worker>\d+)(?: \(pid \d+\))? while (?P<doing>.+)",
            above=_RAISED,
            says="worker {worker} got {error}, while {doing}",
            advice=_USERS_OWN,
        ),
        *(
            Clue(
                name="{finding}",
                pattern=rf"\b{who}(?P<rest>.*?) \[{_FINDING}\]",
                says="Holdfast logged this finding; its page says what it means and what to do",
                advice="print(loader.report()), or `holdfast explain` on the folder of HOLDFAST_RUN_DIR: both have "
                "what was seen, and what to do about this very incident",
            )
            for who in _WHO
        ),
        *(_type(name, *texts) for name, texts in _TYPES.items()),
    ),
)
