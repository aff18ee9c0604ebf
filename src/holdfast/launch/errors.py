"""What spawn raises: torch's own errors, so that handlers for those fire, with the finding in the text.

Here and not in holdfast/errors.py, where the rest of the tree stands, because their other base is torch's.
"""

from typing import Any

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from holdfast.diagnose.report import Incident
from holdfast.errors import HoldfastError


class RankExited(HoldfastError, ProcessExitedException):
    """A rank was killed, crashed or exited: `error_index` is the rank, `exit_code` negative for a signal."""

    def __init__(
        self,
        message: str,
        error_index: int = 0,
        error_pid: int = 0,
        exit_code: int = 0,
        signal_name: str | None = None,
        incident: Incident | None = None,
    ) -> None:
        ProcessExitedException.__init__(self, message, error_index, error_pid, exit_code, signal_name)
        self.error_pid = error_pid  # older torch calls it pid
        self.incident = incident

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.msg, self.error_index, self.error_pid, self.exit_code, self.signal_name, self.incident)
        return type(self), fields


class RankRaised(HoldfastError, ProcessRaisedException):
    """A rank raised. The text ends with its traceback; the exception itself is the `__cause__`."""

    def __init__(
        self, message: str, error_index: int = 0, error_pid: int = 0, incident: Incident | None = None
    ) -> None:
        ProcessRaisedException.__init__(self, message, error_index, error_pid)
        self.error_pid = error_pid  # older torch calls it pid
        self.incident = incident

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.msg, self.error_index, self.error_pid, self.incident)
