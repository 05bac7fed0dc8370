"""GPUs and execution plans chosen together."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.policies.execution.plan_choice import PlanDemand, choose_plans
from slurm_elastic.policies.execution.plan_options import (
    PlanHolding,
    PlanOption,
    useful_options,
)


def option(text, *placement, step_s):
    return PlanOption(placement, ExecutionPlan.parse(text), step_s)


SMALL = useful_options(
    [
        option("1x1", 1, step_s=1.0),
        option("2x1", 2, step_s=0.55),
        option("4x1", 4, step_s=0.3),
        option("8x1", 8, step_s=0.2),
    ]
)
LARGE = useful_options(
    [option("1x2+tensor=8", 8, 8, step_s=1.0), option("1x4+tensor=8", 8, 8, 8, 8, step_s=0.6)]
)


def choose(*demands, nodes=4):
    return choose_plans(demands, nodes=nodes, node_gpus=8)


def test_options_that_are_never_preferable_are_left_out():
    kept = useful_options(
        [
            option("4x1", 4, step_s=1.0),
            option("4x1+recompute", 4, step_s=1.3),
            option("4x1+shard=full", 2, 2, step_s=1.2),
            option("8x1", 8, step_s=1.1),
            option("2x1", 1, 1, step_s=1.2),
        ]
    )
    assert [(o.placement, str(o.plan)) for o in kept] == [((1, 1), "2x1"), ((4,), "4x1")]


def test_a_lone_job_gets_the_plan_that_ends_it_first():
    held = choose(PlanDemand(name="a", options=SMALL, left=1e5))
    assert str(held["a"].plan) == "8x1"


def test_a_crowd_gets_few_gpus_each():
    alone = choose(PlanDemand(name="j0", options=SMALL, left=10_000))
    demands = [PlanDemand(name=f"j{i}", options=SMALL, left=10_000) for i in range(40)]
    held = choose(*demands)
    assert sum(h.gpus for h in held.values()) == 32
    assert max(h.gpus for h in held.values()) < alone["j0"].gpus


def test_a_short_job_displaces_a_long_one_where_nothing_else_fits():
    long = PlanHolding(((0, 8), (1, 8)), LARGE[0].plan)
    running = PlanDemand(name="long", options=LARGE, left=1e5, holding=long, step_s=1.0)
    short = PlanDemand(name="short", options=LARGE, left=100)
    assert set(choose(running, short, nodes=2)) == {"short"}
    # Not where it is hardly shorter, and not while the long one still starts.
    similar = PlanDemand(name="short", options=LARGE, left=5e4)
    assert set(choose(running, similar, nodes=2)) == {"long"}
    starting = PlanDemand(
        name="long", options=LARGE, left=1e5, holding=long, step_s=1.0, standing_s=60.0
    )
    assert set(choose(starting, short, nodes=2)) == {"long"}


def test_a_job_grows_into_free_gpus_only_if_that_saves_more_than_a_start():
    held = PlanHolding(((0, 1),), SMALL[0].plan)
    long = PlanDemand(name="a", options=SMALL, left=1e5, holding=held, step_s=1.0)
    assert choose(long)["a"].gpus == 8
    nearly = PlanDemand(name="a", options=SMALL, left=300, holding=held, step_s=1.0)
    assert choose(nearly)["a"] == held


@pytest.mark.parametrize("known", [True, False])
def test_a_guaranteed_job_is_never_slower_than_its_request(known):
    crowd = [PlanDemand(name=f"j{i}", options=SMALL, left=10_000) for i in range(40)]
    guaranteed = PlanDemand(
        name="g", options=SMALL, left=1e5, known=known, slack_s=260.0, requested_s=0.3
    )
    held = choose(guaranteed, *crowd)
    if "g" in held:
        assert held["g"].gpus >= 4
    # Without slack for a second start it is not stopped.
    running = PlanDemand(
        name="g",
        options=LARGE[:1],
        left=1e5,
        known=known,
        holding=PlanHolding(((0, 8), (1, 8)), LARGE[0].plan),
        step_s=1.0,
        slack_s=0.0,
        requested_s=1.0,
    )
    short = PlanDemand(name="short", options=LARGE, left=100)
    assert set(choose(running, short, nodes=2)) == {"g"}


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from([SMALL, LARGE]), st.floats(1, 1e6), st.booleans()), max_size=12
    )
)
def test_no_node_is_ever_overfull_and_answers_are_stable(jobs):
    demands = [
        PlanDemand(
            name=f"j{i}",
            options=options,
            left=left,
            slack_s=260.0 if guaranteed else None,
            requested_s=options[-1].step_s,
        )
        for i, (options, left, guaranteed) in enumerate(jobs)
    ]
    held = choose(*demands)
    used = [0] * 4
    for holding in held.values():
        for node, gpus in holding.nodes:
            used[node] += gpus
    assert max(used) <= 8
    assert held == choose(*demands)
