"""Properties of time budgets: a resized job never exceeds its limit's work, nor a bound."""

import math

from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.controller.state.time_limits import (
    LEAST_PACE,
    TimeBudget,
    after,
    begun,
    fresh,
)

LIMITS = st.integers(1, 20_000).map(lambda minutes: 60 * minutes)
PACES = st.floats(LEAST_PACE, 1.0)
#: Of each attempt: its pace, and the part of its limit that it ran.
LIVES = st.lists(st.tuples(PACES, st.floats(0.0, 1.0)), min_size=1, max_size=12)


def lived(limit_s, life, *, most_s=None):
    """Return (pace, limit, ran) of each attempt of a job that starts as submitted."""
    budget, pace, given_s, rows = fresh(limit_s), 1.0, limit_s, []
    for following, part in life:
        ran_s = part * given_s
        rows.append((pace, given_s, ran_s))
        budget = after(budget, ran_s=ran_s, limit_s=given_s)
        pace = following
        budget, given_s = begun(budget, pace=pace, most_s=most_s)
    rows.append((pace, given_s, given_s))
    return budget, rows


@given(LIMITS, LIVES)
def test_never_more_work_than_was_submitted(limit_s, life):
    _, rows = lived(limit_s, life)
    work = sum(pace * ran for pace, _, ran in rows)
    least = sum(60 for _, given_s, _ in rows if given_s == 60)  # Slurm's smallest limit
    assert work <= limit_s + least + 1e-3


@given(LIMITS, LIVES, LIMITS)
def test_all_attempts_together_keep_to_the_bound(limit_s, life, most_s):
    """Beyond the bound no job gets more than without an extension."""
    _, rows = lived(limit_s, life, most_s=most_s)
    for i, (_, given_s, _) in enumerate(rows[1:], start=1):
        spent = sum(ran for *_, ran in rows[:i])
        assert given_s <= max(most_s - spent, limit_s - spent, 60) + 1e-3


@given(LIMITS, LIVES)
def test_at_full_pace_it_is_what_is_left_by_the_clock(limit_s, life):
    _, rows = lived(limit_s, [(1.0, part) for _, part in life])
    for i, (_, given_s, _) in enumerate(rows[1:], start=1):
        left = limit_s - sum(ran for *_, ran in rows[:i])
        assert given_s == 60 or -1e-3 <= left - given_s < 60 + 1e-3


@given(LIMITS, LIVES, PACES)
def test_shrinking_and_growing_back_at_once_changes_nothing(limit_s, life, pace):
    budget, rows = lived(limit_s, [*life, (1.0, 0.0)])
    before = rows[-1][1]
    left = after(budget, ran_s=0.0, limit_s=before)
    for _ in range(5):
        slow, longer = begun(left, pace=pace, most_s=None)
        assert longer >= before
        left = after(slow, ran_s=0.0, limit_s=longer)
    assert begun(left, pace=1.0, most_s=None)[1] == before


@given(LIMITS, LIVES, PACES, st.floats(0.0, 1.0), st.integers(60, 10**7))
def test_a_limit_set_by_hand_is_never_extended(limit_s, life, pace, part, theirs):
    budget, _ = lived(limit_s, life)
    if theirs == budget.set_s:
        theirs += 60
    ran_s = part * theirs
    left = after(budget, ran_s=ran_s, limit_s=theirs)
    following, given_s = begun(left, pace=pace, most_s=None)
    assert given_s <= max(60, theirs - ran_s) + 1e-3
    assert following.extended_s == 0
    if theirs < budget.set_s:  # a lowered limit gains no work
        assert pace * given_s <= budget.work_s - budget.pace * ran_s + 60


@given(LIMITS, st.floats(allow_nan=True, allow_infinity=True), st.floats(-1e9, 1e9))
def test_no_prediction_and_no_reservation_makes_a_limit_that_cannot_be(limit_s, pace, until_s):
    budget, given_s = begun(fresh(limit_s), pace=pace, most_s=None, until_s=until_s)
    assert limit_s <= given_s <= limit_s / LEAST_PACE + 60
    assert given_s % 60 == 0
    assert math.isfinite(budget.pace)
    if until_s < limit_s:
        assert given_s == limit_s
    assert TimeBudget.from_body({f: getattr(budget, f) for f in TimeBudget.__slots__}) == budget
