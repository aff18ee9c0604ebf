"""Ends a test run in which one test hangs for ever: `python watchdog.py PID FILE SIGNAL`, beside the run.

pytest-timeout raises in the test, and then whoever cleans up may wait for ever: a pool's end, a fixture, a join. A
thread of the run could not end it while another one holds the GIL, and there would be one thread more at each fork. So
it is a process. The run writes into FILE until when its test may last; after that this process has the run write all
its stacks (SIGNAL), and kills it and its descendants. CI sees the stacks and a status that is not 0.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

# How often is looked; how long stacks may take.
LOOK_S = 1.0
STACKS_S = 5.0


def descendants(pid: int) -> list[int]:
    found = []
    with suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                for child in map(int, children.read_text().split()):
                    found += [child, *descendants(child)]
    return found


def main(run: int, file: Path, dump: int) -> None:
    while True:
        time.sleep(LOOK_S)
        try:
            os.kill(run, 0)
            until, _, test = file.read_text().partition(" ")
        except OSError:  # it has ended
            return
        if until and 0 < float(until) < time.monotonic():
            break
    print(f"\n\nwatchdog: {test} has run for twice its timeout: the whole run is ended. Its stacks:\n", file=sys.stderr)
    os.kill(run, dump)
    time.sleep(STACKS_S)
    for pid in [*descendants(run), run]:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    finally:
        Path(sys.argv[2]).unlink(missing_ok=True)  # a run that is killed leaves it
