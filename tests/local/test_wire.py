"""What keeper and trainer say to each other is bounded: what is too large loses detail, and arrives."""

import socket

import pytest

from holdfast.core.messages import Cause, Exited, Place, Stage
from holdfast.local.keeper.fact_log import FactLog
from holdfast.local.keeper.worker_watch import Outbox
from holdfast.local.protocol.wire import MOST_BYTES, KeeperSignalled, KeeperUp, RoomLeft, decode, encode
from holdfast.system.evidence import Evidence, View
from holdfast.system.snapshot import Bounds, Snapshot

ON = Place(7, 1, Stage.FETCH, 0.5)
CROWD = tuple((pid, "x" * 300) for pid in range(900))
LARGE = {
    "children": {"view": View(children=CROWD), "look": Snapshot(children=CROWD)},
    "line": {"view": View(line="x" * 3_000_000)},
    "native": {"view": View(native=tuple("f" * 50_000 for _ in range(12)))},
    "stack": {"stack": "x" * 300_000},
    "facts": {"facts": tuple("x" * 10_000 for _ in range(50)), "limits": ("x" * 100_000,)},
    "everything": {
        "stack": "x" * 300_000,
        "kernel_log": "x" * 300_000,
        "memory": tuple((0.1 * i, i << 20) for i in range(30)),
        "facts": ("x" * 300_000,) * 900,
        "limits": ("x" * 300_000,) * 900,
        "worlds": ("x" * 300_000,) * 900,
        "view": View("S", *["x" * 300_000] * 4, line="x" * 300_000, others=("x" * 300_000,) * 900, children=CROWD),
        "look": Snapshot(paths=CROWD, others=("x" * 300_000,) * 900, children=CROWD),
        "bounds": Bounds((("RLIMIT_NOFILE", 1024, None),), tuple(range(4096))),
    },
}


def ended(evidence):
    return Exited(3, 2, 1.5, Cause.SIGNAL, 9, ON, evidence)


@pytest.mark.parametrize("large", LARGE)
def test_large_evidence_fits_a_message(large):
    """All else that the message says stays, and of what is listed the beginning."""
    evidence = Evidence(pid=77, tasks=5, **LARGE[large])
    data = encode(ended(evidence))
    assert len(data) <= MOST_BYTES
    heard = decode(data)
    assert heard[:6] == ended(None)[:6]
    assert (heard.evidence.pid, heard.evidence.tasks) == (77, 5)
    assert heard.evidence.memory == evidence.memory
    assert heard.evidence.bounds == evidence.bounds
    assert evidence.stack.startswith(heard.evidence.stack) and bool(evidence.stack) == bool(heard.evidence.stack)
    if evidence.view is not None and evidence.view.children:
        assert heard.evidence.view.children[0][0] == 0


@pytest.mark.parametrize("most", [400, 1000, 5000])
def test_a_message_fits_whatever_the_socket_holds(most):
    """In the end nothing is left of the evidence but the process that it is about."""
    evidence = Evidence(pid=77, **LARGE["everything"])
    for message in (KeeperSignalled(15, evidence), RoomLeft(3, True, 1, evidence)):
        bare = encode(message._replace(evidence=Evidence(pid=77)))
        data = encode(message, max(most, len(bare)))
        assert len(data) <= max(most, len(bare))
        assert decode(data).evidence.pid == 77


def test_what_fits_is_not_touched():
    """A usual death loses nothing."""
    evidence = Evidence(pid=77, stack="x" * 30_000, view=View(children=CROWD[:32]), facts=("y" * 2000,) * 5)
    assert decode(encode(ended(evidence))) == ended(evidence)


@pytest.mark.parametrize("buffer", [4096, 1 << 20])
def test_large_evidence_holds_nobody_up(buffer):
    """What is said after it arrives, too, whatever the buffer of the socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        outbox = Outbox(theirs, FactLog(None, ()))
        outbox.say(ended(Evidence(pid=77, **LARGE["everything"])))
        outbox.say(KeeperUp(5))
        heard = []
        for _ in range(2):
            heard.append(decode(ours.recv(MOST_BYTES)))
            outbox.say()
        assert heard[0][:6] == ended(None)[:6]
        assert heard[1] == KeeperUp(5)
