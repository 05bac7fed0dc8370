"""The interval of checks whose cost is limited."""

import doctest
import itertools
import time

import pytest

from slurm_elastic.training.freezing import overhead_budget as budgets
from slurm_elastic.training.freezing.overhead_budget import OverheadBudget


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    return clock


def run(budget: OverheadBudget, now: list[float], *, steps: int, look_s: float) -> list[int]:
    """Run steps of one second; return the intervals between checks."""
    looks = [0]
    for step in range(1, steps + 1):
        now[0] += 1.0
        if budget.due(step):
            with budget.timed():
                now[0] += look_s
            budget.finish_check(step)
            looks.append(step)
    return [b - a for a, b in itertools.pairwise(looks)]


@pytest.mark.parametrize(
    ("look_s", "factor"), [(0.01, 1), (0.0999, 1), (0.15, 2), (0.199, 2), (0.35, 4), (50.0, 4)]
)
def test_checks_take_at_most_one_percent_of_the_time_where_possible(now, look_s, factor) -> None:
    budget = OverheadBudget(10, most=7)
    intervals = run(budget, now, steps=400, look_s=look_s)
    assert intervals[:3] == [10, 10, 10]  # the first ones import and allocate
    assert set(intervals[5:]) == {10 * factor}


def test_a_given_interval_is_kept(now) -> None:
    assert set(run(OverheadBudget(10, most=1), now, steps=100, look_s=5.0)) == {10}


def test_checks_become_frequent_again_when_they_cost_less(now) -> None:
    budget = OverheadBudget(10, most=7)
    run(budget, now, steps=200, look_s=0.15)
    assert budget.every == 20
    run(budget, now, steps=200, look_s=0.001)
    assert budget.every == 10


def test_examples_in_the_docstring_hold() -> None:
    assert doctest.testmod(budgets).failed == 0
