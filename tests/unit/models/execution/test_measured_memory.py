"""Bytes of plans by what ranks have reported, against the model of transformers."""

import doctest
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.models.execution import measured_memory
from slurm_elastic.models.execution.measured_memory import MeasuredMemory, slowdown
from slurm_elastic.models.execution.plan_memory import StateBytes, plan_memory
from slurm_elastic.simulator.execution.rubick_models import TRANSFORMERS

BATCH = 32
PLANS = [
    ExecutionPlan.parse(f"{layout}{options}{recompute}{accumulation}")
    for layout, options in (
        ("4x1", ""), ("4x1", "+shard=full"), ("2x1", "+tensor=2"), ("1x1", "+tensor=4"),
        ("2x1", "+tensor=2+shard=full"),
    )
    for recompute in ("", "+recompute")
    for accumulation in ("", "+accumulation=3")
]  # fmt: skip


def test_examples():
    assert doctest.testmod(measured_memory).failed == 0


@pytest.mark.parametrize("model", TRANSFORMERS)
def test_plans_have_the_order_that_their_sizes_predict(model):
    """One peak of the plan that needs most stands for the sizes of the transformer."""
    size, state = TRANSFORMERS[model], StateBytes()

    def by_size(plan):
        share = -(-BATCH // plan.replicas)
        return plan_memory(plan, size, share=share, state=state, reserve=0.0).gpu

    weights = size.parameters * state.weight
    memory = MeasuredMemory(
        weights=weights, optimizer=size.parameters * state.optimizer, sample=0.0, layers=size.layers
    )
    own = PLANS[0]
    sample = (by_size(own) - memory.state_bytes(own)) / memory.kept_samples(own, batch=BATCH)
    memory = MeasuredMemory(
        weights=weights,
        optimizer=size.parameters * state.optimizer,
        sample=sample,
        layers=size.layers,
    )
    wrong = [
        (str(a), str(b))
        for a, b in itertools.permutations(PLANS, 2)
        # What recomputation saves is assumed: less than transformers save.
        if not (a.recompute or b.recompute)
        and by_size(a) < 0.6 * by_size(b)
        and memory.gpu_bytes(a, batch=BATCH) >= memory.gpu_bytes(b, batch=BATCH)
    ]
    assert wrong == []


amounts = st.floats(0.0, 1e12)
plans = st.sampled_from(PLANS)


@given(amounts, amounts, amounts, st.integers(0, 64), plans, st.integers(8, 512))
def test_options_never_need_more(weights, optimizer, sample, layers, plan, batch):
    memory = MeasuredMemory(weights=weights, optimizer=optimizer, sample=sample, layers=layers)
    needed = memory.gpu_bytes(plan, batch=batch)
    for option in ("+recompute", "+accumulation=1"):
        if option.partition("=")[0] not in str(plan):
            less = ExecutionPlan.parse(str(plan) + option)
            assert memory.gpu_bytes(less, batch=batch) <= needed
            assert slowdown(less) > slowdown(plan)


def test_slices_divide_the_optimizers_state_and_take_in_gradients():
    memory = MeasuredMemory(weights=1.0, optimizer=2.0, sample=0.0)
    sliced = [ExecutionPlan.parse(f"{n}x1+tensor=2+shard=optimizer") for n in (2, 4)]
    # Halves: of the weights, twice of the gradients, and a half or quarter of the optimizer's.
    assert [memory.gpu_bytes(plan, batch=BATCH) for plan in sliced] == [2.0, 1.75]
    assert memory.gpu_bytes(ExecutionPlan.parse("4x1+tensor=2"), batch=BATCH) == 2.0


def test_micro_batches_of_the_script_count():
    memory = MeasuredMemory(weights=0, optimizer=0, sample=1.0, micro_batch=3)
    assert memory.gpu_bytes(ExecutionPlan.parse("2x1"), batch=16) == 3.0  # 8 samples in 3 parts
    assert memory.gpu_bytes(ExecutionPlan.parse("2x1+accumulation=0"), batch=16) == 8.0
