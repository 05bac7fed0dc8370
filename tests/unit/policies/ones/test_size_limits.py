"""Limits of ONES: doubling with epochs, halving, the largest job."""

from slurm_elastic.policies.ones.size_limits import SizeLimit, shrunk_largest


def test_a_limit_doubles_once_it_is_used_for_two_epochs():
    limit = SizeLimit(requested=2)
    assert limit.room(held=1) == 1
    assert limit.after_epochs(1, 1.5, 64) == limit
    doubled = limit.after_epochs(1, 2, 64)
    assert (doubled.limit, doubled.room(1)) == (2, 2)
    assert doubled.after_epochs(1, 9, 64) == doubled
    for held in (2, 4, 8):
        doubled = doubled.after_epochs(held, 9, 64)
    assert (doubled.limit, doubled.room(8)) == (16, 8)
    assert doubled.stopped().limit == 8


def test_the_largest_job_gives_room_back_when_it_has_run_for_long():
    limits = {1: SizeLimit(requested=16, limit=32), 2: SizeLimit(requested=2, limit=2)}
    shrunk = shrunk_largest(limits, {1: 40, 2: 2}, {1: 900.0, 2: 100.0}, 64)
    assert shrunk[1].limit == shrunk[1].granted == 28
    assert shrunk[2] == limits[2]
    assert shrunk_largest(limits, {1: 30, 2: 2}, {1: 900.0, 2: 100.0}, 64) == limits
    assert shrunk_largest(limits, {}, {}, 64) == limits
