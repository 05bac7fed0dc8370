"""Replay of traces of jobs with execution plans."""

import csv
import statistics

import pytest

from slurm_elastic.policies.execution.plan_options import PlanHolding
from slurm_elastic.simulator.execution.own_plan_policy import OwnPlanPolicy, requested_step_s
from slurm_elastic.simulator.execution.plan_jobs import PlanJob, read_plan_jobs, read_step_tables
from slurm_elastic.simulator.execution.plan_simulation import (
    RESTART_S,
    PlanRules,
    simulate_plans,
)
from slurm_elastic.simulator.execution.plan_yardsticks import QueuedPlans, SharedPlans
from slurm_elastic.simulator.execution.published_rubick import PublishedRubick
from slurm_elastic.simulator.execution.step_table import StepTable, published_plan
from slurm_elastic.simulator.workloads.workload import WorkloadError
from tests.support import published_data

PLAN = published_plan("ga", 4)
TABLES = {
    "tiny": StepTable(
        "tiny", {(4,): {PLAN: 2.0}, (8,): {published_plan("ga", 8): 1.0}, (1,): {PLAN: 7.0}}
    )
}


def job(name="a", **values):
    fields = {"submit_s": 0.0, "model": "tiny", "gpus": 4, "plan": PLAN, "steps": 100}
    return PlanJob(name=name, **(fields | values))


class Fixed:
    """The same holding in every round, or one by round."""

    def __init__(self, *holdings):
        self.holdings = list(holdings)

    def decide(self, now, runs, decided):
        holding = self.holdings.pop(0) if len(self.holdings) > 1 else self.holdings[0]
        return {run.job.name: holding for run in runs}


class Observed:
    """A policy of which each round is checked: what is decided was measured, and there are GPUs.

    Args:
        policy: decides.
        tables: step tables by model.
    """

    def __init__(self, policy, tables):
        self.policy, self.tables = policy, tables

    def decide(self, now, runs, decided):
        holdings = self.policy.decide(now, runs, decided)
        models = {run.job.name: run.job.model for run in runs}
        for name, holding in holdings.items():
            table = self.tables[models[name]]
            is_measured = table.measured(holding.plan, holding.placement) is not None
            assert is_measured or not holding.nodes, f"{name}: {holding} was not measured"
        assert sum(holding.gpus for holding in holdings.values()) <= 64
        return holdings


@pytest.fixture(scope="module")
def published():
    folder = published_data.require("rubick", "tables", "workload-base.csv", "workload-mt.csv")
    return folder, read_step_tables(folder / "tables")


@pytest.fixture(scope="module")
def base_jobs(published):
    folder, tables = published
    return read_plan_jobs(folder / "workload-base.csv", tables)


def test_a_job_pays_its_start_and_its_steps():
    result = simulate_plans([job()], TABLES, Fixed(PlanHolding(((0, 4),), PLAN)))
    (run,) = result.runs
    assert run.finish_s == 60 + RESTART_S + 200
    assert (run.training_s, run.gpu_s, run.restarts) == (460, 4 * 480, 0)
    assert (result.most_gpus, result.full_rounds) == (4, 0)


def test_a_change_costs_a_start_and_the_interrupted_step():
    small, moved = PlanHolding(((0, 4),), PLAN), PlanHolding(((1, 4),), PLAN)
    result = simulate_plans([job()], TABLES, Fixed(*[small] * 5, moved))
    # 5 rounds of 60 s: 260 s of starting, 40 s of training: 20 steps.
    assert result.runs[0].finish_s == 60 + 300 + RESTART_S + 160
    # As published a move in the same placement is free.
    rules = PlanRules(free_moves=True)
    result = simulate_plans([job()], TABLES, Fixed(*[small] * 5, moved), rules)
    assert result.runs[0].finish_s == 60 + RESTART_S + 200


def test_a_job_without_gpus_stands_still_unless_as_published():
    held, nothing = PlanHolding(((0, 4),), PLAN), PlanHolding()
    stopped = simulate_plans([job()], TABLES, Fixed(*[held] * 6, nothing, held))
    kept = simulate_plans(
        [job()], TABLES, Fixed(*[held] * 6, nothing, held), PlanRules(keeps_taken=True)
    )
    assert stopped.runs[0].restarts == 1
    assert kept.runs[0].restarts == 0
    assert kept.runs[0].finish_s < stopped.runs[0].finish_s


def test_a_node_cannot_be_overfull():
    with pytest.raises(WorkloadError, match="node 0 has 8 GPUs, the policy gave 16"):
        simulate_plans(
            [job(), job("b")], TABLES, Fixed(PlanHolding(((0, 8),), published_plan("ga", 8)))
        )


@pytest.mark.parametrize(
    ("trace", "reference", "expected"),
    [
        ("naive", "naive-stop", (0.2488, 1.683, 64, 0)),
        ("workload-base", "base-pub", (1.0106, 16.300, 344, 417)),
        ("workload-base", "base-stop", (2.076, 30.12, 64, 0)),
        ("workload-mt", "mt-pub", (1.1159, 16.883, 232, 455)),
    ],
)
def test_every_job_ends_as_in_the_published_simulation(published, trace, reference, expected):
    folder, tables = published
    path = published_data.require("rubick", f"reference/{reference}.csv")
    with (path / "reference" / f"{reference}.csv").open(newline="") as stream:
        rows = {row["name"]: row for row in csv.DictReader(stream)}
    result = simulate_plans(
        read_plan_jobs(folder / f"{trace}.csv", tables),
        tables,
        PublishedRubick(tables),
        PlanRules.published(keeps_taken=reference.endswith("-pub")),
    )
    for run in result.runs:
        row = rows[run.job.name]
        assert run.finish_s - run.job.submit_s == pytest.approx(float(row["jct_s"]), abs=1)
        assert run.restarts == int(row["restarts"])
    average_h, end_h, most_gpus, full_rounds = expected
    assert statistics.fmean(result.completion_s) / 3600 == pytest.approx(average_h, rel=0.001)
    assert last_end_h(result) == pytest.approx(end_h, rel=0.01)
    assert (result.most_gpus, result.full_rounds) == (most_gpus, full_rounds)
    if result.full_rounds:
        assert result.rounds == {"workload-base": 978, "workload-mt": 1013}[trace]


@pytest.mark.parametrize(
    ("policy", "arguments", "average_h", "end_h", "gpu_h"),
    [
        (QueuedPlans, {"least_work": False, "best_plan": False}, 1.600, (21.75, 21.75), (989, 989)),
        (QueuedPlans, {"least_work": True, "best_plan": False}, 0.602, (23.75, 23.75), (979, 979)),
        (QueuedPlans, {"least_work": True, "best_plan": True}, 0.641, (24.00, 24.00), (978, 978)),
        (SharedPlans, {}, 0.493, (22.2, 23.5), (963, 1056)),
    ],
)
def test_plain_rules_reach_their_known_figures(
    published, base_jobs, policy, arguments, average_h, end_h, gpu_h
):
    _, tables = published
    result = simulate_plans(base_jobs, tables, Observed(policy(tables, **arguments), tables))
    assert result.most_gpus <= 64
    average = statistics.fmean(result.completion_s) / 3600
    assert average == pytest.approx(average_h, rel=0.03)
    assert end_h[0] * 0.97 <= last_end_h(result) <= end_h[1] * 1.03
    used_gpu_h = sum(run.gpu_s for run in result.runs) / 3600
    assert gpu_h[0] * 0.999 <= used_gpu_h <= gpu_h[1] * 1.001


@pytest.mark.parametrize(
    ("trace", "known", "most_h"),
    [("base", True, 0.45), ("base", False, 0.8), ("mt", True, 0.45), ("mt", False, 1.3)],
)
def test_ours_is_faster_within_64_gpus_and_keeps_guarantees(published, trace, known, most_h):
    folder, tables = published
    jobs = read_plan_jobs(folder / f"workload-{trace}.csv", tables)
    policy = Observed(OwnPlanPolicy(tables, known=known), tables)
    result = simulate_plans(jobs, tables, policy)
    assert result.most_gpus <= 64
    assert statistics.fmean(result.completion_s) / 3600 <= most_h
    assert last_end_h(result) <= 22
    guaranteed = [run for run in result.runs if run.job.guaranteed]
    assert len(guaranteed) == {"base": 0, "mt": 194}[trace]
    for run in guaranteed:
        requested = RESTART_S + run.job.steps * requested_step_s(run, tables)
        assert run.training_s <= requested * (1 + 1e-9), run.job.name


def test_a_plan_that_was_not_measured_is_noticed():
    policy = Observed(Fixed(PlanHolding(((0, 4),), published_plan("gc", 4))), TABLES)
    with pytest.raises(AssertionError, match="was not measured"):
        simulate_plans([job()], TABLES, policy)


def last_end_h(result):
    return max(run.finish_s for run in result.runs) / 3600
