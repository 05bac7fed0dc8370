"""Programs with limits and too many variables for a relaxation and a search with them."""

import numpy as np
import pytest

from slurm_elastic.policies.milp import anytime_search, limit_search
from slurm_elastic.policies.milp.assignment_milp import AssignmentProgram, solve
from slurm_elastic.policies.milp.limit_rows import LimitRow

SIZES = np.array([1, 2, 4, 8])


@pytest.fixture(autouse=True)
def _large(monkeypatch):
    monkeypatch.setattr(limit_search, "_MOST_COLUMNS", 0)
    monkeypatch.setattr(anytime_search, "_MOST_ENTRIES", 0)


def program(weights, capacity, *limits):
    """Return a program of one GPU type; a job gains its weight times the root of its GPUs."""
    return AssignmentProgram(
        cost=-np.outer(weights, np.sqrt(SIZES)),
        valid=np.ones((len(weights), len(SIZES)), dtype=bool),
        config_type=np.zeros(len(SIZES), dtype=np.int64),
        config_gpus=SIZES,
        capacity=np.array([capacity]),
        not_running=0.0,
        fixed=np.full(len(weights), -1),
        limits=tuple(
            LimitRow(jobs=np.array(jobs), use=np.tile(SIZES, (len(jobs), 1)).astype(float), left=n)
            for jobs, n in limits
        ),
    )


def gpus(solution):
    return [int(SIZES[c]) if c >= 0 else 0 for c in solution.choice]


def test_what_a_limit_frees_goes_to_jobs_without_one():
    assert gpus(solve(program([9.0, 8.0, 1.0], 16))) == [8, 8, 0]
    assert gpus(solve(program([9.0, 8.0, 1.0], 16, ([0, 1], 3.0)))) == [2, 1, 8]


def test_limits_that_share_jobs_are_kept_one_after_the_other():
    answer = gpus(solve(program([4.0, 3.0, 2.0, 1.0], 40, ([0, 1], 4.0), ([0, 1, 2, 3], 8.0))))
    assert sum(answer[:2]) == 4
    assert 4 < sum(answer) <= 8
