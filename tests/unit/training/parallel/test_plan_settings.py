"""What an ordered plan means for the arguments of `init`."""

import pytest

from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.training.parallel.plan_settings import PlanSettings

SCRIPT = PlanSettings(shard=True, overlap="auto", recompute=True, micro_batch=4)


@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        (None, SCRIPT),
        # A layout alone leaves options to the script.
        ("2x1", SCRIPT),
        ("2x1+recompute", PlanSettings(False, "auto", True, 4)),
        ("2x1+shard=full", PlanSettings(True, "auto", False, 4)),
        ("2x1+shard=optimizer", PlanSettings(False, "sliced", False, 4)),
        ("2x1+accumulation=0", PlanSettings(False, "auto", False, 16)),
        ("2x1+accumulation=2", PlanSettings(False, "auto", False, 6)),
        ("1x2+accumulation=7", PlanSettings(False, "auto", False, 4)),
    ],
)
def test_a_plan_with_options_replaces_those_of_the_script(plan, settings):
    parsed = ExecutionPlan.parse(plan) if plan else None
    assert SCRIPT.under(parsed, global_batch=32) == settings


def test_a_plan_without_sharding_ends_that_of_the_script():
    script = PlanSettings(shard=False, overlap="sliced", recompute=False, micro_batch=None)
    plan = ExecutionPlan.parse("4x1+recompute")
    assert script.under(plan, global_batch=32) == PlanSettings(False, "none", True, None)
