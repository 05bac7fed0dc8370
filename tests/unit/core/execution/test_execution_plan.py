"""The text of an execution plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.core.execution.execution_plan import ExecutionPlan, ExecutionPlanError, Sharding
from slurm_elastic.core.layout import LayoutText


@pytest.mark.parametrize(
    ("text", "canonical", "world"),
    [
        ("4x1", "4x1", 4),
        ("2-1", "2-1", 3),
        ("2-1+recompute", "2-1+recompute", 3),
        ("4x2+recompute+tensor=2", "4x2+tensor=2+recompute", 16),
        ("2x1s4+accumulation=0", "2x1s4+accumulation=0", 8),
        ("4x1+shard=full+accumulation=3", "4x1+shard=full+accumulation=3", 4),
        ("1x1+tensor=1", "1x1", 1),
    ],
)
def test_a_plan_is_read_and_shown_in_one_order(text, canonical, world):
    plan = ExecutionPlan.parse(text)
    assert (str(plan), plan.world) == (canonical, world)
    assert plan.plain is ("+" not in canonical)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("4", "layout '4'"),
        ("", "layout ''"),
        ("4x1+", "option ''"),
        ("4x1+tensor=0", "option 'tensor=0'"),
        ("4x1+tensor=02", "option 'tensor=02'"),
        ("4x1+tensor", "option 'tensor'"),
        ("4x1+shard=none", "option 'shard=none'"),
        ("4x1+recompute=yes", "option 'recompute=yes'"),
        ("4x1+recompute+recompute", "recompute is given twice"),
        ("2x2+shard=full", "shard=full"),
        ("65536x1+tensor=2", "131072 ranks"),
        ("4x1" + "+recompute" * 200, "at most 256 characters"),
    ],
)
def test_an_invalid_plan_is_refused_in_one_line_that_names_the_culprit(text, named):
    with pytest.raises(ExecutionPlanError) as error:
        ExecutionPlan.parse(text)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@given(
    plan=st.builds(
        ExecutionPlan,
        st.sampled_from([LayoutText((4,)), LayoutText((1,)), LayoutText((3,), space=2)]),
        tensor=st.integers(1, 8),
        sharding=st.sampled_from(Sharding),
        recompute=st.booleans(),
        accumulation=st.none() | st.integers(0, 65535),
    )
)
def test_the_text_of_a_plan_gives_the_plan(plan):
    assert ExecutionPlan.parse(str(plan)) == plan
