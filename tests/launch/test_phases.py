"""The phases of a rank group: which moves there are, and when each comes. No process, no clock."""

import itertools

import pytest

from holdfast.launch.phases import KILLED_S, LAST_CALL_S, MOVES, STOP_S, GroupPhase, GroupPhases


def at(phase):
    """A group that has come to this phase, at second 100."""
    phases = GroupPhases()
    ways = {
        GroupPhase.RUNNING: (),
        GroupPhase.LAST_CALL: (GroupPhase.LAST_CALL,),
        GroupPhase.INTERRUPTED: (GroupPhase.INTERRUPTED,),
        GroupPhase.STOPPING: (GroupPhase.LAST_CALL, GroupPhase.STOPPING),
        GroupPhase.KILLING: (GroupPhase.LAST_CALL, GroupPhase.STOPPING, GroupPhase.KILLING),
        GroupPhase.OVER: (GroupPhase.OVER,),
    }
    for step in ways[phase]:
        phases.move(step, 100.0)
    return phases


def walk(phases, *, failed=False, unwanted=False, grace_s=None, until=1000):
    """(second, phase) for each phase that begins, when somebody looks ten times a second from second 100 on."""
    begun = []
    for tenth in range(1000, until * 10):
        phase = phases.advance(tenth / 10, failed=failed, unwanted=unwanted, grace_s=grace_s)
        if phase is not None:
            begun.append((tenth / 10, phase))
    return begun


@pytest.mark.parametrize(("before", "to"), list(itertools.product(GroupPhase, GroupPhase)))
def test_only_the_moves_of_the_table_are_allowed(before, to):
    phases = at(before)
    if to in MOVES[before]:
        phases.move(to, 101.0)
        assert phases.phase is to
    else:
        with pytest.raises(AssertionError, match=f"no move leads from {before.name} to {to.name}"):
            phases.move(to, 101.0)
        assert phases.phase is before


def test_every_phase_has_its_row_and_a_way_to_the_end():
    assert set(MOVES) == set(GroupPhase)
    for phase, moves in MOVES.items():
        assert (GroupPhase.OVER in moves) is (phase is not GroupPhase.OVER)


def test_nothing_happens_while_no_rank_fails():
    assert walk(GroupPhases()) == []


def test_after_a_failure_the_others_get_a_last_call_then_sigterm_then_sigkill():
    begun = walk(GroupPhases(), failed=True)
    assert [phase for _, phase in begun] == [
        GroupPhase.LAST_CALL,
        GroupPhase.STOPPING,
        GroupPhase.KILLING,
        GroupPhase.OVER,
    ]
    seconds = [second for second, _ in begun]
    assert [after - before for before, after in itertools.pairwise(seconds)] == [LAST_CALL_S, STOP_S, KILLED_S]


def test_a_grace_period_counts_before_sigterm_and_again_after_it():
    begun = walk(GroupPhases(), failed=True, grace_s=7.0)
    assert begun == [
        (100.0, GroupPhase.LAST_CALL),
        (107.0, GroupPhase.STOPPING),
        (114.0, GroupPhase.KILLING),
        (114.0 + KILLED_S, GroupPhase.OVER),
    ]


def test_ctrl_c_leaves_the_ranks_a_moment_to_end_by_themselves():
    begun = walk(GroupPhases(), unwanted=True, grace_s=5.0)
    assert begun[:3] == [
        (100.0, GroupPhase.INTERRUPTED),
        (100.0 + LAST_CALL_S, GroupPhase.STOPPING),
        (105.0 + LAST_CALL_S, GroupPhase.KILLING),
    ]


@pytest.mark.parametrize("before", [GroupPhase.RUNNING, GroupPhase.LAST_CALL])
def test_ctrl_c_goes_before_a_failure(before):
    phases = at(before)
    assert phases.advance(100.0, failed=True, unwanted=True, grace_s=20.0) is GroupPhase.INTERRUPTED
    assert phases.deadline(20.0) == 100.0 + LAST_CALL_S


def test_a_second_ctrl_c_kills_at_once():
    """It comes as a grace period of no seconds, in whichever phase the ranks are."""
    for phase in (GroupPhase.RUNNING, GroupPhase.LAST_CALL, GroupPhase.INTERRUPTED, GroupPhase.STOPPING):
        phases = at(phase)
        for _ in range(3):
            phases.advance(100.0, failed=False, unwanted=True, grace_s=0.0)
        assert phases.phase is GroupPhase.KILLING


def test_ctrl_c_never_takes_a_step_back():
    for phase in (GroupPhase.STOPPING, GroupPhase.KILLING, GroupPhase.OVER):
        assert at(phase).advance(100.0, failed=True, unwanted=True, grace_s=9.0) is None
