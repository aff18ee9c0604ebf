"""Iterable datasets that know where they are, each in its own way; importable, so that spawned workers find them."""

import os
import random
import threading
import time

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info


class Plain(IterableDataset):
    """A worker's share of the numbers below `length`, from the start each time. No state."""

    def __init__(self, length=60, seconds=0.0):
        self.length = length
        self.seconds = seconds
        self.position = 0
        self.start = 0

    def share(self):
        info = get_worker_info()
        return range(self.length)[info.id :: info.num_workers]

    def item(self, position):
        if self.seconds:
            time.sleep(self.seconds)
        return self.share()[position]

    def walk(self, start):
        for position in range(start, len(self.share())):
            self.position = position + 1
            yield self.item(position)

    def __iter__(self):
        return self.walk(0)


class Stateful(Plain):
    def state_dict(self):
        return {"position": self.position}


class Stays(Stateful):
    """What was loaded is kept, as in Hugging Face's datasets: each later iter() begins there."""

    def __iter__(self):
        return self.walk(self.start)

    def load_state_dict(self, state):
        self.start = state["position"]


class Pending(Stateful):
    """What was loaded is used up by the next iter(), as in torchdata's."""

    def __iter__(self):
        start, self.start = self.start, 0
        yield from self.walk(start)

    def load_state_dict(self, state):
        self.start = state["position"]


class GoesOn(Stateful):
    """Its place is where the next iter() begins; at the end it begins again."""

    def __iter__(self):
        yield from self.walk(self.position)
        self.position = 0

    def load_state_dict(self, state):
        self.position = state["position"]


class Itself(Stateful):
    """It is its own iterator."""

    def __iter__(self):
        return self

    def __next__(self):
        if self.position >= len(self.share()):
            self.position = 0
            raise StopIteration
        self.position += 1
        return self.item(self.position - 1)

    def load_state_dict(self, state):
        self.position = state["position"]


class Counts(Plain):
    """It counts its epochs, and shuffles by that: each worker takes its share of the same order."""

    epoch = 0

    def order(self):
        info = get_worker_info()
        return random.Random(self.epoch).sample(range(self.length), self.length)[info.id :: info.num_workers]

    def give(self, order):
        for item in order:
            time.sleep(self.seconds)
            yield item

    def __iter__(self):
        order, self.epoch = self.order(), self.epoch + 1
        return self.give(order)


class CountsWithState(Counts):
    """The count is in its state; what was loaded is used up by the next iter()."""

    loaded = None

    def __iter__(self):
        if self.loaded is not None:
            self.epoch, self.position = self.loaded
            self.loaded = None
        else:
            self.position = 0
        for item in self.give(self.order()[self.position :]):
            self.position += 1
            yield item
        self.epoch += 1

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.loaded = state["epoch"], state["position"]


class CountsAtOnce(CountsWithState):
    """Its state is what was loaded as soon as it was."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.epoch, self.position = self.loaded


class CountsAtItsStart(CountsWithState):
    """It counts an epoch when that begins."""

    def __iter__(self):
        if self.loaded is None:
            self.epoch, self.position = self.epoch + 1, 0
        else:
            (self.epoch, self.position), self.loaded = self.loaded, None
        return self.rest()

    def rest(self):
        for item in self.give(self.order()[self.position :]):
            self.position += 1
            yield item


class Holds(IterableDataset):
    """The count is another's, which it holds."""

    def __init__(self, *settings):
        self.inner = CountsWithState(*settings)

    def __iter__(self):
        return iter(self.inner)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


class Walker:
    """The state is the iterator's."""

    def __init__(self, dataset):
        self.dataset = dataset
        self.position = 0

    def __next__(self):
        if self.position >= len(self.dataset.share()):
            raise StopIteration
        self.position += 1
        return self.dataset.item(self.position - 1)

    def __iter__(self):
        return self

    def state_dict(self):
        return self.position

    def load_state_dict(self, state):
        self.position = state


class Walked(Plain):
    def __iter__(self):
        return Walker(self)


class ShufflesALarge(Counts):
    """Each epoch shuffles what the one before has made of an array that is too large to be given on."""

    def __init__(self, *settings):
        super().__init__(*settings)
        self.numbers = np.arange(1 << 20)

    def order(self):
        info = get_worker_info()
        np.random.default_rng(3).shuffle(self.numbers[: self.length])
        return self.numbers[: self.length].tolist()[info.id :: info.num_workers]


class ShufflesALargeList(Counts):
    """The same, of names in a list."""

    def __init__(self, *settings):
        super().__init__(*settings)
        self.names = [f"/somewhere/in/a/folder/{i:09}" for i in range(200_000)]

    def order(self):
        info = get_worker_info()
        names = self.names[: self.length]
        self.names[: self.length] = random.Random(3).sample(names, self.length)
        return [int(name[-9:]) for name in self.names[: self.length]][info.id :: info.num_workers]


class CountsBesideALock(Counts):
    """The count stands in something that cannot be pickled."""

    def __init__(self, *settings):
        super().__init__(*settings)
        self.inside = {"lock": threading.Lock(), "file": None, "epoch": 0}

    def __iter__(self):
        self.epoch = self.inside["epoch"]
        self.inside["epoch"] += 1
        self.inside["file"] = self.inside["file"] or open(os.devnull)
        return self.give(self.order())


class CountsBesideAFile(Counts):
    """The count can be pickled, and something beside it cannot."""

    file = None

    def __iter__(self):
        self.file = self.file or open(os.devnull)
        return super().__iter__()


COUNTING = [Counts, CountsWithState, CountsAtOnce, CountsAtItsStart, Holds]
# Of these, not all that changes can be given on.
UNFIT = [ShufflesALarge, ShufflesALargeList, CountsBesideALock, CountsBesideAFile]
KINDS = [Plain, Stays, Pending, GoesOn, Itself, Walked]
