"""The trainer's hold on its keeper: what is said to it arrives, or it is known to be gone."""

import os
import socket
import threading

import pytest

from holdfast.local.protocol.wire import DESCRIPTORS, MOST_BYTES, EndLife, StartLife, decode
from holdfast.local.trainer.process_handles import KeeperProcess

ORDERS = 1000


@pytest.fixture
def held():
    """A leash without a process, and the keeper's end of its socket."""
    held = KeeperProcess(None, fork=True)
    held.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    held.control.setblocking(False)
    with held.control, theirs:
        yield held, theirs


def test_a_keeper_that_is_busy_gets_every_order_in_turn(held):
    """A full socket is not a lost keeper: the orders wait, with their descriptors."""
    held, theirs = held
    heard = []

    def listen():
        while len(heard) < ORDERS:
            data, fds, _, _ = socket.recv_fds(theirs, MOST_BYTES, DESCRIPTORS)
            heard.append((decode(data), len(fds)))
            for fd in fds:
                os.close(fd)

    file = os.open(os.devnull, os.O_RDONLY)
    keeper = threading.Thread(target=listen)
    try:
        assert held.tell(EndLife(0, 1, 0.0))
        starter = threading.Timer(0.2, keeper.start)
        starter.start()
        for worker in range(1, ORDERS):
            assert held.tell(StartLife(worker, 1, 2, 2, 4096), [file] * DESCRIPTORS)
    finally:
        os.close(file)
        starter.join()
        keeper.join(20)
    assert [message.worker for message, _ in heard] == list(range(ORDERS))
    assert {fds for _, fds in heard[1:]} == {DESCRIPTORS}


def test_a_keeper_that_hears_nothing_is_not_waited_for_in_vain(held):
    """After some patience the order counts as lost."""
    held, _ = held
    while held.tell(EndLife(0, 1, 0.0), patience_s=0.05):
        pass


def test_a_keeper_that_has_not_come_up_in_time_is_not_waited_for(held):
    """It may have inherited a held lock: another one takes its place."""
    held, _ = held
    held.due = 0.0
    while held.tell(EndLife(0, 1, 0.0)):
        pass


def test_a_keeper_that_is_gone_is_not_waited_for(held):
    """Whoever told it something knows at once."""
    held, theirs = held
    theirs.close()
    assert not held.tell(EndLife(0, 1, 0.0))
