"""How many workers there shall be: the least of wish, room and berths; and the search for the best wish."""

from holdfast.core.autoscale import AGAIN_S, Autoscale
from holdfast.core.messages import Allowed


def test_the_least_of_wish_room_and_berths_counts():
    autoscale = Autoscale(8, 8, adapt=False)
    assert autoscale.allowed == Allowed(8, False)
    autoscale.room(5, True)
    assert autoscale.allowed == Allowed(5, True)
    autoscale.refused(3, at=100.0)
    assert autoscale.allowed == Allowed(3, True)
    autoscale.room(0, False)
    assert autoscale.allowed == Allowed(1, False), "somebody must work"


def test_a_refused_process_is_asked_for_again_later_and_less_and_less_often():
    autoscale = Autoscale(4, 4, adapt=False)
    autoscale.refused(2, at=0.0)
    autoscale.look(AGAIN_S - 1, 10, 0.0)
    assert autoscale.allowed.workers == 2
    autoscale.look(AGAIN_S, 10, 0.0)
    assert autoscale.allowed.workers == 4
    autoscale.refused(2, at=AGAIN_S)
    autoscale.look(2 * AGAIN_S, 10, 0.0)
    assert autoscale.allowed.workers == 2
    autoscale.look(3 * AGAIN_S, 10, 0.0)
    assert autoscale.allowed.workers == 4


def run(autoscale, rate_of, seconds=60.0):
    """Play a loader whose rate depends on the number of workers; gives the numbers that were tried."""
    at, batches, waited, tried = 0.0, 0.0, 0.0, []
    while at < seconds:
        at += 0.25
        workers = autoscale.allowed.workers
        batches += rate_of(workers) * 0.25
        waited += 0.25
        autoscale.look(at, int(batches), waited)
        tried.append(autoscale.allowed.workers)
    return tried


def test_the_search_finds_many_workers_for_samples_that_wait():
    autoscale = Autoscale(16, 2, adapt=True)
    tried = run(autoscale, lambda workers: 50 * workers)
    assert tried[-1] == 16
    assert tried.index(16) * 0.25 < 12, "it takes too long"


def test_the_search_stays_where_more_workers_bring_nothing():
    autoscale = Autoscale(16, 2, adapt=True)
    tried = run(autoscale, lambda workers: 50 * min(workers, 2))
    assert tried[-1] == 2
    assert sum(workers > 2 for workers in tried) < len(tried) / 4


def test_the_search_stops_behind_the_knee():
    """It doubles, so it may end with a few more than are needed; not with all there could be."""
    autoscale = Autoscale(16, 2, adapt=True)
    tried = run(autoscale, lambda workers: 50 * min(workers, 5))
    assert 5 <= tried[-1] <= 8


def test_the_search_keeps_to_what_fits():
    autoscale = Autoscale(16, 2, adapt=True)
    autoscale.room(4, False)
    assert max(run(autoscale, lambda workers: 50 * workers)) == 4


def test_what_does_not_fit_for_a_while_is_wished_for_again():
    """Where memory is unknown, one worker makes the first batch alone: that says nothing about how many are good."""
    autoscale = Autoscale(16, 4, adapt=True)
    autoscale.room(1, False)
    assert set(run(autoscale, lambda workers: 50 * workers, seconds=1.0)) == {1}
    autoscale.room(16, False)
    assert autoscale.allowed.workers == 4


def test_a_try_that_memory_cut_short_proves_nothing():
    autoscale = Autoscale(16, 4, adapt=True)
    at, batches = 0.0, 0
    while autoscale.allowed.workers == 4:
        at, batches = at + 0.25, batches + 50
        autoscale.look(at, batches, at)
    assert autoscale.allowed.workers == 8
    autoscale.room(6, False)
    for _ in range(20):
        at, batches = at + 0.25, batches + 5
        autoscale.look(at, batches, at)
        assert autoscale.allowed.workers <= 6
    assert autoscale.wish > 1, "six are slow because the machine is; nobody compared them with anything"
