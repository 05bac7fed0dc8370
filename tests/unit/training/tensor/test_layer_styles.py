"""Which layers are divided, and what a script may ask for."""

from __future__ import annotations

import pytest
from torch import nn

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.training.tensor.layer_styles import check_styles, layer_styles
from tests.support.trainings.tensor_ranks import OwnBlock


def styles(model: nn.Module, size: int = 2, given: dict[str, str] | None = None) -> dict[str, str]:
    return {name: style.value for name, style in layer_styles(model, size, given).items()}


def test_pairs_attention_and_large_layers_are_divided() -> None:
    model = nn.Sequential(
        nn.TransformerEncoderLayer(8, 4, 16),
        nn.Linear(8, 4),
        nn.ReLU(),
        nn.Linear(4, 256),
        nn.LayerNorm(256),
        nn.Linear(256, 256),
        nn.Linear(256, 8),
    )
    assert styles(model) == {
        "0.self_attn": "heads",
        "0.linear1": "colwise",
        "0.linear2": "rowwise",
        "1": "colwise",
        "3": "rowwise",
        "5": "colwise",
        "6": "rowwise",
    }
    assert styles(model, 3) == {}


def test_shared_weights_subclasses_and_changed_layers_stay_whole() -> None:
    class Own(nn.Linear):
        pass

    embedding, head, changed = nn.Embedding(512, 256), nn.Linear(256, 512), nn.Linear(256, 256)
    head.weight = embedding.weight
    changed.forward = changed.forward  # type: ignore[method-assign]
    scaled = nn.utils.parametrizations.weight_norm(nn.Linear(256, 256))
    model = nn.Sequential(embedding, Own(256, 256), nn.LayerNorm(256), changed, scaled, head)
    assert styles(model) == {}


def test_styles_of_the_script_come_first_and_the_first_pattern_counts() -> None:
    model = nn.Sequential(OwnBlock(24), OwnBlock(24))
    given = {"1.fc1": "whole", "*.fc1": "colwise_gather_output", "0.fc2": "rowwise"}
    assert styles(model, given=given) == {"0.fc1": "colwise_gather_output", "0.fc2": "rowwise"}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"fc1": "columns"}, "'columns' of 'fc1' is invalid: expected colwise, rowwise"),
        ({"fc3": "colwise"}, "'fc3' is invalid: expected the name of a module"),
        ({"": "colwise"}, "a OwnBlock, is invalid: expected an nn.Linear"),
        ({"fc1": "colwise"}, "'fc1' with 9 features is invalid for groups of 2 ranks"),
        ({"fc2": "rowwise"}, "'fc2' with 9 features is invalid for groups of 2 ranks"),
    ],
)
def test_wrong_styles_are_named(given: dict[str, str], line: str) -> None:
    with pytest.raises(InvalidInputError, match=line):
        check_styles([OwnBlock(9)], 2, given)
