"""What a signal handler that raises leaves behind."""

import logging
import threading
from contextlib import suppress

from holdfast.system.signals import warn

from ..interrupt import Alarm, Interrupt, handler_raises

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
