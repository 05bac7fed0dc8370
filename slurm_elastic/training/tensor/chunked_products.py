"""Products of linear layers whose sums over the group travel while the next chunk is multiplied.

The tokens (all dimensions but the last) are cut into chunks. The sum of a chunk over the group
starts as soon as its product is there (CoCoNet, ASPLOS'22, "overlap"). The terms of each sum are
those of one chunk; only BLAS may add them up in another order where a chunk has few tokens. A
row-parallel layer sums its outputs, a column-parallel one the gradient of its inputs, during which
the gradient of the weights is computed, too.
"""

from __future__ import annotations

from typing import Any

import torch

from slurm_elastic.training.ranks.group_guard import StartedCollective
from slurm_elastic.training.ranks.subgroup import Subgroup

_OPERATION = "adding up products of a tensor-parallel group"


class Chunking:
    """Number of chunks of the products of one model.

    Attributes:
        count: of a product with so many tokens or more.
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count


def row_product(
    inputs: torch.Tensor, weight: torch.Tensor, group: Subgroup, chunking: Chunking
) -> torch.Tensor:
    """Return the product of a row-parallel layer, without its bias, the same on all ranks.

    Args:
        inputs: shape (..., features of this rank).
        weight: shape (outputs, features of this rank).
        group: of this rank.
        chunking: of the tokens.
    """
    inputs, weight = _autocast(inputs, weight)
    result: torch.Tensor = _RowProduct.apply(inputs, weight, group, chunking.count)
    return result


def column_product(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: Subgroup,
    chunking: Chunking,
) -> torch.Tensor:
    """Return the output features of this rank.

    Args:
        inputs: shape (..., features), the same on all ranks.
        weight: shape (outputs of this rank, features).
        bias: shape (outputs of this rank,), or None.
        group: of this rank.
        chunking: of the tokens.
    """
    inputs, weight = _autocast(inputs, weight)
    result: torch.Tensor = _ColumnProduct.apply(inputs, weight, group, chunking.count)
    return result if bias is None else result + bias.to(result.dtype)


def _autocast(inputs: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both in the type in which autocast multiplies, if it is on."""
    device = inputs.device.type
    if not torch.is_autocast_enabled(device):
        return inputs, weight
    dtype = torch.get_autocast_dtype(device)
    return inputs.to(dtype), weight.to(dtype)


def _summed(
    left: torch.Tensor, right: torch.Tensor, group: Subgroup, chunks: int
) -> tuple[torch.Tensor, list[StartedCollective]]:
    """Return a product that is being summed over the group, and the sums to wait for.

    It is no view of another tensor: modules after it may change it in place.

    Args:
        left: shape (..., n).
        right: shape (n, columns).
        group: of this rank.
        chunks: of the rows.
    """
    product = left.new_empty(*left.shape[:-1], right.shape[1])
    started = []
    rows = zip(
        left.reshape(-1, left.shape[-1]).chunk(chunks),
        product.view(-1, right.shape[1]).chunk(chunks),
        strict=True,
    )
    for part, result in rows:
        torch.mm(part, right, out=result)
        started.append(group.start_sum(result, _OPERATION))
    return product, started


class _RowProduct(torch.autograd.Function):  # type: ignore[misc] # torch is untyped here
    """Product of a row-parallel layer."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, group: Subgroup, chunks: int
    ) -> torch.Tensor:
        product, started = _summed(inputs, weight.t(), group, chunks)
        ctx.save_for_backward(inputs, weight)
        for work in started:
            group.wait(work)
        return product

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        of_inputs = of_weight = None
        if ctx.needs_input_grad[0]:
            of_inputs = gradient @ weight
        if ctx.needs_input_grad[1]:
            of_weight = _of_weight(gradient, inputs)
        return of_inputs, of_weight, None, None


class _ColumnProduct(torch.autograd.Function):  # type: ignore[misc] # torch is untyped here
    """Product of a column-parallel layer."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, group: Subgroup, chunks: int
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.group, ctx.chunks = group, chunks
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        of_inputs = of_weight = None
        started: list[StartedCollective] = []
        if ctx.needs_input_grad[0]:
            of_inputs, started = _summed(gradient, weight, ctx.group, ctx.chunks)
        if ctx.needs_input_grad[1]:
            of_weight = _of_weight(gradient, inputs)
        for work in started:
            ctx.group.wait(work)
        return of_inputs, of_weight, None, None


def _of_weight(gradient: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return gradient.reshape(-1, gradient.shape[-1]).t() @ inputs.reshape(-1, inputs.shape[-1])
