"""The ledger's rules, one by one: events in, actions out, no process anywhere."""

import signal
from typing import get_args

import pytest

from holdfast.core.ledger import Ledger
from holdfast.core.messages import (
    Allowed,
    Booted,
    BootFailed,
    Cause,
    Deliver,
    Did,
    Discard,
    Drawn,
    Drop,
    Event,
    Exhausted,
    Exited,
    Finished,
    Gone,
    Lost,
    Note,
    Opened,
    Place,
    Renew,
    Rested,
    Returned,
    Send,
    Short,
    Spared,
    Stage,
    Start,
    Stop,
    Why,
    Withdrawn,
)
from holdfast.core.supervisor import Story, replay
from holdfast.policy import Policy

from .ledgers import crash, kinds, opened


def test_opening_starts_every_worker_once():
    ledger = Ledger(3, 2, Policy())
    assert ledger.on(Opened(0.0)) == [Start(0, 1), Start(1, 1), Start(2, 1)]


def test_tasks_go_round():
    """As torch has it: 0, 1, 0, 1."""
    ledger = opened()
    sends = [ledger.on(Drawn(t, 4))[0] for t in range(4)]
    assert [s.worker for s in sends] == [0, 1, 0, 1]


def test_batches_are_delivered_in_turn():
    """Batch 1 waits for batch 0."""
    ledger = opened()
    for t in range(2):
        ledger.on(Drawn(t, 4))
    assert ledger.on(Finished(1, 1, 1, "b")) == []
    assert ledger.on(Finished(0, 1, 0, "a")) == [Deliver(0, "a"), Deliver(1, "b")]


def test_out_of_order_delivers_at_once():
    ledger = opened(in_order=False)
    for t in range(2):
        ledger.on(Drawn(t, 4))
    assert ledger.on(Finished(1, 1, 1, "b")) == [Deliver(1, "b")]


def test_what_an_earlier_life_says_is_discarded():
    """Rule 3: a late message of a dead life delivers nothing."""
    ledger = opened()
    ledger.on(Drawn(0, 4))
    ledger.on(crash(0, 1, 0))
    assert ledger.on(Finished(0, 1, 0, "late")) == [Discard("late")]
    assert ledger.on(Exited(0, 1, 2.0, Cause.EXIT, 0, None)) == ()
    assert Deliver(0, "good") in ledger.on(Finished(0, 2, 0, "good"))


def test_nothing_comes_twice():
    ledger = opened()
    ledger.on(Drawn(0, 4))
    ledger.on(Finished(0, 1, 0, "a"))
    assert ledger.on(Finished(0, 1, 0, "again")) == [Discard("again")]


def test_a_result_that_is_lost_before_its_turn_is_made_again():
    """Rule 11: with the attempt that it had, by whoever has a place, and before all that waits."""
    ledger = opened()
    sends = [ledger.on(Drawn(t, 4))[0] for t in range(4)]
    ledger.on(Finished(1, 1, 1, "b"))
    again = ledger.on(Gone(1))
    assert again == [sends[1]]
    assert ledger.on(Finished(0, 1, 0, "a")) == [Deliver(0, "a")]
    assert ledger.on(Finished(1, 1, 1, "c")) == [Deliver(1, "c")]


def test_a_lost_result_is_charged_to_nobody():
    """Neither a death nor a strike, and what was bad in it counts once."""
    ledger = opened(policy=Policy(bad_sample="skip", max_bad=0.3))
    for t in range(4):
        ledger.on(Drawn(t, 10))
    for _ in range(20):
        assert ledger.on(Finished(1, 1, 1, "b", bad=1)) == []
        assert kinds(ledger.on(Gone(1, bad=1))) == ["Send"]
    assert not ledger.stopped


def test_a_result_that_is_lost_outlives_its_worker():
    """Its worker's next life makes it again, or another."""
    ledger = opened()
    for t in range(4):
        ledger.on(Drawn(t, 4))
    ledger.on(Finished(1, 1, 1, "b"))
    ledger.on(crash(1, 1, 3))
    (send,) = ledger.on(Gone(1))
    assert (send.task, send.attempt, send.bad) == (1, 0, ())
    assert ledger.on(Finished(send.worker, send.life, 1, "c")) == []
    assert ledger.on(Finished(0, 1, 0, "a")) == [Deliver(0, "a"), Deliver(1, "c")]


def test_a_result_is_lost_in_vain_after_its_turn():
    """Whoever opens it is told; and what never had a result cannot lose it."""
    ledger = opened()
    for t in range(4):
        ledger.on(Drawn(t, 4))
    assert ledger.on(Gone(0)) == ()
    ledger.on(Finished(0, 1, 0, "a"))
    assert ledger.on(Gone(0)) == ()
    assert ledger.on(Gone(99)) == ()


def test_a_lost_result_goes_back_to_the_worker_whose_turn_it_is():
    """Where batch n is worker n % workers', no other may make it."""
    ledger = opened(round_robin=True)
    for t in range(4):
        ledger.on(Drawn(t, 4))
    ledger.on(Finished(1, 1, 1, "b"))
    ledger.on(Finished(1, 1, 3, "d"))
    assert [(send.worker, send.task) for send in ledger.on(Gone(1))] == [(1, 1)]


def test_a_death_on_nobody_knows_what_blames_no_sample():
    """A host need not know what a dead worker was on: all that it held is done again."""
    ledger = opened()
    for t in range(4):
        ledger.on(Drawn(t, 4))
    actions = ledger.on(Exited(0, 1, 1.0, Cause.SIGNAL, signal.SIGSEGV, None))
    assert kinds(actions) == ["Note", "Start", "Send", "Send"]
    assert all(action.attempt == 0 for action in actions[2:])


def test_a_death_on_nobody_knows_what_is_charged_to_the_first_task_that_may_not_be_safe_to_do_again():
    """Rule 10 before rule 1: it may have begun. The one behind it has not."""
    ledger = opened(workers=1, policy=Policy(bad_sample="raise"), in_order=False)
    ledger.on(Drawn(0, 1, 1))
    ledger.on(Drawn(1, 1, 1))
    note, *actions = ledger.on(Exited(0, 1, 1.0, Cause.SIGNAL, signal.SIGKILL, None))
    assert (note.strike, note.needed) == (1, 1)
    assert kinds(actions) == ["Deliver", "Start", "Send"]
    assert isinstance(actions[0].result, Lost)
    assert (actions[0].task, actions[2].task) == (0, 1)


def test_a_death_sends_all_its_tasks_again_and_charges_the_one_it_was_on():
    """Rule 1: task 2 had not begun."""
    ledger = opened()
    for t in range(4):
        ledger.on(Drawn(t, 4))
    actions = ledger.on(crash(0, 1, 0, 3))
    assert kinds(actions) == ["Note", "Start", "Send", "Send"]
    assert [(s.task, s.attempt) for s in actions if isinstance(s, Send)] == [(0, 1), (2, 0)]


def test_two_strikes_and_the_batch_is_lost_by_default():
    ledger = opened()
    ledger.on(Drawn(0, 4))
    ledger.on(crash(0, 1, 0, 3))
    actions = ledger.on(crash(0, 2, 0, 3))
    (delivered,) = [a for a in actions if isinstance(a, Deliver)]
    assert isinstance(delivered.result, Lost)
    assert delivered.result.position == 3
    assert delivered.result.attempts == 2


def test_skip_leaves_the_position_out():
    ledger = opened(policy=Policy(bad_sample="skip"))
    ledger.on(Drawn(0, 4))
    ledger.on(crash(0, 1, 0, 3))
    actions = ledger.on(crash(0, 2, 0, 3))
    assert [a.bad for a in actions if isinstance(a, Send)] == [(3,)]


def test_an_emptied_batch_is_dropped():
    ledger = opened(policy=Policy(bad_sample="skip", strikes=1))
    ledger.on(Drawn(0, 1))
    assert Drop(0) in ledger.on(crash(0, 1, 0, 0))


def test_a_death_between_batches_charges_nobody():
    ledger = opened()
    ledger.on(Drawn(0, 4))
    note = ledger.on(Exited(0, 1, 1.0, Cause.SIGNAL, 11, Place(-1, 0, Stage.IDLE, 0)))[0]
    assert isinstance(note, Note)
    assert (note.strike, note.needed) == (0, 0)


def test_collate_is_never_skipped():
    """A crash in collate belongs to no single sample: it is raised under any policy."""
    ledger = opened(policy=Policy(bad_sample="skip"))
    ledger.on(Drawn(0, 4))
    ledger.on(crash(0, 1, 0, 0, stage=Stage.COLLATE))
    actions = ledger.on(crash(0, 2, 0, 0, stage=Stage.COLLATE))
    assert any(isinstance(a, Deliver) and isinstance(a.result, Lost) for a in actions)


def test_a_death_in_getitems_is_tried_one_by_one():
    ledger = opened()
    ledger.on(Drawn(0, 4))
    actions = ledger.on(crash(0, 1, 0, 4, stage=Stage.FETCH_MANY))
    assert [a.alone for a in actions if isinstance(a, Send)] == [True]


def test_one_kill_from_outside_blames_nobody():
    ledger = opened(policy=Policy(strikes=1, bad_sample="skip"))
    ledger.on(Drawn(0, 4))
    actions = ledger.on(crash(0, 1, 0, 3, code=signal.SIGKILL, at=0.01, seconds=0.005))
    assert [a.bad for a in actions if isinstance(a, Send)] == [()]


def test_a_sample_that_is_killed_every_time_is_found():
    ledger = opened(policy=Policy(bad_sample="skip"))
    ledger.on(Drawn(0, 4))
    for life in range(1, 30):
        at = life * 0.03
        actions = ledger.on(crash(0, life, 0, 3, code=signal.SIGKILL, at=at, seconds=0.001))
        ledger.on(Booted(0, life + 1))
        if [a.bad for a in actions if isinstance(a, Send)] == [(3,)]:
            break
    assert 2 <= life <= 8


def killed_for_memory(ledger, worker, life, task, position=3):
    """Its sample takes all the time there is: so chance explains any number of deaths."""
    place = Place(task, position, Stage.FETCH, 10.0)
    return ledger.on(Exited(worker, life, life * 10.0, Cause.SIGNAL, signal.SIGKILL, place, for_memory=True))


def test_a_sample_that_takes_all_memory_is_bad_after_its_strikes():
    """Rule 5: the kernel says that it was for memory, and no other worker was at work."""
    ledger = opened(policy=Policy(bad_sample="skip"))
    ledger.on(Drawn(0, 4))
    note, *actions = killed_for_memory(ledger, 0, 1, 0)
    assert (note.did, note.strike, note.suspicion.alone) == (Did.SENT_AGAIN, 1, 1)
    assert [a.bad for a in actions if isinstance(a, Send)] == [()]
    note, *actions = killed_for_memory(ledger, 0, 2, 0)
    assert (note.did, note.strike, note.needed) == (Did.LEFT_OUT, 2, 2)
    assert note.suspicion[:2] == (2, 2) and note.suspicion.chance > 0.1, "it is not chance that decided"
    assert [a.bad for a in actions if isinstance(a, Send)] == [(3,)]


def test_memory_that_others_may_have_taken_is_no_strike():
    ledger = opened(policy=Policy(bad_sample="skip"))
    ledger.on(Drawn(0, 4))
    ledger.on(Drawn(1, 4))
    for life in range(1, 5):
        note = killed_for_memory(ledger, 0, life, 0)[0]
        assert (note.did, note.suspicion.here, note.suspicion.alone) == (Did.SENT_AGAIN, life, 0)
    ledger.on(Finished(1, 1, 1, "b"))  # now it has nothing to do
    assert killed_for_memory(ledger, 0, 5, 0)[0].suspicion.alone == 1
    assert killed_for_memory(ledger, 0, 6, 0)[0].did is Did.LEFT_OUT


def test_a_sample_that_gets_through_is_cleared_of_its_memory():
    ledger = opened(policy=Policy(bad_sample="skip"))
    ledger.on(Drawn(0, 4))
    killed_for_memory(ledger, 0, 1, 0, 2)
    killed_for_memory(ledger, 0, 2, 0, 3)
    assert killed_for_memory(ledger, 0, 3, 0, 2)[0].suspicion.alone == 1


def test_what_is_given_up_says_what_speaks_against_it():
    ledger = opened()
    ledger.on(Drawn(0, 4))
    killed_for_memory(ledger, 0, 1, 0)
    (delivered,) = [a for a in killed_for_memory(ledger, 0, 2, 0) if isinstance(a, Deliver)]
    assert (delivered.result.suspicion.here, delivered.result.suspicion.alone) == (2, 2)


def test_no_progress_ends_the_run():
    """Rule 6: idle deaths again and again."""
    ledger = opened(policy=Policy(restarts=3))
    for life in range(1, 10):
        actions = ledger.on(Exited(0, life, life, Cause.SIGNAL, 9, None))
        if any(isinstance(a, Stop) for a in actions):
            break
        ledger.on(Booted(0, life + 1))
    assert life == 4
    assert ledger.stopped


def test_progress_resets_the_budget():
    ledger = opened(policy=Policy(restarts=3))
    for life in range(1, 40):
        ledger.on(Drawn(life - 1, 4))
        actions = ledger.on(Exited(0, life, life, Cause.SIGNAL, 9, None))
        assert not any(isinstance(a, Stop) for a in actions)
        owner = next((a for a in actions if isinstance(a, Send)), None)
        worker, its_life = (owner.worker, owner.life) if owner else (1, 1)
        assert any(isinstance(a, Deliver) for a in ledger.on(Finished(worker, its_life, life - 1, "x")))


def test_a_worker_that_never_comes_up_ends_the_run():
    """Rule 7."""
    ledger = Ledger(1, 2, Policy())
    ledger.on(Opened(0.0))
    stops = 0
    for life in range(1, 10):
        actions = ledger.on(Exited(0, life, life, Cause.EXIT, 1, Place(-1, 0, Stage.BOOT, 0)))
        stops += any(isinstance(a, Stop) for a in actions)
    assert stops == 1


def test_a_boot_error_ends_the_run_with_it():
    ledger = Ledger(1, 2, Policy())
    ledger.on(Opened(0.0))
    assert ledger.on(BootFailed(0, 1, "why")) == [Stop(Why.BOOT, BootFailed(0, 1, "why"), 0, 0)]


def test_a_hang_on_the_first_sample_of_all_renews_the_keeper_once():
    """An inherited lock looks like this; the sample is not charged. The second time it is."""
    ledger = opened()
    ledger.on(Drawn(0, 4))
    place = Place(0, 0, Stage.FETCH, 5.0)
    actions = ledger.on(Exited(0, 1, 5.0, Cause.DEADLINE, 9, place))
    assert kinds(actions) == ["Note", "Renew", "Start", "Send", "Start"]
    assert Renew() not in ledger.on(Exited(0, 2, 10.0, Cause.DEADLINE, 9, place))


def test_a_hang_later_on_is_the_samples():
    ledger = opened()
    ledger.on(Drawn(0, 4))
    ledger.on(Drawn(1, 4))
    ledger.on(Finished(0, 1, 0, "a"))
    actions = ledger.on(Exited(1, 1, 5.0, Cause.DEADLINE, 9, Place(1, 0, Stage.FETCH, 5.0)))
    assert Renew() not in actions


def test_the_breaker_opens_on_too_many_bad():
    ledger = opened(policy=Policy(bad_sample="skip", max_bad=0.1))
    ledger.on(Drawn(0, 10))
    ledger.on(Drawn(1, 10))
    assert not any(isinstance(a, Stop) for a in ledger.on(Finished(0, 1, 0, "a", 5)))
    assert ledger.on(Finished(1, 1, 1, "b", 1)) == [Stop(Why.BAD, None, 6, 20, ((1, "b"),))]


def test_streams_take_turns_and_end_one_by_one():
    ledger = opened(streams=True)
    sends = [ledger.on(Drawn(t, 1))[0] for t in range(4)]
    assert [(s.worker, s.number) for s in sends] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    ledger.on(Finished(0, 1, 0, "a"))
    assert ledger.on(Exhausted(1, 1, 1, 0)) == [Drop(1)]
    assert ledger.on(Drawn(4, 1))[0].worker == 0
    assert ledger.open_streams
    ledger.on(Exhausted(0, 1, 2, 1))
    assert not ledger.open_streams
    assert ledger.on(Drawn(5, 1)) == [Drop(5)]


@pytest.mark.parametrize("made", [0, 2])
def test_a_stream_is_as_long_as_its_worker_says(made):
    """Another count is the result of the task at which it ended: it is raised, and no silent end."""
    ledger = opened(1, streams=True)
    ledger.on(Drawn(0, 1))
    ledger.on(Drawn(1, 1))
    ledger.on(Finished(0, 1, 0, "a"))
    assert ledger.on(Exhausted(0, 1, 1, made)) == [Deliver(1, Short(1, 0, made, 1))]


def test_a_stream_that_ends_before_what_it_was_asked_first_is_noticed():
    ledger = opened(1, streams=True)
    ledger.on(Drawn(0, 1))
    ledger.on(Drawn(1, 1))
    assert ledger.on(Exhausted(0, 1, 1, 1)) == [Drop(0), Deliver(1, Short(1, 0, 1, 0))]


def test_streams_that_were_left_are_known_with_what_was_asked_of_them():
    ledger = opened(streams=True)
    for task in range(3):
        ledger.on(Drawn(task, 1))
    ledger.on(Exhausted(1, 1, 1, 0))
    assert ledger.streams_left == {0: 2}


def test_a_stream_that_kills_is_given_up_under_any_policy():
    ledger = opened(streams=True, policy=Policy(bad_sample="skip"))
    ledger.on(Drawn(0, 4))
    ledger.on(crash(0, 1, 0, 2))
    actions = ledger.on(crash(0, 2, 0, 2))
    assert any(isinstance(a, Deliver) and isinstance(a.result, Lost) for a in actions)
    assert not any(isinstance(a, Start) for a in actions)


def test_a_replayed_story_gives_the_same_actions():
    """Rule 8."""
    events = [Opened(0.0), Booted(0, 1), Booted(1, 1), *(Drawn(t, 4) for t in range(4))]
    events += [crash(0, 1, 0, 1), Finished(1, 1, 1, None), crash(0, 2, 0, 1), Finished(0, 3, 2, None)]
    story = Story()
    first = Ledger(2, 2, Policy())
    actions = []
    for event in events:
        story.tell(event)
        actions += first.on(event)
    assert replay(story, Ledger(2, 2, Policy()).on) == actions
    assert [e.task for e in story.of_task(2)] == [2, 2]
    assert len(story.of_worker(0)) == 4


def test_the_story_gives_every_kind_of_event_back():
    """Two of them are kept as bare tuples: no other may be taken for one of those."""
    place = Place(0, 0, Stage.FETCH, 0.1)
    events = [
        Opened(0.0),
        Drawn(0, 4),
        Drawn(1, 1, 2),
        Withdrawn(1),
        Returned(0, 1, 1),
        Spared(0, 1),
        Rested(),
        Booted(0, 1),
        BootFailed(0, 1, None),
        Finished(0, 1, 0, None, 1),
        Gone(0, 1),
        Exhausted(0, 1, 0, 0),
        Exited(0, 1, 1.0, Cause.EXIT, 1, place),
        Allowed(3, False),
    ]
    assert {type(event) for event in events} == set(get_args(Event))
    story = Story()
    for event in events:
        story.tell(event)
    again = list(story)
    assert [(type(event), event) for event in again] == [(type(event), event) for event in events]


@pytest.mark.parametrize("cause", [Cause.KEEPER])
def test_losing_the_keeper_blames_nobody(cause):
    ledger = opened(policy=Policy(strikes=1))
    ledger.on(Drawn(0, 4))
    actions = ledger.on(Exited(0, 1, 1.0, cause, 0, Place(0, 1, Stage.FETCH, 0.1)))
    assert kinds(actions) == ["Note", "Start", "Send"]
