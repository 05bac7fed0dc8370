"""Solvers by name: HiGHS, and those behind PuLP with HiGHS in their place when they fail."""

import doctest
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import solver
from benchmarks.controller import solver_rounds
from slurm_elastic.config.schema import ConfigError, parse
from slurm_elastic.policies import policy_protocol
from slurm_elastic.policies.milp import program_solver, pulp_backend
from slurm_elastic.policies.milp.assignment_milp import solve
from slurm_elastic.policies.milp.program_solver import PulpSolver, from_setting, problem
from slurm_elastic.policies.milp.pulp_backend import PulpBackend, SolverFailedError
from tests.support import published_data
from tests.support.needs import require

HARD = "hard_instance.json"
#: Solvers that PuLP, or a wheel of ours, brings along.
NAMES = ("CBC", "HiGHS")


def instance(jobs=30, gpus=64, seed=1):
    return solver.instance(solver.invented(50, seed=seed), gpus=gpus, jobs=jobs, seed=seed)


class FakeBackend:
    """Solver that gives a fixed answer, fails, or waits."""

    name = "FAKE"

    def __init__(self, answer=None, error=None):
        self.answer, self.error = answer, error
        self.go_on = threading.Event()
        self.go_on.set()

    def choose(self, program, *, time_limit_s, gap):
        self.go_on.wait()
        if self.error:
            raise self.error
        return self.answer


def test_examples_in_the_docs():
    assert doctest.testmod(program_solver).failed == 0


@pytest.mark.parametrize("name", NAMES)
def test_solvers_behind_pulp_reach_the_objective_of_highs(name):
    require("python/pulp")
    asked = instance()
    found = from_setting(f"pulp:{name.lower()}").solve(asked, gap=0.0)
    assert found.fallback == ""
    assert found.objective == pytest.approx(solve(asked, gap=0.0).objective, abs=1e-6)
    assert (asked.used(found.choice) <= asked.capacity).all()


def test_fixed_jobs_that_no_longer_fit_become_free_behind_pulp_too():
    require("python/pulp")
    asked = instance(jobs=6, gpus=8)
    config = int(np.flatnonzero(asked.config_gpus == 2)[0])
    asked = replace(asked, fixed=np.full(6, config, dtype=np.int64))
    found, other = from_setting("pulp:CBC").solve(asked, gap=0.0), solve(asked, gap=0.0)
    assert found.fallback == ""
    assert found.relaxed == other.relaxed != ()
    assert found.objective == pytest.approx(other.objective, abs=1e-6)


def test_a_round_without_jobs_needs_no_solver():
    require("python/pulp")
    rows = solver.invented(50, seed=1)
    nobody = solver.instance(rows, gpus=64, jobs=0, seed=1)
    assert from_setting("pulp:CBC").solve(nobody).choice.tolist() == []


def test_highs_decides_where_the_solver_fails():
    asked = instance()
    found = PulpSolver(FakeBackend(error=SolverFailedError("FAKE failed: no licence"))).solve(asked)
    assert found.fallback == "FAKE failed: no licence"
    assert found.objective == solve(asked).objective


def test_highs_decides_where_the_solver_s_library_breaks():
    found = PulpSolver(FakeBackend(error=OSError("gone"))).solve(instance())
    assert found.fallback == "FAKE failed: OSError('gone')"


def test_highs_decides_while_a_solver_does_not_end():
    asked, expected = instance(), solve(instance())
    slow = FakeBackend(answer=expected.choice)
    slow.go_on.clear()
    behind = PulpSolver(slow, grace_s=0.0)
    found = behind.solve(asked, time_limit_s=0.01)
    assert found.fallback == "FAKE did not end within its limit of 0.01 s"
    assert (asked.used(found.choice) <= asked.capacity).all()
    second = behind.solve(asked, time_limit_s=10.0)
    assert second.fallback == "FAKE still solves an earlier program"
    assert second.objective == expected.objective
    slow.go_on.set()
    behind._running.join()
    assert behind.solve(asked, time_limit_s=10.0).fallback == ""


def test_a_time_limit_that_is_too_short_is_a_fallback():
    require("python/pulp")
    _, hard = solver.published(published_data.require("sia", HARD) / HARD)
    found = from_setting("pulp:HiGHS").solve(replace(hard, fixed=hard.fixed), time_limit_s=1e-3)
    assert "HiGHS" in found.fallback
    assert (hard.used(found.choice) <= hard.capacity).all()


def test_an_answer_that_does_not_fit_is_refused(monkeypatch):
    require("python/pulp")
    asked = replace(instance(), capacity=np.array([1, 1, 1]))
    backend = PulpBackend("CBC")
    roomy = replace(asked, capacity=np.array([999, 999, 999]))
    stated = pulp_backend.to_pulp(roomy)
    monkeypatch.setattr(pulp_backend, "to_pulp", lambda program: stated)
    with pytest.raises(SolverFailedError, match="CBC gave an answer that is not feasible"):
        backend.choose(asked)


def test_without_pulp_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pulp", None)
    with pytest.raises(ConfigError) as error:
        from_setting("pulp:CBC")
    assert str(error.value) == (
        '[sia] solver: "pulp:CBC" cannot be used: PuLP is not installed:'
        " python3 -m pip install 'slurm-elastic[pulp]'"
    )
    assert problem("highs") == ""
    assert problem("pulp:CBC").startswith("PuLP is not installed")


def test_a_solver_that_is_unknown_or_missing_is_one_line():
    require("python/pulp")
    with pytest.raises(ConfigError, match="PuLP has no solver ABACUS; known: CBC, CPLEX, GLPK"):
        from_setting("pulp:ABACUS")
    missing = next(n for n in ("SCIP", "XPRESS", "CPLEX", "GLPK") if problem(f"pulp:{n}"))
    assert problem(f"pulp:{missing}") == (
        f"PuLP finds no {missing} on this host; install the solver, or choose another one"
    )


@pytest.mark.parametrize("policy", ["sia", "goodput"])
def test_a_policy_whose_solver_is_missing_does_not_load(policy, monkeypatch):
    monkeypatch.setitem(sys.modules, "pulp", None)
    config = parse(f'[controller]\npolicy = "{policy}"\n[sia]\nsolver = "pulp:CBC"')
    with pytest.raises(ConfigError, match=r'^\[sia\] solver: "pulp:CBC" cannot be used'):
        policy_protocol.load(config)


@pytest.mark.parametrize("value", ["CBC", "pulp", "pulp:", "pulp:a b", "HiGHS"])
def test_settings_that_name_no_solver(value):
    with pytest.raises(ConfigError, match="highs, or pulp:NAME"):
        parse(f'[sia]\nsolver = "{value}"')


@pytest.mark.parametrize(("policy", "until_s", "least"), [("sia", 7200, 15), ("goodput", 3600, 10)])
def test_recorded_rounds_cost_the_same_by_cbc(policy, until_s, least):
    require("python/pulp")
    data = published_data.require("sia", "traces", "workloads")
    programs = solver_rounds.recorded(
        data / "workloads" / "philly" / "workload-1.csv",
        data / "traces",
        every=5,
        until_s=until_s,
        policy=policy,
    )
    assert len(programs) > least
    figures = solver_rounds.compare(programs, PulpBackend("CBC"))
    assert figures["faults"] == 0
    assert figures["difference"] < 1e-5
