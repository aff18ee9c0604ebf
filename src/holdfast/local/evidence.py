"""Evidence: facts taken at the moment of an incident; no opinions. The keeper fills it, diagnosis reads it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was seen of one life when it died, hung or was signalled."""

    pid: int
    lived_s: float = 0.0
    stack: str = ""
    """The Python stack from faulthandler: at the crash, or of the hung worker just before it was killed."""
    state: str = ""
    """Process state letter of a worker that was silent: S, D, T, ..."""
    peak_bytes: int = 0
    """Largest resident size, from its rusage."""
    resident_bytes: int = 0
    """The last reading before."""
    noted_signals: int = 0
    fork_errno: int = 0
    """Set when the process could not even be made."""
