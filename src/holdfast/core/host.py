"""Host: the contract between the supervisor and whoever owns the processes.

A host starts workers, carries tasks to them, and reports what happened. It decides nothing. `LocalHost` runs
processes of this machine; another host may run actors of a cluster.

    open()     once, first
    start()    for each life; the worker may not be up yet when it returns
    send()     after start() of that life; never blocks; a send to a worker that is dying is lost, its Exited follows
    retire()   after start() of that life; it leaves after its batch, whenever that is; its Exited follows
    release()  after start() of that life; it gets `grace_s` to leave by itself; its Exited follows
    kill()     after start() of that life; if it is on that task its Exited follows, if not Spared
    take_back()  after send(); a Returned follows if the worker has not begun it
    wait()     blocks up to `timeout_s`; everything a worker finished comes before its Exited
    renew()    ends all workers without a report; start() of each follows
    discard()  takes back the memory of a result that will not be opened
    close()    once, last, from any thread; ends every process it started, within seconds
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from holdfast.core.messages import Event, Place, What


class Silence(NamedTuple):
    """An incident that is no event for the ledger: What.SILENT, SIGNALLED, COPIED or ROOM."""

    worker: int
    life: int
    what: What
    code: int
    on: Place
    evidence: object


class Room(NamedTuple):
    """So many workers fit into memory; `paused`: and not even their next batches, for the moment."""

    workers: int
    paused: bool


class Host(Protocol):
    """See the module."""

    def open(self) -> None: ...
    def start(self, worker: int, life: int) -> None: ...
    def send(self, worker: int, life: int, task: int, payload: bytes) -> None: ...
    def retire(self, worker: int, life: int) -> None: ...
    def wait(self, timeout_s: float | None) -> Sequence[Event | Silence | Room]: ...
    def release(self, worker: int, life: int, grace_s: float) -> None: ...
    def kill(self, worker: int, life: int, task: int) -> None: ...
    def take_back(self, worker: int, life: int) -> None: ...
    def renew(self) -> None: ...
    def discard(self, result: object) -> None: ...
    def close(self) -> None: ...
