"""Ranks that share the weights of layers, for the tests of tensor parallelism."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed, nn

from slurm_elastic.training.ranks.group_guard import GroupGuard
from slurm_elastic.training.ranks.subgroup import Subgroup, subgroup
from slurm_elastic.training.tensor.chunked_products import Chunking
from slurm_elastic.training.tensor.divided_layers import DividedLayers
from slurm_elastic.training.tensor.layer_styles import layer_styles

WIDTH, HEADS, TOKENS, SAMPLES = 12, 6, 5, 3
#: From an input of shape (samples, tokens, width) to a result, through a module.
Call = Callable[[Any, torch.Tensor], torch.Tensor]


class OwnBlock(nn.Module):
    """Two layers in a `forward` of its own, which is one of a pair only by styles of the script."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.relu(self.fc1(x)))


def whole_group() -> Subgroup:
    """Return the group of all ranks."""
    world: Any = SimpleNamespace(
        rank=distributed.get_rank(), device=torch.device("cpu"), guard=GroupGuard()
    )
    return subgroup(world, [range(distributed.get_world_size())])


def divided(model: nn.Module, group: Subgroup, **options: Any) -> DividedLayers:
    """Divide a model among the ranks of a group."""
    styles = layer_styles(model, group.size, options.get("styles"))
    chunking = Chunking(options.get("chunks", 1))
    return DividedLayers(model, styles, group, name="tensor", chunking=chunking)


def cases() -> dict[str, tuple[nn.Module, Call, dict[str, str], int]]:
    """Return by name: module, its call, styles of the script, and layers that are divided."""
    torch.manual_seed(3)

    def attention(**options: Any) -> nn.MultiheadAttention:
        return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options)

    def pair(*between: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 24), *between, nn.Linear(24, WIDTH))

    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    by_head = torch.randn(SAMPLES * HEADS, TOKENS, TOKENS)
    padding = torch.zeros(SAMPLES, TOKENS, dtype=torch.bool)
    padding[0, -2:] = True

    def itself(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module(x)

    def attends(**options: Any) -> Call:
        return lambda module, x: module(x, x, x, **options)[0]

    encoder = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 24, dropout=0.0, activation="gelu", batch_first=True
    )
    decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True)
    own = {"fc1": "colwise", "fc*": "rowwise"}
    return {
        "pair": (pair(nn.GELU(), nn.Dropout(0.0)), itself, {}, 2),
        "pair, its output changed in place": (
            nn.Sequential(
                nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH, bias=False), nn.ReLU(inplace=True)
            ),
            itself,
            {},
            2,
        ),
        "pair with a norm between": (pair(nn.LayerNorm(24)), itself, {}, 0),
        "large layer": (nn.Sequential(nn.Linear(WIDTH, 6000)), itself, {}, 1),
        "own block": (OwnBlock(24), itself, {}, 0),
        "own block with styles": (OwnBlock(24), itself, own, 2),
        "rows alone": (nn.Sequential(nn.Linear(WIDTH, 5)), itself, {"0": "rowwise"}, 1),
        "attention": (attention(), attends(need_weights=False), {}, 1),
        "attention, its weights": (attention(bias=False), attends(), {}, 1),
        "attention, causal": (
            attention(),
            attends(need_weights=False, attn_mask=causal, is_causal=True),
            {},
            1,
        ),
        "attention, padded": (
            attention(),
            attends(need_weights=False, attn_mask=by_head, key_padding_mask=padding),
            {},
            1,
        ),
        "cross attention": (
            attention(),
            lambda module, x: module(x, x.flip(1), 2 * x, need_weights=True)[0],
            {},
            1,
        ),
        "attention, tokens first": (
            nn.MultiheadAttention(WIDTH, HEADS),
            attends(need_weights=False),
            {},
            1,
        ),
        "attention of one sample": (
            attention(),
            lambda module, x: module(x[0], x[0], x[0], need_weights=False)[0],
            {},
            1,
        ),
        "attention with keys of its own": (attention(add_bias_kv=True), attends(), {}, 0),
        "encoder layer": (encoder, itself, {}, 3),
        "decoder layer": (decoder, lambda module, x: module(x, x.flip(1)), {}, 4),
    }


def largest_differences(rank: int, chunks: int) -> dict[str, float]:
    """Return by case the largest difference from one rank, of results and gradients."""
    del rank
    group = whole_group()
    return {name: _difference(group, chunks, *case) for name, case in cases().items()}


def _difference(
    group: Subgroup, chunks: int, module: nn.Module, call: Call, styles: dict[str, str], count: int
) -> float:
    module = module.double()
    torch.manual_seed(4)
    whole = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    alone, alone_input = copy.deepcopy(module), whole.detach().clone().requires_grad_()
    assert len(layer_styles(module, group.size, styles)) == count
    parts = divided(module, group, styles=styles, chunks=chunks)
    result, expected = call(module, whole), call(alone, alone_input)
    weights = torch.randn_like(expected)
    (result * weights).sum().backward()
    (expected * weights).sum().backward()
    pairs = [(result, expected), (whole.grad, alone_input.grad)]
    for parameter, other in zip(module.parameters(), alone.parameters(), strict=True):
        gradient = parameter.grad
        if hasattr(gradient, "full_tensor"):
            assert parameter.to_local().numel() * group.size == other.numel()
            gradient = gradient.full_tensor()
        pairs.append((gradient, other.grad))
    parts.undo()
    return max(float(((a - b).abs() / (1.0 + b.abs())).max()) for a, b in pairs)


#: Of tokens: fewer than some chunks, not a multiple of them, and a multiple of all.
TOKEN_COUNTS = (1, 3, 5, 16)
CHUNKS = (1, 2, 4, 8)


def chunked_values(rank: int, *, exact: bool) -> list[dict[int, list[torch.Tensor]]]:
    """Return outputs and gradients of layers by the number of chunks, for each count of tokens.

    Args:
        rank: of this process.
        exact: all values are small whole numbers, whose sums are exact in any order.
    """
    del rank
    group = whole_group()
    width = 4 * group.size
    outcomes = []
    for tokens, pair in itertools.product(TOKEN_COUNTS, (True, False)):
        torch.manual_seed(5)
        # A pair, and a layer whose outputs are collected.
        names = {"0": "colwise", "2": "rowwise"} if pair else {"0": "colwise_gather_output"}
        layers = [nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, WIDTH)]
        model = nn.Sequential(*(layers if pair else layers[:1]))
        inputs = torch.randn(1, tokens, WIDTH)
        values = [*model.parameters(), inputs]
        if exact:
            for value in values:
                value.detach().mul_(3).round_()
        by_chunks = {}
        for chunks in CHUNKS:
            divided_model, leaf = copy.deepcopy(model), inputs.clone().requires_grad_()
            parts = divided(divided_model, group, styles=names, chunks=chunks)
            result = divided_model(leaf)
            (result * torch.arange(float(WIDTH if pair else width))).sum().backward()
            gradients: list[Any] = [leaf.grad, *(p.grad for p in divided_model.parameters())]
            own = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
            by_chunks[chunks] = [result.detach(), *own]
            parts.undo()
        outcomes.append(by_chunks)
    return outcomes


def differences_and_chunks(rank: int, chunks: int) -> tuple[dict[str, float], Any, Any]:
    """Return `largest_differences`, and `chunked_values` of any and of whole numbers."""
    differences = largest_differences(rank, chunks) if chunks else {}
    return differences, chunked_values(rank, exact=False), chunked_values(rank, exact=True)


def evaluated_difference(rank: int) -> float:
    """Return the difference of an encoder that evaluates without gradients, from one rank."""
    del rank
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    alone, inputs = copy.deepcopy(model), torch.randn(SAMPLES, TOKENS, WIDTH)
    with torch.no_grad():
        expected = alone(inputs)
        divided(model, whole_group())
        return float((model(inputs) - expected).abs().max())


def dropped_places(rank: int) -> tuple[torch.Tensor, float]:
    """Return the dropped elements of this rank's ones, and a random number drawn afterwards."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(2, 400), nn.Dropout(0.5), nn.Linear(400, 2))
    divided(model, whole_group())
    del rank
    kept = model[1](torch.ones(200)) > 0
    return kept, float(torch.rand(()))
