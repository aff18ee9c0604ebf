"""What a signal handler that raises leaves behind."""

import logging
import sys
import threading
from contextlib import suppress

from holdfast.system.signal_origin import warn

from .. import interrupt
from ..interrupt import PACKAGE, Alarm, Interrupt, handler_raises

# Bytecodes of one line in the log, and as many before and behind it.
CODES = 600


def is_free(lock):
    """Another thread can have it."""
    taken = []

    def take():
        taken.append(lock.acquire(timeout=5))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


def test_a_handler_that_raises_while_a_line_is_logged_leaves_no_lock_of_logging_taken():
    """Or the next thread that logs would hang, a pool's for example."""
    handler = logging.StreamHandler(open("/dev/null", "w"))
    logging.getLogger("holdfast").addHandler(handler)
    cut_short = 0
    try:
        with handler_raises(Alarm):
            for at in range(1, CODES):
                logging.getLogger("holdfast")._cache.clear()  # so that the module's lock is taken, too
                with suppress(Alarm), Interrupt(at) as interrupt:
                    warn("worker 0 was killed")
                    cut_short -= 1
                cut_short += 1
                owned = [lock for lock in (logging._lock, handler.lock) if lock._is_owned()]
                assert not owned, f"at bytecode {at}"
                if interrupt.seen < at:
                    break
        assert cut_short > 200
        assert is_free(logging._lock) and is_free(handler.lock)
    finally:
        logging.getLogger("holdfast").removeHandler(handler)
        handler.stream.close()


def interrupted_everywhere(function):
    """At each of its bytecodes. How often logging kept a lock; none is left, and what is told."""
    before, told = interrupt.freed, []
    with handler_raises(Alarm):
        for at in range(1, CODES):
            logging.getLogger("user")._cache.clear()
            try:
                with Interrupt(at) as cut:
                    function()
            except Alarm:
                pass
            except AssertionError as error:
                told.append(str(error))
            assert not interrupt.taken(), f"at bytecode {at}"
            if cut.seen < at:
                break
    assert is_free(logging._lock)
    return interrupt.freed - before, told


def logs():
    logging.getLogger("user").debug("a line of the user's")


# From Python 3.13 on logging takes its locks with `with`.
KEPT = sys.version_info < (3, 13)


def test_a_lock_that_logging_keeps_when_user_code_is_interrupted_is_freed():
    """Or a later test, in the same process, would hang."""
    freed, told = interrupted_everywhere(logs)
    assert bool(freed) == KEPT
    assert not told


def test_a_lock_that_logging_keeps_when_holdfast_is_interrupted_is_a_failure():
    """It names the bytecode, and the lock is freed all the same."""
    ours = {"logging": logging}
    code = compile("def logs():\n logging.getLogger('user').debug('x')", str(PACKAGE / "ours.py"), "exec")
    exec(code, ours)
    freed, told = interrupted_everywhere(ours["logs"])
    assert bool(freed) == KEPT and len(told) == freed
    assert all("ours.py:2 in logs" in line and "bytecode" in line for line in told)
