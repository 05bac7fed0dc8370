"""Limits of ONES: doubling with epochs, halving, the largest job."""

from slurm_elastic.policies.ones.size_limits import SizeLimit, room_of_largest


def test_a_limit_doubles_once_it_is_used_for_two_epochs():
    limit = SizeLimit(requested=2)
    assert (limit.room(0, 0), limit.room(1, 1.5)) == (0, 1)
    assert limit.after_epochs(1, 1.5, 64) == limit
    doubled = limit.after_epochs(1, 2, 64)
    assert (doubled.limit, doubled.room(1, 2)) == (2, 2)
    assert doubled.after_epochs(1, 9, 64) == doubled
    for held in (2, 4, 8):
        doubled = doubled.after_epochs(held, 9, 64)
    assert (doubled.limit, doubled.room(8, 9)) == (16, 8)
    assert doubled.stopped().limit == 8


def test_a_stopped_job_may_have_its_limit_when_it_is_resumed():
    assert SizeLimit(requested=2, limit=4, scaled_at=5).room(0, 5.5) == 4


def test_the_largest_job_gives_room_back_when_it_has_run_for_long():
    assert room_of_largest({1: 40, 2: 2}, {1: 900.0, 2: 100.0}, [], 64) == (1, 28)
    # Others count, too, of which some have ended: the median is 900 s.
    assert room_of_largest({1: 40, 2: 2}, {1: 900.0, 2: 100.0}, [950.0], 64) is None
    assert room_of_largest({1: 30, 2: 2}, {1: 900.0, 2: 100.0}, [], 64) is None
    assert room_of_largest({}, {}, [100.0], 64) is None
