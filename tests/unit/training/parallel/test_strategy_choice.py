"""The strategy that carries a layout out."""

import pytest

from slurm_elastic.core.execution.execution_plan import Sharding
from slurm_elastic.core.layout import LayoutText
from slurm_elastic.training.parallel.layout_choice import LayoutChoice
from slurm_elastic.training.parallel.plan_settings import PlanSettings
from slurm_elastic.training.parallel.strategy_choice import (
    StrategyChoice,
    StrategyKind,
    own_sharding,
)

PIPELINE, SLICED, SHARDED, TENSOR, SPATIAL, DATA = StrategyKind
NONE, OPTIMIZER, FULL = Sharding.NONE, Sharding.OPTIMIZER, Sharding.FULL


def settings(shard=False, overlap="auto"):
    return PlanSettings(shard, overlap, recompute=False, micro_batch=None)


def chosen(text, *, tensor=1, schedule="1f1b", unsupported="", has_layers=True, **options):
    layout = LayoutText.parse(text)
    return StrategyChoice.of(
        LayoutChoice(layout, tensor=tensor, spatial=layout.space > 1),
        settings(**options),
        ranks=layout.world * tensor,
        has_layers=has_layers,
        schedule=schedule,
        unsupported=unsupported,
    )


@pytest.mark.parametrize(
    ("text", "options", "kind", "sharding"),
    [
        ("1x1", {}, DATA, NONE),
        ("4x1", {}, DATA, NONE),
        ("4x1", {"shard": True}, SHARDED, FULL),
        ("4x1", {"overlap": "sliced"}, SLICED, OPTIMIZER),
        ("4x1", {"shard": True, "overlap": "sliced"}, SHARDED, FULL),
        # A single replica has no other one to divide state with.
        ("1x1", {"shard": True}, DATA, NONE),
        ("1x1", {"overlap": "sliced"}, DATA, NONE),
        ("1x1", {"shard": True, "tensor": 2}, TENSOR, NONE),
        ("1x1", {"overlap": "sliced", "tensor": 2}, TENSOR, NONE),
        ("2x1", {"tensor": 2}, TENSOR, NONE),
        ("2x1", {"shard": True, "tensor": 2}, SHARDED, FULL),
        ("2x1", {"overlap": "sliced", "tensor": 2}, TENSOR, OPTIMIZER),
        ("1x2", {}, PIPELINE, NONE),
        ("1x2", {"overlap": "sliced"}, PIPELINE, NONE),
        ("2x2", {"shard": True}, PIPELINE, NONE),
        ("2x2", {"overlap": "sliced"}, PIPELINE, OPTIMIZER),
        ("2-1", {"overlap": "sliced"}, PIPELINE, OPTIMIZER),
        ("2x2", {"shard": True, "overlap": "sliced", "tensor": 2}, PIPELINE, OPTIMIZER),
        # It keeps older weights, which are not divided.
        ("2x2", {"schedule": "pipedream", "overlap": "sliced"}, PIPELINE, NONE),
        ("2x1", {"schedule": "pipedream", "shard": True}, PIPELINE, NONE),
        ("2x1", {"schedule": "pipedream", "has_layers": False, "shard": True}, SHARDED, FULL),
        ("1x1s2", {}, SPATIAL, NONE),
        ("2x1s2", {"shard": True}, SPATIAL, NONE),
        ("2x1s2", {"overlap": "sliced"}, SPATIAL, NONE),
    ],
)  # fmt: skip
def test_the_kind_follows_from_layout_and_settings(text, options, kind, sharding):
    choice = chosen(text, **options)
    assert (choice.kind, choice.sharding, choice.remark) == (kind, sharding, "")
    assert choice.divides_parameters == (sharding is FULL or options.get("tensor", 1) > 1)


@pytest.mark.parametrize(
    ("text", "options", "kind", "remark"),
    [
        ("4x1", {"shard": True}, DATA, "too old; every rank holds the whole model"),
        ("2x1", {"shard": True, "tensor": 2}, TENSOR,
         "too old; every replica holds the whole model"),
        ("1x1", {"shard": True}, DATA, ""),
        ("2x2", {"shard": True}, PIPELINE, ""),
        ("2x1", {}, DATA, ""),
    ],
)  # fmt: skip
def test_what_this_torch_cannot_divide_is_left_whole_and_logged(text, options, kind, remark):
    choice = chosen(text, unsupported="too old", **options)
    assert (choice.kind, choice.sharding, choice.remark) == (kind, NONE, remark)


@pytest.mark.parametrize(
    ("script", "unsupported", "sharding"),
    [
        (settings(), "", NONE),
        (settings(shard=True), "", FULL),
        (settings(shard=True), "too old", NONE),
        (settings(overlap="sliced"), "", OPTIMIZER),
        (settings(overlap="sliced"), "too old", OPTIMIZER),
    ],
)
def test_what_a_script_divides_by_its_own_choice(script, unsupported, sharding):
    assert own_sharding(script, unsupported=unsupported) is sharding
