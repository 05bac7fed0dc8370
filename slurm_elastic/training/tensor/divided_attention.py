"""`nn.MultiheadAttention` whose heads are divided among the ranks of a group.

The weights of queries, keys and values are one matrix, in which those of a head lie apart. Each
rank keeps a part of its rows, collects the matrix for each pass, and uses the rows of its own
heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from slurm_elastic.training.ranks.subgroup import Subgroup
from slurm_elastic.training.tensor.chunked_products import Chunking, column_product, row_product
from slurm_elastic.training.tensor.group_operations import (
    GroupTotal,
    SharedUse,
    WholeActivation,
    WholeWeight,
)
from slurm_elastic.training.tensor.own_randomness import own_randomness


class DividedAttention:
    """The forward pass of an attention module with the heads of this rank.

    Args:
        module: its `in_proj_weight` and `out_proj.weight` are DTensors.
        group: of this rank; its size divides the number of heads.
        chunking: of the tokens.
    """

    def __init__(self, module: nn.MultiheadAttention, group: Subgroup, chunking: Chunking) -> None:
        self._module, self._group, self._chunking = module, group, chunking
        self._heads = module.num_heads // group.size

    def __call__(  # noqa: PLR0917 - as of nn.MultiheadAttention
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Arguments and result: as of `nn.MultiheadAttention`."""
        module, group = self._module, self._group
        batched = query.dim() == 3
        same = query is key and key is value
        inputs = [query] if same else [query, key, value]
        if not batched:
            inputs = [x.unsqueeze(0) for x in inputs]
        elif not module.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        # Shape (batch, heads of this rank, tokens, features of a head) each.
        queries, keys, values = (self._by_head(x) for x in self._projected(inputs))
        mask = self._mask(queries, keys, attn_mask, key_padding_mask)
        dropout = module.dropout if module.training else 0.0
        weights = None
        with own_randomness(group, used=dropout > 0.0):
            if need_weights:
                scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])
                weights = (scores if mask is None else scores + mask).softmax(-1)
                weights = functional.dropout(weights, dropout)
                heads = weights @ values
            else:
                heads = functional.scaled_dot_product_attention(
                    queries, keys, values, attn_mask=mask, dropout_p=dropout
                )
        output = row_product(
            heads.transpose(1, 2).flatten(2), _local(module.out_proj.weight), group, self._chunking
        )
        if module.out_proj.bias is not None:
            output = output + module.out_proj.bias.to(output.dtype)
        if not batched:
            output = output.squeeze(0)
        elif not module.batch_first:
            output = output.transpose(0, 1)
        return output, self._shown(weights, average_attn_weights, batched=batched)

    def _projected(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return queries, keys and values of this rank's heads, shape (batch, tokens, features)."""
        module, group = self._module, self._group
        whole = WholeWeight.apply(_local(module.in_proj_weight), group)
        weights = self._own_rows(whole)
        biases: Any = [None] * 3
        if module.in_proj_bias is not None:
            biases = self._own_rows(SharedUse.apply(module.in_proj_bias, group))
        if len(inputs) == 1:
            bias = None if biases[0] is None else torch.cat(biases)
            projected = column_product(inputs[0], torch.cat(weights), bias, group, self._chunking)
            return list(projected.chunk(3, dim=-1))
        return [
            column_product(x, w, b, group, self._chunking)
            for x, w, b in zip(inputs, weights, biases, strict=True)
        ]

    def _own_rows(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of this rank's heads in the parts for queries, keys and values."""
        return [part.chunk(self._group.size)[self._group.rank] for part in whole.chunk(3)]

    def _by_head(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (self._heads, -1)).transpose(1, 2)

    def _mask(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        attn_mask: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Return the mask that is added to the scores, in their shape; None: there is none."""
        mask = None
        if attn_mask is not None:
            mask = _added(attn_mask, queries.dtype)
            if mask.dim() == 3:  # one for each sample and head
                mask = mask.unflatten(0, (-1, self._module.num_heads))
                mask = mask.chunk(self._group.size, 1)[self._group.rank]
        if key_padding_mask is not None:
            padding = _added(key_padding_mask, queries.dtype).view(-1, 1, 1, keys.shape[2])
            mask = padding if mask is None else mask + padding
        return mask

    def _shown(
        self, weights: torch.Tensor | None, average: bool, *, batched: bool
    ) -> torch.Tensor | None:
        """Return the attention weights of all heads, or their mean."""
        if weights is None:
            return None
        if average:
            shown = GroupTotal.apply(weights.mean(1), self._group) / self._group.size
        else:
            shown = WholeActivation.apply(weights, 1, self._group)
        return shown if batched else shown.squeeze(0)


def _local(weight: Any) -> torch.Tensor:
    local: torch.Tensor = weight.to_local()
    return local


def _added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask as values that are added to scores; True leaves a token out."""
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
