"""The rules of the lease, one at a time."""

import pytest

from slurm_elastic.controller.leader.leader_lease import (
    DURABLE_S,
    RIGHT,
    LeaseClaim,
    LeaseMark,
    LeaseObservation,
    Tenure,
    comment_of,
    newest,
)

HELD = comment_of(holder="h1:7321", id_="a1", beat=3)
FREE = comment_of(holder="h1:7321", id_="a1", beat=4, free=True)


def looks(watch, mark, *times):
    return [watch.look(mark, began=t, ended=t + 0.5) for t in times]


def test_a_comment_says_who_holds_it():
    mark = LeaseMark("selastic_active_12", HELD)
    assert (mark.generation, mark.holder, mark.id, mark.free) == (12, "h1:7321", "a1", False)
    assert LeaseMark("selastic_active_12", FREE).free


@pytest.mark.parametrize("comment", ["", "holder=", "\x1b[31m state = free", "holder=a b id=zz"])
def test_whatever_stands_in_a_comment_it_is_a_lease_that_is_held(comment):
    mark = LeaseMark("selastic_active_x", comment)
    assert mark.generation == 0
    assert not mark.free
    assert mark.id == ""


def test_the_highest_number_counts():
    assert newest([LeaseMark("l_9", ""), LeaseMark("l_10", ""), LeaseMark("l_x", "")]) == LeaseMark(
        "l_10", ""
    )
    assert newest([]) is None


def test_it_is_taken_when_it_has_not_beaten_for_long_enough():
    watch = LeaseObservation(30.0)
    mark = LeaseMark("l_1", HELD)
    assert looks(watch, mark, 0, 8, 16, 24, 30, 30.5) == [False] * 5 + [True]


def test_a_beat_or_no_lease_at_all_begins_the_wait_anew():
    watch = LeaseObservation(30.0)
    looks(watch, LeaseMark("l_1", HELD), 0, 8, 16, 24)
    assert looks(watch, LeaseMark("l_1", FREE.replace("free", "held")), 31) == [False]
    assert looks(watch, None, 40, 48, 56, 64) == [False] * 4
    assert looks(watch, None, 71) == [True]


def test_time_in_which_slurmctld_does_not_answer_does_not_count():
    watch = LeaseObservation(30.0)
    mark = LeaseMark("l_1", HELD)
    assert looks(watch, mark, 0, 40, 48, 56, 64) == [False] * 5


def test_one_that_is_given_back_is_taken_at_once():
    assert looks(LeaseObservation(30.0), LeaseMark("l_1", FREE), 0) == [True]


def test_a_right_that_is_over_does_not_come_back():
    tenure = Tenure(30.0, 0.0)
    assert tenure.left(5.0) == 10.0
    assert tenure.renewed(5.0, 6.0)
    assert tenure.left(6.0) == 14.0
    assert not tenure.renewed(19.0, 21.0)  # answered when it was over
    assert tenure.left(7.0) == 0.0


def test_one_forgotten_beat_does_not_reach_into_the_next_ones_time():
    assert 2 * RIGHT <= 1


def test_a_claim_waits_until_slurmctld_will_remember_it():
    claim = LeaseClaim("l_2", "a1", Tenure(30.0, 0.0), made=1.0)
    assert claim.stands(LeaseMark("l_2", HELD))
    assert not claim.stands(LeaseMark("l_3", HELD))
    assert not claim.stands(LeaseMark("l_2", HELD.replace("id=a1", "id=b2")))
    assert not claim.stands(None)
    assert not claim.lasts(1.0 + DURABLE_S - 0.1)
    assert claim.lasts(1.0 + DURABLE_S)
