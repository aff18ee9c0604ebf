"""What workers do in these tests: whatever a payload says. Importable, so that spawned workers find it."""

import os
import pickle
import signal
import time

from holdfast.core.host import KEPT_APART, SAMPLES, SINCE, STAGE, Reply, ReplyKind, Spent, StreamEnd
from holdfast.core.messages import Leave, Stage
from holdfast.remote_exception import capture, error_reply
from holdfast.shm.pack import Packer


def order(what, *args):
    """A payload."""
    return pickle.dumps((what, *args))


class Broken:
    """Can be packed, and not be opened."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise ValueError("not to be opened")


class ByTheLetter:
    """A job. `boot_does`: what happens in `boot`."""

    def __init__(self, boot_does="nothing"):
        self._boot_does = boot_does

    def boot(self, worker, life, context):
        self.me, self.context, self.packer = (worker, life), context, Packer()
        self.booted_in, self.runs = os.getpid(), 0
        self.words_at_first = [context.words[at] for at in (STAGE, SINCE, SAMPLES, KEPT_APART)]
        if self._boot_does == "raise":
            raise KeyError("not today")
        if self._boot_does == "die":
            os._exit(5)

    def run(self, payload, saved, count):
        self.runs += 1
        what, *args = pickle.loads(payload)
        self.context.enter(Stage.FETCH, 0)
        return getattr(self, what)(*args)

    def _pack(self, content):
        return Reply(ReplyKind.BATCH, *self.packer.pack(content, self.context.output.space()))

    def echo(self, *args):
        return self._pack((self.me, os.getpid(), args))

    def about(self):
        """What this life knows of itself."""
        return self._pack({"booted in": self.booted_in, "pid": os.getpid(), "runs": self.runs})

    def words(self):
        return self._pack(self.words_at_first)

    def keep_apart(self):
        self.context.words[KEPT_APART] = 1
        return self.echo()

    def spaces(self):
        output = self.context.output
        first = output.space()
        empty = first.end == 0
        first.put(memoryview(b"something"))
        return self._pack((empty, output.space() is first))

    def nap(self, seconds):
        time.sleep(seconds)
        return self.echo()

    def nap_until(self, path):
        while not os.path.exists(path):
            time.sleep(0.005)
        return self.echo()

    def fail(self):
        try:
            raise ValueError("as asked")
        except ValueError as error:
            return error_reply(self.packer, capture(error), self.context.output.space())

    def closed_letter(self):
        return self._pack(Broken())

    def mark(self, number):
        return self.echo()._replace(mark=number)

    def end_stream(self, items, told):
        kind = StreamEnd.KNOWN if told else StreamEnd.NOT_KNOWN
        size = self.context.output.space().put(memoryview(told)) + len(told) if told else 0
        return Reply(ReplyKind.EXHAUSTED, buffers=items, bad=3, where=size, spec_bytes=kind)

    def die(self, position, stage=Stage.FETCH):
        self.context.enter(stage, position)
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self):
        raise Spent(Leave.MEMORY, ("as asked",))

    def note(self, path):
        with open(path, "a") as file:
            file.write(f"{os.getpid()}\n")
        return self.echo()
