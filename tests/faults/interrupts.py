"""Signal handlers that raise inside next() and iter(): `python -m tests.faults.interrupts 10000`.

An exception that a handler raises leaves next() wherever Python looks for signals. Whoever calls next() again gets the
very batch that is due, or LoaderTorn; after LoaderTorn a new iter() starts clean. Here a `Run` asks for batch after
batch, has some of the calls interrupted, and compares. It calls `iterator.__next__()`: nothing is polled between the
return of a Python function and the assignment, so no batch is lost there. (After `next(iterator)` it would be.)
"""

import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.data import Dataset

from holdfast import DataLoader, LoaderTorn, Policy

from ..interrupt import Alarm, Interrupt, free_locks, handler_raises, place_of, taken
from ..process.data import Images, Numbers, Stream

BATCHES, SIZE, WORKERS = 8, 3, 2
# Bytecodes of one next(), or more: in the middle of an epoch, with draws, with waits, with the end of workers.
CODES = (250, 500, 1200, 4500, 12_000)
# Of one iter(): with the processes that are there, and with new ones.
BEGIN_CODES = (4500, 35_000)


class Points:
    """What only pickle can carry."""

    def __init__(self, indices):
        self.indices = indices


def points(samples):
    return Points(list(samples))


class Bad(Dataset):
    """One sample raises."""

    def __len__(self):
        return BATCHES * SIZE

    def __getitem__(self, index):
        if index == 2 * SIZE + 1:
            raise ValueError("bad")
        return index


class Drawn:
    """A sampler of the user's: a generator, with a loop of its own."""

    def __iter__(self):
        for batch in range(BATCHES):
            yield [batch * SIZE + i for i in range(SIZE)]


def _loader(dataset: Any, **settings: Any) -> DataLoader[Any]:
    if "batch_sampler" not in settings:
        settings["batch_size"] = SIZE
    return DataLoader(dataset, timeout=settings.pop("timeout", 10), **settings)


def _rows() -> dict[str, Callable[[], DataLoader[Any]]]:
    whole, fork = BATCHES * SIZE, {"num_workers": WORKERS, "multiprocessing_context": "fork"}
    stay = {**fork, "persistent_workers": True}
    inline = {"num_workers": 0, "timeout": 0}
    return {
        "map": lambda: _loader(Numbers(whole), **fork),
        "map, persistent": lambda: _loader(Numbers(whole), **stay),
        "large": lambda: _loader(Images(whole, 170), **fork),
        "large, persistent": lambda: _loader(Images(whole, 170), **stay),
        "pickled": lambda: _loader(Numbers(whole), collate_fn=points, **stay),
        "a sampler of one's own": lambda: _loader(Numbers(whole), batch_sampler=Drawn(), **stay),
        "a sample raises": lambda: _loader(Bad(), **stay),
        "a sample is skipped": lambda: _loader(Bad(), policy=Policy(bad_sample="skip", max_bad=1.0), **stay),
        "stream": lambda: _loader(Stream(whole), **fork),
        "stream, persistent": lambda: _loader(Stream(whole), **stay),
        "no workers": lambda: _loader(Numbers(whole), **inline),
        "no workers, a sample raises": lambda: _loader(Bad(), **inline),
        "no workers, a sampler of one's own": lambda: _loader(Numbers(whole), batch_sampler=Drawn(), **inline),
        "no workers, stream": lambda: _loader(Stream(whole), **inline),
    }


ROWS = _rows()
BAD = "the sample's own error"
END = "the end"


def content(batch: Any) -> list[int]:
    """Which samples they are; raises where bytes are not theirs."""
    if isinstance(batch, Points):
        return batch.indices
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    images, indices = batch
    for image, index in zip(images, indices.tolist(), strict=True):
        assert bool((image == index).all()), f"the bytes of sample {index} are not its own"
    return indices.tolist()


def outcome(iterator: Any) -> Any:
    """One call of next(), not interrupted."""
    try:
        return content(iterator.__next__())
    except StopIteration:
        return END
    except ValueError:
        return BAD


class Run:
    """One loader, over many epochs. `counts`: what came of the calls that were interrupted."""

    def __init__(self, row: str) -> None:
        self.loader = ROWS[row]()
        self.counts: Counter[str] = Counter()
        self.kept: list[Any] = []
        self.expected = self._epoch()
        self._begin(None)

    def _epoch(self) -> list[Any]:
        iterator, found = iter(self.loader), []
        while True:
            found.append(outcome(iterator))
            if found[-1] == END:
                return found

    def _begin(self, interruption: AbstractContextManager[Any] | None) -> None:
        """A new epoch; an iter() that was interrupted is asked for again."""
        if interruption is not None:
            self.counts["iter"] += 1
            try:
                with interruption:
                    self.loader.__iter__()
            except (Alarm, KeyboardInterrupt):
                self.counts["iter interrupted"] += 1
        self.iterator = iter(self.loader)
        self.turn = 0

    def undisturbed(self, calls: int) -> None:
        """So many calls of next(), but not the last one of an epoch."""
        while calls and self.expected[self.turn] != END:
            got, due = outcome(self.iterator), self.expected[self.turn]
            assert got == due, f"{got} came and not {due}"
            self.turn += 1
            calls -= 1

    def interrupted(self, interruption: AbstractContextManager[Any], begin: AbstractContextManager[Any] | None) -> None:
        """The next call of next(), and the one after it if that was cut short; `begin`: for an iter() that follows."""
        due, got, cut = self.expected[self.turn], None, False
        try:
            try:
                with interruption:
                    got = self.iterator.__next__()
            except StopIteration:
                got = END
            except ValueError:
                got = BAD
        except (Alarm, KeyboardInterrupt):
            cut = True
        if got is not None:
            if not isinstance(got, str):
                self.kept = [*self.kept[-2:], got]
                got = content(got)
            self.counts["in time"] += 1
        elif cut:
            try:
                got = outcome(self.iterator)
                self.counts["given again"] += 1
            except LoaderTorn:
                self.counts["torn"] += 1
                self._always_torn()
        assert got is None or got == due, f"{got} came and not {due}"
        self.turn += 1
        if got is None or got == END:
            del self.kept[:]
            self._begin(begin)
            return

    def _always_torn(self) -> None:
        for _ in range(2):
            try:
                again = outcome(self.iterator)
            except LoaderTorn:
                continue
            raise AssertionError(f"{again} came after LoaderTorn")

    def finish(self) -> None:
        """A whole epoch, undisturbed. Workers that stay have all slots and letter boxes then."""
        del self.iterator, self.kept[:]
        assert self._epoch() == self.expected
        stayed = self.loader._iterator
        if stayed is not None:
            for line in stayed._host._channels:
                deadline = time.monotonic() + 10  # a stream that has ended may still be asked for more
                while len(line.slots._boxes) < stayed._factor * WORKERS and time.monotonic() < deadline:
                    stayed._host.wait(0.1)
                assert len(line.slots._boxes) == stayed._factor * WORKERS
                line.slots._reclaim()
                assert not line.slots.lent
        self.loader._iterator = None


def exact(row: str, times: int, seed: int) -> Counter[str]:
    """Each call with a signal at one exact moment."""
    chance, run = random.Random(seed), Run(row)
    for _ in range(times):
        error = chance.choice((Alarm, KeyboardInterrupt))
        begin = Interrupt(chance.randrange(1, chance.choice(BEGIN_CODES))) if chance.random() < 0.3 else None
        run.undisturbed(chance.randrange(BATCHES))
        with handler_raises(error):
            run.interrupted(Interrupt(chance.randrange(1, chance.choice(CODES))), begin)
    run.finish()
    return run.counts


@contextmanager
def timer(seconds: float) -> Iterator[None]:
    """SIGINT after that time, from the system; the handler raises."""

    def forward(number: int, frame: Any) -> None:
        nonlocal place
        place = place_of(frame)
        raise Alarm("time")

    place, locks = place_of(None), taken()
    before = signal.signal(signal.SIGALRM, forward)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
        free_locks(locks, *place)


def timed(row: str, times: int, seed: int) -> Counter[str]:
    """Each call with a timer of the system's."""
    chance, run = random.Random(seed), Run(row)
    for _ in range(times):
        run.undisturbed(chance.randrange(BATCHES))
        begin = timer(chance.uniform(1e-5, 2e-3)) if chance.random() < 0.3 else None
        run.interrupted(timer(chance.uniform(2e-5, 6e-4)), begin)
    run.finish()
    return run.counts


def main(times: int) -> int:
    failed = 0
    for way in (exact, timed):
        for row in ROWS:
            began = time.monotonic()
            try:
                said = dict(way(row, times // len(ROWS), 1))
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                failed += 1
                said = f"{type(error).__name__}: {error}"[:300]
            print(f"{way.__name__:6} {row:35} {time.monotonic() - began:6.1f} s  {said}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
