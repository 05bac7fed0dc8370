"""Integer program of a round: the published instance, and fixings that do not fit."""

import doctest
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import solver
from slurm_elastic.policies.milp import assignment_milp as module
from slurm_elastic.policies.milp.assignment_milp import AssignmentProgram, solve
from slurm_elastic.policies.milp.pulp_backend import PulpBackend
from tests.support import published_data

HARD = "hard_instance.json"


def simple(**changes):
    """Program with two types; three jobs of equal costs: 1 and 2 GPUs of type 0, 1 of type 1."""
    fields = {
        "cost": np.tile([0.9, 0.5, 0.8], (3, 1)),
        "valid": np.ones((3, 3), dtype=bool),
        "config_type": np.array([0, 0, 1]),
        "config_gpus": np.array([1, 2, 1]),
        "capacity": np.array([3, 1]),
        "not_running": 1.1,
        "fixed": np.array([-1, -1, -1]),
    }
    return AssignmentProgram(**(fields | changes))


def test_examples_in_the_docs():
    assert doctest.testmod(module).failed == 0


def test_every_job_gets_the_most_useful_of_what_there_is():
    found = solve(simple())
    assert sorted(found.choice.tolist()) == [0, 1, 2]
    assert found.objective == pytest.approx(2.2)
    assert (found.proven, found.limit_hit, found.relaxed) == (True, False, ())


def test_ties_are_decided_by_the_seed():
    answers = {tuple(solve(simple(), seed=seed).choice) for seed in range(20)}
    assert len(answers) > 1
    assert {solve(simple(), seed=seed).objective for seed in range(20)} == {
        solve(simple()).objective
    }


def test_running_that_costs_more_than_waiting_is_for_fixed_jobs_only():
    costs = np.full((3, 3), 2.0)
    found = solve(simple(cost=costs, fixed=np.array([-1, 1, -1])))
    assert found.choice.tolist() == [-1, 1, -1]
    assert found.objective == pytest.approx(4.2)


def test_a_fixed_job_keeps_what_is_not_valid_for_it():
    valid = np.ones((3, 3), dtype=bool)
    valid[0, 1] = False
    assert solve(simple(valid=valid, fixed=np.array([1, -1, -1]))).choice[0] == 1


def test_fixed_jobs_that_no_longer_fit_become_free_in_the_order_of_rows():
    found = solve(simple(capacity=np.array([2, 1]), fixed=np.array([1, 1, -1])))
    assert found.relaxed == (1,)
    assert found.choice[0] == 1
    assert sorted(found.choice[1:].tolist()) == [-1, 2]


def test_no_capacity_and_no_jobs():
    assert solve(simple(capacity=np.array([0, -3]))).choice.tolist() == [-1, -1, -1]
    nobody = simple(
        cost=np.empty((0, 3)), valid=np.empty((0, 3), dtype=bool), fixed=np.empty(0, dtype=int)
    )
    assert solve(nobody).choice.tolist() == []


def test_out_of_time_means_greedy_and_says_so():
    found = solve(simple(), time_limit_s=0.0)
    assert (found.how, found.limit_hit) == ("greedy", True)
    assert found.bound <= found.objective <= 3.3
    assert (found.choice >= 0).any()


def test_equal_jobs_beside_too_few_gpus_are_decided_at_once():
    costs = np.tile([0.488, 0.219, 0.172], (2, 1))
    sizes = np.array([1, 3, 4])
    asked = AssignmentProgram(
        cost=costs,
        valid=np.array([[False, True, False], [False, False, True]]),
        config_type=np.array([0, 0, 0]),
        config_gpus=sizes,
        capacity=np.array([4]),
        not_running=1.1,
        fixed=np.array([-1, -1]),
    )
    found = solve(asked)
    assert found.choice.tolist() == [-1, 2]
    assert (found.proven, found.limit_hit) == (True, False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fixed": np.array([-1])}, "differ"),
        ({"cost": np.full((3, 3), np.nan)}, "not finite; mask it"),
        ({"config_gpus": np.array([0, 2, 1])}, "at least one GPU"),
        ({"config_type": np.array([0, 0, 2])}, "has no capacity"),
        ({"fixed": np.array([3, -1, -1])}, "does not exist"),
    ],
)
def test_programs_that_cannot_be(changes, words):
    with pytest.raises(ValueError, match=words):
        simple(**changes)


def test_costs_that_are_masked_are_not_read():
    costs = np.tile([np.nan, 0.5, np.inf], (3, 1))
    valid = np.tile([False, True, False], (3, 1))
    assert sorted(solve(simple(cost=costs, valid=valid)).choice.tolist()) == [-1, -1, 1]


def test_the_round_on_which_the_published_solver_stalls():
    _, program = solver.published(published_data.require("sia", HARD) / HARD)
    found = solve(program)
    assert found.objective <= 117.06
    assert found.proven
    assert not found.limit_hit
    assert (program.used(found.choice) <= program.capacity).all()


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_parts_of_it_are_solved_as_by_the_reference(share):
    _, program = solver.published(published_data.require("sia", HARD) / HARD)
    part = np.arange(0, 306, 9)
    smaller = replace(
        program,
        cost=program.cost[part],
        valid=program.valid[part],
        fixed=program.fixed[part] * 0 - 1,
        capacity=(program.capacity * len(part) / 306 * share).astype(np.int64),
    )
    found = solve(smaller, gap=0.0)
    objective = smaller.objective(PulpBackend("CBC").choose(smaller))
    assert found.objective == pytest.approx(objective, abs=1e-6)


def test_invented_rows_need_no_file():
    rows = solver.invented(50, seed=1)
    program = solver.instance(rows, gpus=64, jobs=30, seed=1)
    found = solver.measure(program, limit_s=20, cbc=True, repeat=1)
    assert found["proven"]
    assert found["cbc_finished"]
    assert abs(found["better"]) <= 2e-4
