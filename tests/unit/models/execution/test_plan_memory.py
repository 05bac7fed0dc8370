"""Bytes that execution plans need."""

from dataclasses import replace

import pytest

from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.models.execution.plan_memory import (
    GIB,
    StateBytes,
    TransformerSize,
    least_accumulation,
    plan_memory,
)
from slurm_elastic.simulator.execution.plan_jobs import read_step_tables
from slurm_elastic.simulator.execution.rubick_models import (
    GPU_BYTES,
    SCHEDULED_MODELS,
    TRANSFORMERS,
)
from tests.support import published_data

SIZE = TransformerSize(parameters=1e9, layers=24, hidden=2048, heads=16, tokens=1024)


def memory(text, share=8):
    return plan_memory(ExecutionPlan.parse(text), SIZE, share=share)


def test_state_is_divided_as_the_plan_says():
    plain = memory("8x1")
    assert (plain.weights, plain.gradients, plain.optimizer) == (2e9, 2e9, 12e9)
    assert memory("8x1+shard=optimizer").optimizer == pytest.approx(12e9 / 8)
    assert memory("8x1+shard=optimizer").weights == 2e9
    full = memory("8x1+shard=full")
    assert full.weights == pytest.approx(2e9 / 8 + 2e9 / 24)
    both = memory("4x1+tensor=2+shard=full")
    assert both.weights == pytest.approx(2e9 / 8 + 2e9 / 2 / 24)
    assert both.optimizer == full.optimizer
    offload = memory("8x1+shard=offload")
    assert (offload.optimizer, offload.host) == (0.0, pytest.approx(14e9 / 8))
    assert memory("1x4+tensor=2").weights == pytest.approx(2e9 / 8)
    single = plan_memory(ExecutionPlan.parse("1x1"), SIZE, share=1, state=StateBytes(4.0, 4.0, 8.0))
    assert single.weights + single.gradients + single.optimizer == 16e9


def test_activations_follow_recomputation_micro_batches_and_stages():
    plain = memory("1x1").activations
    assert memory("1x1+accumulation=7").activations == pytest.approx(plain / 8)
    assert memory("1x1+recompute").activations < plain / 5
    # A pipeline's first stage holds a quarter of the layers, of up to four micro-batches.
    assert memory("1x4").activations == pytest.approx(plain / 4)
    assert memory("1x4+accumulation=7").activations == pytest.approx(plain / 8)
    assert memory("1x1+tensor=4").activations < plain / 2


def test_least_accumulation_is_the_first_that_fits():
    plan = ExecutionPlan.parse("1x1")
    most = memory("1x1+accumulation=3").gpu
    assert least_accumulation(plan, SIZE, share=8, gpu_bytes=most) == 3
    assert least_accumulation(plan, SIZE, share=8, gpu_bytes=10 * GIB) is None


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="share=0"):
        memory("1x1", share=0)
    with pytest.raises(ValueError, match="2x1s2"):
        memory("2x1s2")


def test_every_published_measurement_fits_and_what_is_said_not_to_fit_does_not():
    tables = read_step_tables(published_data.require("rubick", "tables") / "tables")
    accumulated = set()
    for model, table in tables.items():
        for by_plan in table.seconds.values():
            for plan in by_plan:
                share = max(1, SCHEDULED_MODELS[model].work.batch // plan.replicas)
                least = least_accumulation(
                    plan, TRANSFORMERS[model], share=share, gpu_bytes=GPU_BYTES
                )
                assert least is not None, (model, str(plan))
                if least and model == "gpt2":
                    accumulated.add(str(plan))
    # Where the published validation of gpt2 accumulates, and where it does not.
    assert {"1x1+shard=optimizer", "2x1+shard=optimizer"} <= accumulated
    assert not accumulated & {"4x1+shard=optimizer", "8x1+shard=optimizer"}
    # Published as impossible: the llamas without sharding, whatever the accumulation.
    for model in ("llama7", "llama30"):
        for text in ("1x1", "64x1", "64x1+recompute"):
            plan = replace(ExecutionPlan.parse(text), accumulation=63)
            assert plan_memory(plan, TRANSFORMERS[model], share=1).gpu > GPU_BYTES
