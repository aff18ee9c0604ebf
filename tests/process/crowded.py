"""A worker with a great many children, all of which have long command lines."""

import os

# Longer than what is kept of one.
LETTERS = "x" * 400
STARTED = []


class Crowd:
    """One sample starts so many programs, and then `end` is called. They end with the worker: they read from it."""

    def __init__(self, children, end):
        self.children = children
        self.end = end

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 1 and not STARTED:
            theirs, mine = os.pipe()
            STARTED.extend((theirs, mine))
            for _ in range(self.children):
                words = ["sh", "-c", "read line", LETTERS]
                os.posix_spawn("/bin/sh", words, {}, file_actions=[(os.POSIX_SPAWN_DUP2, theirs, 0)])
            self.end()
        return index


def wait_for_one():
    os.wait()
