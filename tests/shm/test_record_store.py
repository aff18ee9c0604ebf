"""The store: bounded, shared, and never a wrong byte, whoever writes, reads, evicts or dies."""

import gc
import mmap
import os
import pickle
import random
import signal
import threading
import time

import pytest

from holdfast.shm import record_store as store_module
from holdfast.shm.record_store import Put, RecordStore, room_for
from holdfast.shm.shared_file import BODY, SEATS, SharedFile

MIB = 1 << 20


def record(index, size, salt=0):
    """Parts that prove themselves: every 8 bytes say index and salt, and the first part says the size."""
    pattern = (index << 32 | salt).to_bytes(8, "little")
    return [memoryview(f"{index} {salt} {size}".encode()), memoryview(pattern * (size // 8))]


def check(index, parts):
    named, salt, size = map(int, bytes(parts[0]).split())
    assert named == index
    assert parts[1] == (index << 32 | salt).to_bytes(8, "little") * (size // 8)


def test_what_is_put_is_found_and_nothing_else():
    store = RecordStore(100, 4 * MIB, "never")
    assert store.put(7, record(7, 1000)) is Put.STORED
    assert store.put(7, record(7, 1000, salt=1)) is Put.THERE
    check(7, store.get(7))
    assert store.get(8) is None
    assert store.held() == 1


def test_a_copy_belongs_to_the_reader():
    store = RecordStore(4, 4 * MIB, "never")
    store.put(0, record(0, 1000))
    store.get(0)[1][:] = bytes(1000)
    check(0, store.get(0))


def test_never_keeps_what_came_first():
    store = RecordStore(1000, 2 * MIB, "never")
    outcomes = [store.put(i, record(i, 10_000)) for i in range(400)]
    kept = outcomes.index(Put.NO_ROOM)
    assert kept * 10_000 > 0.9 * store.room
    assert set(outcomes[kept:]) == {Put.NO_ROOM}
    assert store.full
    assert store.held() == kept
    for i in range(400):
        parts = store.get(i)
        assert (parts is None) == (i >= kept)
        if parts is not None:
            check(i, parts)


def test_one_that_is_smaller_still_finds_room():
    store = RecordStore(1000, 2 * MIB, "never")
    number = 0
    while store.put(number, record(number, 100_000)) is Put.STORED:
        number += 1
    assert store.put(number, record(number, 800)) is Put.STORED


def test_oldest_keeps_what_came_last():
    store = RecordStore(1000, 2 * MIB, "oldest")
    for i in range(1000):
        assert store.put(i, record(i, 10_000)) is Put.STORED
    held = [i for i in range(1000) if store.get(i) is not None]
    assert held == list(range(held[0], 1000))
    assert len(held) * 10_000 > 0.7 * store.room
    assert store.held() == len(held)
    assert store.used() <= store.room


def test_what_is_too_large_is_refused():
    store = RecordStore(10, 4 * MIB, "oldest")
    assert store.put(0, record(0, 5 * MIB)) is Put.TOO_LARGE
    assert store.put(1, record(1, 3 * MIB)) is Put.STORED  # one segment: the first record decides
    check(1, store.get(1))


def test_segments_are_cut_to_what_they_hold():
    """Few large records, or many small ones: little is left empty at the ends."""
    for size, room in ((40_000, 64 * MIB), (900_000, 64 * MIB), (9_000_000, 256 * MIB)):
        store = RecordStore(100_000, room, "never")
        number = 0
        while store.put(number, record(number, size)) is Put.STORED:
            number += 1
        assert number * size > 0.8 * store.room, (size, number)


def test_generations_that_come_round_are_told_apart():
    """The directory's word knows 26 bits of them."""
    store = RecordStore(4, MIB, "oldest")
    store.put(0, record(0, 1000))
    old = store._directory[0]
    segment = old >> 58
    store._generations[segment] += 1 << 26
    store._directory[0] = old
    assert store.get(0) is None


def test_an_uncommitted_record_leaves_nothing(monkeypatch):
    """Torn at each step on the way."""
    for step in ("_write", "_commit"):
        store = RecordStore(10, 4 * MIB, "never")
        store.put(0, record(0, 5000))

        class Torn(Exception):
            pass

        def tear(*_):
            raise Torn

        with monkeypatch.context() as patch:
            patch.setattr(RecordStore, step, tear)
            with pytest.raises(Torn):
                store.put(1, record(1, 5000))
        assert store.get(1) is None
        assert store.put(2, record(2, 5000)) is Put.STORED
        assert store.put(1, record(1, 5000)) is Put.STORED
        for i in range(3):
            check(i, store.get(i))


def test_a_torn_record_is_not_believed():
    """Whatever its header says: an earlier life of the segment, or the middle of a write."""
    store = RecordStore(10, 4 * MIB, "never")
    store.put(3, record(3, 5000))
    head = bytes(store._data[:32])
    for at in range(32):
        for value in (0, 1, 127, 255):
            store._data[at] = value
            parts = store.get(3)
            assert parts is None or sum(map(len, parts)) < store.room
            store._data[:32] = head
    check(3, store.get(3))


def test_a_store_of_nothing():
    assert RecordStore(0, MIB, "never").held() == 0


def test_room_is_all_in_all():
    assert room_for(1_000_000, 4 * MIB) < 0
    store = RecordStore(1000, MIB, "never")
    assert os.fstat(store.shared._fd).st_size == MIB
    assert store.room <= MIB - BODY - 8000


# Processes ----------------------------------------------------------------------------------------------------------


def forked(work):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def joined(pids):
    return [os.waitpid(pid, 0)[1] for pid in pids]


def test_a_child_writes_and_the_parent_finds():
    store = RecordStore(10, 4 * MIB, "never")
    assert joined([forked(lambda: store.put(3, record(3, 5000)))]) == [0]
    check(3, store.get(3))


def test_a_claim_excludes_others_and_ends_with_its_process():
    shared = SharedFile("test", 0)
    read, write = os.pipe()

    def hold():
        assert shared.claim(1000)
        os.write(write, b"x")
        time.sleep(60)

    pid = forked(hold)
    os.read(read, 1)
    assert not shared.claim(1000)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert shared.claim(1000)
    shared.release(1000)
    os.close(read)
    os.close(write)


def test_a_child_does_not_inherit_claims():
    shared = SharedFile("test", 0)
    assert shared.claim(1000)

    def look():
        assert not shared.claim(1000)
        assert shared.seat == 1

    assert joined([forked(look)]) == [0]
    assert shared.seat == 0


def test_two_copies_in_one_process_exclude_each_other():
    """And when one goes, the other's claims stay: the older kind of record lock would drop them."""
    shared = SharedFile("test", 64)
    again = SharedFile.find(pickle.loads(pickle.dumps(shared.address)))
    assert shared.claim(1000)
    assert not again.claim(1000)
    del again
    gc.collect()
    third = SharedFile.find(shared.address)
    assert not third.claim(1000)


def test_an_address_that_leads_nowhere_finds_nothing():
    shared = SharedFile("test", 64)
    address = shared.address
    assert SharedFile.find(address._replace(token=bytes(16))) is None
    assert SharedFile.find(address._replace(size=address.size + 1)) is None
    assert SharedFile.find(address._replace(pid=2**22 - 1)) is None
    assert SharedFile.find(address._replace(fd=0)) is None
    assert SharedFile.find(address) is not None
    del shared
    gc.collect()
    assert SharedFile.find(address) is None


def test_counts_of_the_dead_stay():
    shared = SharedFile("test", 0)

    def work():
        for _ in range(100):
            shared.count(2)
        shared.note(7)

    for _ in range(3):
        assert joined([forked(work) for _ in range(4)]) == [0] * 4
    shared.count(2)
    assert shared.total(2) == 1201
    assert shared.now() == 0  # of the living
    shared.note(5)
    assert shared.now() == 5


def test_more_processes_than_seats():
    shared = SharedFile("test", 0)
    others = [SharedFile.find(shared.address) for _ in range(SEATS)]
    assert others[-1].seat == -1
    others[-1].count(0)
    assert others[-1].total(0) == 1
    assert shared.total(0) == 0


def die_with_half_a_record(self, segment, index, parts, sizes, used):
    half = [part[: len(part) // 2] for part in parts]
    _write(self, segment, index, half, sizes, used)
    os.kill(os.getpid(), signal.SIGKILL)


def die_before_it_counts(self, index, segment, offset):
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_a_segment_neither_full_nor_empty(self, segment):
    self._generations[segment] += 1
    os.kill(os.getpid(), signal.SIGKILL)


_write = RecordStore._write


@pytest.mark.parametrize(
    ("where", "die"),
    [
        ("_write", die_with_half_a_record),
        ("_commit", die_before_it_counts),
        ("_begin", die_with_a_segment_neither_full_nor_empty),
    ],
)
def test_a_writer_killed_in_the_middle_leaves_nothing(where, die, monkeypatch):
    store = RecordStore(400, 2 * MIB, "oldest")
    for i in range(100):
        store.put(i, record(i, 30_000))

    def child():
        monkeypatch.setattr(RecordStore, where, die)
        for i in range(200, 300):
            store.put(i, record(i, 30_000))

    assert joined([forked(child)]) == [signal.SIGKILL]
    for i in range(400):
        parts = store.get(i)
        assert parts is None or (i < 300 if where == "_begin" else i < 100)
        if parts is not None:
            check(i, parts)
    for i in range(300, 400):
        assert store.put(i, record(i, 30_000)) is Put.STORED
    found = [i for i in range(400) if store.get(i) is not None]
    assert len(found) * 30_000 > 0.6 * store.room
    for i in found:
        check(i, store.get(i))


def test_no_part_of_a_core_dump():
    shared = SharedFile("dump", 4096)
    with open("/proc/self/smaps") as file:
        mapping = file.read().split("memfd:holdfast-dump")[1]
    flags = next(line for line in mapping.splitlines() if line.startswith("VmFlags"))
    assert " dd " in f"{flags} "
    assert shared.seat == 0


def test_somebody_closed_all_descriptors_after_the_fork():
    """What is mapped is still read; nothing is written, and nobody else's descriptor is touched."""
    store = RecordStore(10, 4 * MIB, "never")
    store.put(1, record(1, 5000))

    def daemon():
        os.closerange(3, store.shared._fd + 1)
        while (fd := os.open("/dev/null", os.O_RDONLY)) < store.shared._fd:
            pass
        assert fd == store.shared._fd
        check(1, store.get(1))
        assert store.put(2, record(2, 5000)) is Put.BUSY
        store.shared.count(0)
        assert os.readlink(f"/proc/self/fd/{fd}") == "/dev/null"

    assert joined([forked(daemon)]) == [0]


@pytest.mark.parametrize("evict", ["never", "oldest"])
def test_racing_processes_never_see_a_wrong_byte(evict):
    """Writers and readers in a store far too small for all, for two seconds or more; writers are killed in between."""
    indices, sizes = 300, (200, 5000, 40_000)
    store = RecordStore(indices, 2 * MIB, evict)
    over, latest = mmap.mmap(-1, 1), time.monotonic() + 60

    def work(seed):
        chance = random.Random(seed)
        found = 0
        while (not over[0] or found <= 100) and time.monotonic() < latest:
            index = chance.randrange(indices)
            parts = store.get(index)
            if parts is None:
                store.put(index, record(index, chance.choice(sizes), chance.getrandbits(20)))
            else:
                check(index, parts)
                found += 1
        assert found > 100

    pids = [forked(lambda seed=seed: work(seed)) for seed in range(4)]
    chance = random.Random(99)
    killed = 0
    until = time.monotonic() + 2
    seed = 100
    while time.monotonic() < until or (killed <= 20 and time.monotonic() < latest):
        victim = forked(lambda seed=seed: work(seed))
        seed += 1
        time.sleep(chance.uniform(0.005, 0.05))
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        killed += 1
    over[0] = 1
    assert joined(pids) == [0] * 4
    over.close()
    assert killed > 20
    for index in range(indices):
        parts = store.get(index)
        if parts is not None:
            check(index, parts)
    assert store.used() <= store.room
    # No claim was left behind: everything can be written to.
    for segment in range(store._head[0]):
        assert store.shared.claim(store_module._FIRST_SEGMENT + segment)
        store.shared.release(store_module._FIRST_SEGMENT + segment)


def test_racing_threads_never_see_a_wrong_byte():
    store = RecordStore(100, MIB, "oldest")
    failures = []

    def work(seed):
        chance = random.Random(seed)
        try:
            for _ in range(1500):
                index = chance.randrange(100)
                parts = store.get(index)
                if parts is None:
                    store.put(index, record(index, 40_000, chance.getrandbits(20)))
                else:
                    check(index, parts)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_reader_that_is_overtaken_finds_nothing(monkeypatch):
    """The segment is evicted and written over while the record is being copied."""
    store = RecordStore(10, MIB, "oldest")
    store.put(0, record(0, 100_000))
    copy = RecordStore._copy

    def slow(self, *where):
        parts = copy(self, *where)
        monkeypatch.setattr(RecordStore, "_copy", copy)
        for i in range(1, 10):
            for _ in range(3):
                self._directory[i] = 0
                self.put(i, record(i, 100_000))
        return parts

    monkeypatch.setattr(RecordStore, "_copy", slow)
    assert store.get(0) is None


def test_descriptor_and_mapping_go_with_it():
    def count():
        gc.collect()
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), maps.read().count("memfd:holdfast-cache")

    before = count()
    for _ in range(5):
        store = RecordStore(10, 4 * MIB, "never")
        store.put(0, record(0, 100))
        del store
    assert count() == before
