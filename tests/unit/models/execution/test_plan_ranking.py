"""Plans that are not tried, as a few measured ones show that they are slower."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rubick import plan_groups, tried_plans
from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.models.execution import plan_ranking
from slurm_elastic.models.execution.plan_ranking import predicted_times
from slurm_elastic.simulator.execution.plan_jobs import read_step_tables
from slurm_elastic.simulator.execution.rubick_models import SCHEDULED_MODELS
from tests.support import published_data


def test_examples():
    assert doctest.testmod(plan_ranking).failed == 0


def test_fewer_plans_are_tried_on_the_published_tables_and_no_much_faster_one_is_missed():
    tables = read_step_tables(published_data.require("rubick", "tables") / "tables")
    tried = measured = 0
    for model, placement, times in plan_groups(tables):
        order = sorted(times, key=lambda plan: (plan.stages * plan.tensor, plan.tensor))
        plans = tried_plans(order, times, batch=SCHEDULED_MODELS[model].work.batch)
        assert min(times[p] for p in plans) <= 1.05 * min(times.values()), (model, placement)
        tried, measured = tried + len(plans), measured + len(times)
    assert (tried, measured) == (24, 44)


PLANS = [
    ExecutionPlan.parse(text)
    for text in (
        "8x1", "8x1+shard=full", "4x1+tensor=2", "2x1+tensor=4", "4x1+tensor=2+shard=full", "4x2",
        "2x4", "2x2+tensor=2",
    )
]  # fmt: skip


@given(
    st.dictionaries(st.sampled_from(PLANS), st.floats(1e-4, 1e4), min_size=1),
    st.integers(8, 4096),
    st.floats(1e-3, 1e3),
)
def test_predictions_are_times_and_do_not_depend_on_their_unit(measured, batch, unit):
    times = predicted_times(measured, PLANS, batch=batch)
    other = predicted_times({p: unit * s for p, s in measured.items()}, PLANS, batch=batch)
    for plan, seconds in times.items():
        assert seconds >= 0.0
        assert other[plan] == pytest.approx(unit * seconds, rel=1e-3, abs=1e-6 * unit)


def test_equal_times_are_predicted_for_all():
    times = predicted_times(dict.fromkeys(PLANS[:4], 2.0), PLANS, batch=64)
    assert all(seconds == pytest.approx(2.0, rel=0.02) for seconds in times.values())
