"""What the examples do with an item; some items are made to go wrong, each in its own way."""

import os
import signal
import time

ITEMS = ["apple", "killed", "pear", "hangs", "plum", "raises", "fig", "eats memory", "lime"]


def process_data(item: str) -> str:
    if item == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "hangs":
        time.sleep(3600)
    if item == "raises":
        raise ValueError(f"cannot process {item!r}")
    if item == "eats memory":
        kept = []
        while True:
            kept.append(bytearray(64 << 20))
    time.sleep(0.05)
    return item.upper()
