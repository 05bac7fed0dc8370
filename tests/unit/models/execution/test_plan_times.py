"""Step times of execution plans, and their fit."""

import statistics
from collections import defaultdict

import pytest

from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.models.execution.plan_fitting import MeasuredPlan, fit, relative_error
from slurm_elastic.models.execution.plan_times import (
    ModelWork,
    PlanCoefficients,
    PlanLinks,
    PlanStepParts,
    combined,
    staged_forward_ms,
    step_parts,
)
from slurm_elastic.simulator.execution.plan_profiles import read_profiles
from tests.support import published_data

COEFFICIENTS = PlanCoefficients(2.0, 2.0, 0.05, 4.0, 3.0, 5.0, 20.0)
LINKS = PlanLinks(host=10, inside=100, between=20)
WORK = ModelWork(parameters=300, batch=32, width=512 * 1024, layers=24)
#: Rubick's errors in percent, mean and maximum, and by how much ours may differ.
PUBLISHED = {
    ("vit", "DP"): (3.6, 6.8, 0.3),
    ("vit", "GC"): (2.6, 6.2, 0.3),
    ("vit", "ZeRO-DP+GA"): (4.2, 6.7, 0.3),
    ("vit", "ZeRO-Offload"): (3.0, 8.3, 0.3),
    ("roberta", "DP"): (2.2, 4.4, 0.3),
    ("roberta", "GC"): (3.4, 4.3, 0.3),
    ("roberta", "ZeRO-DP+GA"): (3.6, 6.7, 0.3),
    ("roberta", "ZeRO-Offload"): (7.4, 10.4, 0.3),
    ("bert", "DP"): (5.3, 8.3, 0.3),
    ("bert", "GC"): (4.9, 7.3, 0.3),
    ("bert", "ZeRO-DP+GA"): (3.7, 6.9, 0.3),
    ("bert", "ZeRO-Offload"): (6.4, 8.6, 0.3),
    ("t5", "TP+PP"): (3.2, 8.2, 1.0),
    ("t5", "DP+TP+PP"): (2.4, 9.6, 1.0),
    ("t5", "ZeRO-DP+GA"): (6.7, 9.6, 1.0),
    ("t5", "ZeRO-Offload+GC"): (4.4, 6.3, 1.0),
    ("gpt2", "TP+PP"): (2.4, 3.1, 1.0),
    ("gpt2", "DP+TP+PP"): (2.8, 4.2, 1.0),
    ("gpt2", "ZeRO-DP+GA"): (2.5, 3.9, 1.0),
    ("gpt2", "ZeRO-Offload+GC"): (5.5, 8.9, 1.0),
}


def parts(text, *, forward_ms=60.0, inside=True, threads=1):
    return step_parts(
        ExecutionPlan.parse(text),
        WORK,
        forward_ms=forward_ms,
        coefficients=COEFFICIENTS,
        links=LINKS,
        inside=inside,
        threads=threads,
    )


@pytest.fixture(scope="module")
def profiles():
    return read_profiles(published_data.require("rubick", "profiles") / "profiles")


def test_options_of_a_plan_cost_what_they_must():
    plain = parts("4x1")
    assert parts("4x1+recompute").step_ms == pytest.approx(plain.step_ms + 60)
    assert parts("4x1", inside=False).step_ms > plain.step_ms
    assert parts("4x1+shard=optimizer").optimizer_ms < plain.optimizer_ms
    slow = parts("4x1+shard=offload")
    assert slow.step_ms > plain.step_ms
    # Only an optimizer on the host gains from further threads of the CPU.
    assert parts("4x1+shard=offload", threads=8).step_ms < slow.step_ms
    assert parts("4x1", threads=8) == plain


def test_overlap_lies_between_sum_and_maximum():
    assert combined(3.0, 4.0, 1.0) == pytest.approx(7.0)
    assert combined(3.0, 4.0, 2.0) == pytest.approx(5.0)
    assert combined(3.0, 4.0, 1000.0) == pytest.approx(4.0)
    assert combined(0.0, 0.0, 1.5) == 0.0


@pytest.mark.parametrize("text", ["2x1s2", "2x1s2+recompute"])
def test_plans_in_space_are_refused(text):
    with pytest.raises(ValueError, match="2x1s2"):
        parts(text)


def test_a_fit_finds_times_that_the_model_made():
    points = []
    for text in ("1x1", "2x1", "4x1", "8x1", "1x1+shard=offload", "8x1+shard=offload"):
        plan = ExecutionPlan.parse(text)
        forward_ms = 240 / plan.replicas
        true = parts(text, forward_ms=forward_ms)
        points.append(
            MeasuredPlan(plan=plan, work=WORK, forward_ms=forward_ms, inside=True, measured=true)
        )
    found = fit(points, LINKS)
    for point in points:
        predicted = point.predicted(found, LINKS)
        assert relative_error(predicted.step_ms, point.measured.step_ms) < 0.05


def test_a_fit_names_a_time_that_is_not_positive():
    point = MeasuredPlan(
        plan=ExecutionPlan.parse("2x1"),
        work=WORK,
        forward_ms=1.0,
        inside=True,
        measured=PlanStepParts(0.0, 1.0, 1.0),
    )
    with pytest.raises(ValueError, match="plan 2x1: times must be above 0"):
        fit([point], LINKS)


def test_forward_pass_of_stages():
    assert staged_forward_ms(ExecutionPlan.parse("2x4+tensor=2"), 100) == pytest.approx(
        100 * 2 / (4 * 1.15**2)
    )


@pytest.mark.parametrize(
    ("model", "most"),
    [("vit", 1e-4), ("roberta", 1e-4), ("llama7", 1e-4), ("llama30", 1e-4), ("bert", 3e-3)],
)
def test_published_predictions(profiles, model, most):
    profile = profiles[model]
    for validation in profile.validation:
        predicted = validation.point.predicted(profile.fitted, profile.links)
        assert relative_error(predicted.step_ms, validation.published_ms) < most


def test_fits_reach_the_published_errors(profiles):
    errors = defaultdict(list)
    for model in {model for model, _ in PUBLISHED}:
        profile = profiles[model]
        found = fit(profile.points, profile.links)
        for validation in profile.validation:
            predicted = validation.point.predicted(found, profile.links).step_ms
            errors[model, validation.plan_name].append(
                100 * relative_error(predicted, validation.point.measured.step_ms)
            )
    for key, (mean, worst, most) in PUBLISHED.items():
        assert abs(statistics.fmean(errors[key]) - mean) < most, key
        assert abs(max(errors[key]) - worst) < most, key
