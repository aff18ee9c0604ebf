"""What a worker is told of each task: the same bytes for whoever loads it, and no epoch that is short in silence."""

import pickle

import pytest

from holdfast import LoaderTorn, Policy, StreamBroken
from holdfast.core.dispatch import SPARES
from holdfast.core.host import StreamEnd
from holdfast.core.messages import Send, Short
from holdfast.loader.batch_requests import BatchRequests, fewer_items, lasting, missing, short
from holdfast.loader.stream import WHOLE, Sure

SEED, EPOCH, FIRST = 11, 3, 100


def begun(bad_sample="raise", *, marks=(0, 0), iterable=False, auto_collation=True):
    requests = BatchRequests(Policy(bad_sample=bad_sample), marks, iterable=iterable, auto_collation=auto_collation)
    requests.begin(SEED, EPOCH, FIRST, None)
    return requests


def send(task=FIRST, *, worker=0, life=1, attempt=0, bad=(), alone=False, number=0, stay=-1, deadly=()):
    return Send(worker, life, task, attempt, bad, alone, number, stay, deadly)


def told(requests, **how):
    return pickle.loads(requests.payload(send(**how)))


# Of a map-style dataset ----------------------------------------------------------------------------------------------


def test_a_worker_is_told_the_seed_the_number_and_the_indices():
    requests = begun()
    assert [requests.add(FIRST + i, [2 * i, 2 * i + 1]) for i in range(2)] == [2, 2]
    assert told(requests, task=FIRST + 1) == (SEED, 1, 0, -1, [2, 3], None, False, [])


def test_another_worker_is_told_the_same_bytes():
    requests = begun()
    requests.add(FIRST, [4, 5])
    assert requests.payload(send(worker=0)) == requests.payload(send(worker=1, life=9))


def test_a_retry_asks_for_what_the_sampler_gave_then():
    """A sampler may fill one list again and again."""
    requests, drawn = begun(), [1, 2]
    requests.add(FIRST, drawn)
    drawn[:] = [8, 9]
    assert told(requests, attempt=1)[4] == [1, 2]


def test_indices_may_come_from_an_iterator():
    requests = begun()
    assert requests.add(FIRST, iter([7, 8, 9])) == 3
    assert told(requests)[4] == [7, 8, 9]


def test_without_auto_collation_a_task_is_one_sample():
    requests = begun(auto_collation=False)
    assert requests.add(FIRST, [1, 2, 3]) == 1
    assert told(requests)[4] == [1, 2, 3]


def test_a_retry_says_which_attempt_it_is_and_how_to_load():
    requests = begun()
    requests.add(FIRST, [4, 5])
    assert told(requests, attempt=2, alone=True, stay=1) == (SEED, 0, 2, 1, [4, 5], None, True, [], (), ())


def test_a_sample_that_kills_is_left_out_and_the_others_keep_their_positions():
    requests = begun("skip")
    requests.add(FIRST, [4, 5, 6, 7])
    _, _, _, _, indices, positions, *_ = told(requests, attempt=1, bad=(1,))
    assert (indices, positions) == ([4, 6, 7], [0, 2, 3])


def test_what_was_left_out_is_not_counted():
    requests = begun("skip")
    requests.add(FIRST, [4, 5, 6, 7])
    requests.add(FIRST + 1, [8, 9])
    requests.payload(send(attempt=1, bad=(1,)))
    requests.payload(send(attempt=2, bad=(1, 3)))
    assert [requests.take(FIRST), requests.take(FIRST + 1)] == [2, 2]


def test_a_sample_that_kills_is_asked_for_where_none_may_be_left_out():
    requests = begun()
    requests.add(FIRST, [4, 5])
    assert told(requests, attempt=1, bad=(1,))[4:6] == ([4, 5], None)
    assert requests.take(FIRST) == 2


def test_spares_are_samples_of_this_epoch_and_the_same_in_every_run():
    def spares(seed=SEED):
        requests = begun("replace")
        requests.begin(seed, EPOCH, FIRST, None)
        requests.add(FIRST, [4, 5])
        requests.add(FIRST + 1, [6, 7])
        return [told(requests, task=FIRST + i)[7] for i in range(2)]

    first, second = spares()
    assert len(first) == len(second) == SPARES
    assert set(first) <= {4, 5} and set(second) <= {4, 5, 6, 7}
    assert [first, second] == spares() != spares(SEED + 1)


def test_a_retry_names_the_spares_that_kill():
    requests = begun("replace")
    requests.add(FIRST, [4, 5])
    assert told(requests, attempt=1, bad=(1,), deadly=(2,))[-2:] == ((1,), (2,))


def test_a_spare_is_what_the_sampler_gave_then():
    requests, drawn = begun("replace"), [[1], [2]]
    requests.add(FIRST, drawn)
    drawn[0][0] = drawn[1][0] = 99
    requests.add(FIRST + 1, [[3]])
    assert [99] not in told(requests, task=FIRST + 1)[7]


@pytest.mark.parametrize("indices", [[1, "a", b"b", 2.0, True], [(1, 2)], [[1], [2]]])
def test_indices_last(indices):
    assert lasting(indices) == indices


# Which sample that was -----------------------------------------------------------------------------------------------


def test_a_sample_is_named_with_all_that_loads_it_again():
    requests = begun()
    requests.add(FIRST, [4, 5])
    requests.add(FIRST + 1, [6, 7, 8])
    index, again = requests.sample_of(FIRST + 1, 1)
    assert index == 7
    assert (again.seed, again.batch, again.indices, again.position) == (SEED, 1, (6, 7), 1)


def test_the_sample_of_the_batch_that_came_last_can_still_be_named():
    requests = begun()
    requests.add(FIRST, [4, 5])
    requests.add(FIRST + 1, [6, 7])
    requests.take(FIRST)
    assert requests.sample_of(FIRST, 1)[0] == 5
    requests.take(FIRST + 1)
    assert requests.sample_of(FIRST, 1) == (None, None)


def test_a_sample_in_the_place_of_another_is_named():
    requests = begun("replace")
    requests.add(FIRST, [4, 5])
    spares = told(requests)[7]
    index, again = requests.sample_of(FIRST, 1, spare=3)
    assert index == spares[2]
    assert again.indices == (4, spares[2])


@pytest.mark.parametrize("position", [-1, 2])
def test_there_is_no_sample_at_such_a_position(position):
    requests = begun()
    requests.add(FIRST, [4, 5])
    assert requests.sample_of(FIRST, position) == (None, None)


def test_an_index_that_cannot_be_read_again_is_not_named():
    requests = begun()
    requests.add(FIRST, [_Unreadable()])
    assert requests.sample_of(FIRST, 0) == (None, None)


class _Unreadable:
    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise ValueError("not here")


# Of an iterable dataset ----------------------------------------------------------------------------------------------


def streams(marks=(0, 0)):
    return begun(iterable=True, marks=marks)


def place(requests, worker, life):
    """What a life is told of where its stream is: (fingerprint, snapshot, epochs left, what whole ones made of it)."""
    requests.add(FIRST, [None] * 4)
    return told(requests, worker=worker, life=life, number=5)[-1]


def test_a_life_is_told_once_where_its_stream_is():
    requests = streams()
    requests.add(FIRST, [None] * 4)
    assert told(requests, number=7) == (SEED, EPOCH, 7, 4, None, (0, None, (), b""))
    assert told(requests, number=8)[-1] is None
    assert told(requests, life=2, number=8)[-1] is not None
    assert told(requests, worker=1, number=0)[-1] is not None


def test_the_next_life_is_told_the_mark_and_the_last_snapshot():
    requests = streams(marks := [0, 0])
    place(requests, 1, 1)
    marks[1] = 77
    requests.snapshots[1] = (3, 12, 70, b"state")
    assert place(requests, 1, 2) == (77, (3, 12, 70, b"state"), (), b"")
    assert place(requests, 0, 2) == (0, None, (), b"")


def test_an_epoch_forgets_the_snapshots_of_the_one_before():
    requests = streams()
    requests.snapshots[1] = (3, 12, 70, b"state")
    requests.begin(SEED + 1, EPOCH + 1, FIRST, None)
    assert place(requests, 1, 1) == (0, None, (), b"")


def test_an_epoch_that_was_left_is_gone_through_again_by_the_next_life():
    requests = streams([50, 60])
    requests.snapshots[1] = (3, 12, 55, b"state")
    requests.leave({0: 4, 1: 6}, {})
    requests.begin(SEED + 1, EPOCH + 1, FIRST, None)
    assert place(requests, 0, 2)[2] == [(SEED, 4, 50, None)]
    assert place(requests, 1, 2)[2] == [(SEED, 6, 60, (3, 12, 55, b"state"))]


@pytest.mark.parametrize("end", [StreamEnd.NOT_KNOWN, StreamEnd.LOST])
def test_a_whole_epoch_of_which_nothing_is_known_is_gone_through_again(end):
    requests = streams()
    requests.leave({}, {0: end, 1: b""})
    requests.begin(SEED + 1, EPOCH + 1, FIRST, None)
    assert place(requests, 0, 2)[2] == [(SEED, WHOLE, 0, None)]
    assert place(requests, 1, 2)[2] == ()


def test_a_dataset_that_whole_epochs_leave_as_it_was_is_not_gone_through_again():
    requests = streams()
    requests.leave({}, {0: b"", 1: b""})
    requests.begin(SEED + 1, EPOCH + 1, FIRST, None)
    requests.leave({}, {0: StreamEnd.NOT_KNOWN, 1: StreamEnd.LOST})
    requests.begin(SEED + 2, EPOCH + 2, FIRST, None)
    assert place(requests, 0, 2)[2] == ()
    assert place(requests, 1, 2)[2] == [(SEED + 1, WHOLE, 0, None)]


def test_what_a_whole_epoch_made_of_the_dataset_takes_the_place_of_the_epochs_before():
    requests = streams()
    requests.leave({0: 4, 1: 4}, {})
    requests.begin(SEED + 1, EPOCH + 1, FIRST, None)
    requests.leave({}, {0: b"moved"})
    requests.begin(SEED + 2, EPOCH + 2, FIRST, None)
    assert place(requests, 0, 2)[2:] == ((), b"moved")


@pytest.mark.parametrize(
    ("moved", "left", "packed"),
    [
        (None, 1, b""),
        ((b"moved", Sure.SEEN), 0, b"moved"),
        ((b"", Sure.SEEN), 0, b""),
        ((b"moved", Sure.LOST), 1, b""),
        ((b"moved", Sure.NOT_SEEN), 0, b"moved"),
    ],
)
def test_the_first_batch_of_an_epoch_brings_what_the_ones_before_made_of_the_dataset(moved, left, packed):
    requests = streams()
    requests.leave({0: 4, 1: 4}, {})
    requests.begin(SEED + 1, EPOCH + 1, FIRST, None)
    requests.began(0, moved)
    _, _, epochs, there = place(requests, 0, 2)
    assert (len(epochs), there) == (left, packed)


def test_what_could_not_all_be_seen_does_not_replace_an_epoch_with_a_snapshot():
    requests = streams()
    for seed in (SEED, SEED + 1):
        requests.begin(seed, EPOCH, FIRST, None)
        requests.snapshots[0] = (3, 12, 70, b"state")
        requests.leave({0: 4, 1: 4}, {})
    requests.begin(SEED + 2, EPOCH + 2, FIRST, None)
    requests.began(0, (b"moved", Sure.NOT_SEEN))
    assert place(requests, 0, 2)[2:] == ([(SEED + 1, 4, 0, (3, 12, 70, b"state"))], b"")


# Whole ---------------------------------------------------------------------------------------------------------------


def test_an_epoch_that_is_whole_is_no_error():
    assert missing(10, 7, 2, 1) is None


@pytest.mark.parametrize("counts", [(10, 9, 0, 0), (10, 10, 1, 0), (10, 9, 1, 1)])
def test_an_epoch_with_too_few_or_too_many_batches_is_an_error(counts):
    error = missing(*counts)
    assert type(error) is LoaderTorn
    assert f"{counts[0]} batches that were asked for, {counts[1]} came" in str(error)


def test_a_stream_that_made_more_batches_than_came_is_an_error():
    error = short(Short(FIRST, 1, 9, 8))
    assert type(error) is StreamBroken
    assert "worker 1's stream ended after 9 batches by its own count, and 8 came" in str(error)


def test_items_of_a_stream_are_compared_where_they_are_known():
    assert fewer_items({0: 12, 1: 12}, {0: 12}) is None
    error = fewer_items({0: 12, 1: 12}, {0: 12, 1: 11})
    assert type(error) is StreamBroken
    assert "worker 1's stream gave 12 items by its own count, and 11 came" in str(error)
