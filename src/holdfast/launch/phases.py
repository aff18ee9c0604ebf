"""When a group of ranks is stopped: the phases of one attempt, and the allowed moves between them.

    RUNNING --(a rank failed)------> LAST_CALL ----> STOPPING ----> KILLING ----> OVER
       \\--(nobody wants the ranks)-> INTERRUPTED --/

Pure: the time and the facts come in, the phase comes out. The group sends the signals (see rank_group).
"""

from enum import Enum, auto

# Connections of a dead rank break within milliseconds. Ranks that notice it raise within some more.
LAST_CALL_S = 1.0
# Between SIGTERM and SIGKILL. A handler that saves a checkpoint has as long as with torch, torchrun and Kubernetes.
STOP_S = 30.0
# After SIGKILL a process is gone at once, unless the kernel itself waits (a dead network file system).
KILLED_S = 5.0


class GroupPhase(Enum):
    """What happens to the ranks of one attempt."""

    RUNNING = auto()
    """No rank has failed, and somebody wants the ranks."""
    LAST_CALL = auto()
    """A rank has failed. Those that fail at the same time report it now; a grace period lets the others end."""
    INTERRUPTED = auto()
    """Nobody wants the ranks. A Ctrl-C in the terminal has reached them, too: they may be ending by themselves."""
    STOPPING = auto()
    """The ranks that still run have SIGTERM."""
    KILLING = auto()
    """The ranks that still run have SIGKILL."""
    OVER = auto()
    """All ranks have ended, or some could not be ended."""


# All moves there are. Every phase may end early, because all ranks have ended.
MOVES: dict[GroupPhase, frozenset[GroupPhase]] = {
    GroupPhase.RUNNING: frozenset((GroupPhase.LAST_CALL, GroupPhase.INTERRUPTED, GroupPhase.OVER)),
    GroupPhase.LAST_CALL: frozenset((GroupPhase.INTERRUPTED, GroupPhase.STOPPING, GroupPhase.OVER)),
    GroupPhase.INTERRUPTED: frozenset((GroupPhase.STOPPING, GroupPhase.OVER)),
    GroupPhase.STOPPING: frozenset((GroupPhase.KILLING, GroupPhase.OVER)),
    GroupPhase.KILLING: frozenset((GroupPhase.OVER,)),
    GroupPhase.OVER: frozenset(),
}
# What follows when the time of a phase is up.
_NEXT = {
    GroupPhase.LAST_CALL: GroupPhase.STOPPING,
    GroupPhase.INTERRUPTED: GroupPhase.STOPPING,
    GroupPhase.STOPPING: GroupPhase.KILLING,
    GroupPhase.KILLING: GroupPhase.OVER,
}


class GroupPhases:
    """The present phase of one attempt, and since when. Times are monotonic, in seconds."""

    def __init__(self) -> None:
        self.phase = GroupPhase.RUNNING
        self._since = 0.0

    def move(self, to: GroupPhase, now: float) -> None:
        """Begin this phase."""
        assert to in MOVES[self.phase], f"no move leads from {self.phase.name} to {to.name}"
        self.phase, self._since = to, now

    def deadline(self, grace_s: float | None) -> float | None:
        """When the time of the present phase is up; None: never. `grace_s`: the caller's own grace period, if any."""
        match self.phase:
            case GroupPhase.RUNNING | GroupPhase.OVER:
                return None
            case GroupPhase.LAST_CALL:
                seconds = LAST_CALL_S if grace_s is None else grace_s
            case GroupPhase.INTERRUPTED:
                seconds = min(LAST_CALL_S, grace_s or 0.0)
            case GroupPhase.STOPPING:
                seconds = STOP_S if grace_s is None else grace_s
            case GroupPhase.KILLING:
                seconds = KILLED_S
        return self._since + seconds

    def advance(self, now: float, *, failed: bool, unwanted: bool, grace_s: float | None) -> GroupPhase | None:
        """The phase that begins now, or None. `failed`: some rank has failed. `unwanted`: nobody wants the ranks."""
        deadline = self.deadline(grace_s)
        if unwanted and GroupPhase.INTERRUPTED in MOVES[self.phase]:
            to = GroupPhase.INTERRUPTED
        elif failed and self.phase is GroupPhase.RUNNING:
            to = GroupPhase.LAST_CALL
        elif deadline is not None and now >= deadline:
            to = _NEXT[self.phase]
        else:
            return None
        self.move(to, now)
        return to
