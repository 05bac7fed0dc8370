"""Anytime search: the published instance without a solver, limits, and answers to start from."""

import numpy as np
import pytest

from benchmarks import solver
from slurm_elastic.policies.milp import anytime_search, assignment_milp, limit_search
from slurm_elastic.policies.milp.assignment_milp import AssignmentProgram, solve
from slurm_elastic.policies.milp.limit_rows import LimitRow
from slurm_elastic.policies.milp.milp_solver import Clock
from tests.support import published_data

HARD = "hard_instance.json"


def invented(seed, *, jobs=12, limits=()):
    """Return a program of concave profits on two types, with room for about half of the jobs."""
    rng = np.random.default_rng(seed)
    gpus = np.array([1, 2, 4, 8, 1, 2, 4])
    speed = rng.uniform(0.5, 2.0, size=(jobs, 1)) * gpus ** rng.uniform(0.3, 1.0, size=(jobs, 1))
    return AssignmentProgram(
        cost=-speed,
        valid=rng.random((jobs, len(gpus))) < 0.8,
        config_type=np.array([0, 0, 0, 0, 1, 1, 1]),
        config_gpus=gpus,
        capacity=np.array([16, 6]),
        not_running=0.0,
        fixed=np.full(jobs, -1),
        limits=limits,
    )


def columns_of(program):
    return assignment_milp.program_columns(program, assignment_milp.fixings(program)[0])


def test_published_instance_without_a_solver():
    folder = published_data.require("sia", HARD)
    _, program = solver.published(folder / HARD)
    columns = columns_of(program)
    settled = program.objective(assignment_milp.fixings(program)[0])
    picked = anytime_search.improved(columns, [], children=30, clock=Clock(60))
    assert settled - columns.profit[picked].sum() < 1.01 * 117.05


@pytest.mark.parametrize("seed", range(5))
def test_answers_fit_and_are_close_to_the_optimum(seed):
    program = invented(seed)
    columns = columns_of(program)
    picked = anytime_search.improved(columns, [], children=200, clock=Clock(60), seed=seed)
    assert len(set(columns.row[picked])) == len(picked)
    assert (columns.used(picked) <= columns.room).all()
    best = -solve(program).objective
    assert columns.profit[picked].sum() > 0.98 * best


@pytest.mark.parametrize("limit_s", [0.0, 60.0])
def test_never_worse_than_what_it_starts_from(limit_s):
    for seed in range(5):
        columns = columns_of(invented(seed))
        start = np.array([], dtype=np.int64)
        for _ in range(3):
            picked = anytime_search.improved(
                columns, [start], children=3, clock=Clock(limit_s), seed=seed
            )
            assert columns.profit[picked].sum() >= columns.profit[start].sum()
            start = picked


def test_choices_that_a_caller_knows_are_used_when_the_time_is_over():
    program = invented(1)
    best = solve(program)
    at_once = solve(program, time_limit_s=0.0)
    known = solve(program, time_limit_s=0.0, known=lambda: [best.choice])
    assert known.objective == pytest.approx(best.objective)
    assert known.objective < at_once.objective
    assert (known.how, known.limit_hit) == ("anytime search", True)


def test_a_known_choice_that_no_longer_fits_is_made_smaller():
    program = invented(1)
    everything = np.where(program.valid[:, 3], 3, -1)
    found = solve(program, time_limit_s=0.0, known=lambda: [everything])
    assert (program.used(found.choice) <= program.capacity).all()


def test_limits_are_kept_where_there_are_too_many_variables_for_a_relaxation(monkeypatch):
    monkeypatch.setattr(limit_search, "_MOST_COLUMNS", 0)
    # A busy machine computes little in the usual time.
    monkeypatch.setattr(assignment_milp, "_SEARCH_S", 2.0)
    gpus = np.array([1, 2, 4, 8, 1, 2, 4], dtype=float)
    limit = LimitRow(jobs=np.arange(8), use=np.tile(gpus, (8, 1)), left=5.0)
    program = invented(2, limits=(limit,))
    found = solve(program)
    assert found.how == "anytime search"
    assert not limit.exceeded(found.choice)
    monkeypatch.undo()
    assert found.objective == pytest.approx(solve(program).objective, rel=0.02)
