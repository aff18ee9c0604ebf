"""Which failure is the cause: pure, a table of ends and who is to blame."""

import itertools
import signal

import pytest

from holdfast.launch.cause import EndKind, RankEnd, judge, kind_of

GLOO = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]"
RESET = "RuntimeError: [../gloo/transport/tcp/pair.cc:446] Read error [127.0.0.1]:1: Connection reset by peer"
NCCL = "DistBackendError: NCCL error in: x.cpp, ncclRemoteError: A call failed possibly due to a network error"
STORE = "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?"
PLAIN = "ConnectionResetError: [Errno 104] Connection reset by peer"
KILL, TERM, ABRT, SEGV = (-int(s) for s in (signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV))
MS = 1_000_000


def blamed(*ends):
    """Whoever is blamed must not depend on the order in which the ends are told."""
    verdicts = {judge(order).cause for order in itertools.permutations(ends)}
    assert len(verdicts) == 1
    cause = verdicts.pop()
    return None if cause is None else cause.rank


def test_nobody_is_to_blame_when_all_return():
    assert blamed(RankEnd(0, 5, 0), RankEnd(1, 9, 0)) is None


def test_the_first_by_its_own_time_is_the_cause():
    assert blamed(RankEnd(0, 9, SEGV), RankEnd(1, 5, KILL), RankEnd(2, 7, 1, "ValueError: no")) == 1


@pytest.mark.parametrize("text", [GLOO, RESET, NCCL, STORE, PLAIN])
def test_a_lost_peer_is_an_echo_even_when_it_is_noticed_first(text):
    """A death is noticed a moment after it happened; the peer may have raised by then."""
    assert blamed(RankEnd(0, 10 * MS, 1, text), RankEnd(1, 12 * MS, KILL)) == 1


def test_a_broken_connection_of_the_users_own_is_no_echo():
    """A service that does not answer: blamed before those who then lost their peer."""
    refused = "ConnectionError: HTTPConnectionPool(host='data'): Connection refused"
    assert kind_of(RankEnd(0, 5, 1, refused)) is EndKind.BROKEN
    assert blamed(RankEnd(0, 5, 1, refused), RankEnd(1, 6, 1, GLOO)) == 0


def test_a_port_that_is_taken_is_no_echo():
    taken = "DistNetworkError: The server socket has failed to listen on any local network address. EADDRINUSE"
    assert kind_of(RankEnd(0, 5, 1, taken)) is EndKind.FAILED


def test_a_lost_peer_is_the_cause_when_there_is_no_other():
    assert blamed(RankEnd(0, 10, 1, GLOO), RankEnd(1, 5, 0)) == 0


def test_what_we_stopped_is_never_the_cause():
    """Also when it ends by an exception, or with a status, or by a crash, once it has our signal."""
    for code, said in ((TERM, ""), (KILL, ""), (1, "RuntimeError: stopped"), (3, ""), (SEGV, "")):
        assert blamed(RankEnd(0, 900, code, said, stopped_ns=800), RankEnd(1, 950, 1, GLOO)) == 1
        assert kind_of(RankEnd(0, 900, code, said, stopped_ns=800)) is EndKind.STOPPED


def test_what_failed_before_our_signal_came_failed_by_itself():
    assert blamed(RankEnd(0, 700, 1, "ValueError: no", stopped_ns=800), RankEnd(1, 750, 1, GLOO)) == 0


def test_nobody_is_to_blame_when_all_were_stopped():
    """Ctrl-C: there is no cause among the ranks."""
    verdict = judge([RankEnd(0, 9, TERM, stopped_ns=8), RankEnd(1, 9, TERM, stopped_ns=8)])
    assert verdict.cause is None
    assert [kind for _, kind in verdict.others] == [EndKind.STOPPED] * 2


def test_an_abort_for_a_lost_peer_is_an_echo():
    """NCCL's watchdog and uncaught C++ exceptions of gloo abort the process; its last lines say why."""
    last = "terminate called after throwing an instance of 'gloo::IoException'\n  what(): Connection closed by peer"
    assert blamed(RankEnd(0, 5, ABRT, output=last), RankEnd(1, 6, KILL)) == 1
    assert blamed(RankEnd(0, 5, ABRT, output="assertion failed"), RankEnd(1, 6, KILL)) == 0


def test_an_exit_after_a_lost_peer_is_an_echo():
    """The user's own except clause printed it, and called sys.exit(1)."""
    assert blamed(RankEnd(0, 5, 1, output=f"Traceback...\n{GLOO}"), RankEnd(1, 6, KILL)) == 1


def test_what_a_killed_rank_printed_does_not_clear_it():
    assert blamed(RankEnd(0, 5, KILL, output=GLOO), RankEnd(1, 6, 1, "ValueError: no")) == 0


def test_a_sigterm_from_outside_can_be_the_cause():
    assert blamed(RankEnd(0, 5, TERM), RankEnd(1, 6, 1, GLOO)) == 0


def test_the_others_are_told_in_the_order_of_their_ends():
    verdict = judge(
        [RankEnd(2, 30, 1, GLOO), RankEnd(1, 20, KILL), RankEnd(0, 40, TERM, stopped_ns=35), RankEnd(3, 10, 1, RESET)]
    )
    assert verdict.cause.rank == 1
    assert [(end.rank, kind) for end, kind in verdict.others] == [
        (3, EndKind.ECHO),
        (2, EndKind.ECHO),
        (0, EndKind.STOPPED),
    ]
