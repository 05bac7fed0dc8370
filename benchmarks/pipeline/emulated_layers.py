"""Emulated devices: layers that take the time of a profile, with real tensors.

A layer's output and parameters have the profile's sizes, so that what travels is real; its
passes sleep, so that several ranks share a processor without slowing each other. The
arithmetic is cheap and depends on inputs, parameters and their order: what a wrong
pipeline computes differs.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from slurm_elastic.core.layers import Layer, LayerProfile, chain

#: Of the whole model's compute: layers below it join the one before them.
_LEAST = 0.01


def language_model(layers: int = 6) -> LayerProfile:
    """Return an LSTM language model of width 1024, 32,000 words; minibatches of 16 x 64.

    Sizes are what such a model has (464 MB), times are invented: those of an older GPU.
    """
    words = 16 * 64 * 1024 * 4.0
    lstm = 8 * 1024**2 * 4.0
    table = 32_000 * 1024 * 4.0
    return chain(
        [
            Layer("embedding", 0.001, 0.002, words, table),
            *(Layer(f"lstm{i}", 0.010, 0.020, words, lstm) for i in range(layers)),
            # With its loss, so that nothing large leaves it.
            Layer("softmax", 0.010, 0.020, 4096.0, table),
        ]
    )


def chained(profile: LayerProfile) -> LayerProfile:
    """Return a profile's layers in a row, the small ones joined to the previous one.

    What crosses a cut is what all layers before it send behind it, so that branches cost
    what they cost; cuts through branches are lost.
    """
    ordered = [profile.layers[i] for i in profile.topological()]
    place = {layer.name: at for at, layer in enumerate(ordered)}
    reach = dict(place)
    for source, target in profile.edges:
        reach[source] = max(reach[source], place[target])
    floor = _LEAST * profile.compute_s
    row: list[Layer] = []
    for at, layer in enumerate(ordered):
        out = sum(o.activation_bytes for o in ordered[: at + 1] if reach[o.name] > at)
        last = at == len(ordered) - 1
        out = layer.activation_bytes if last else out
        joins = row and (layer.compute_s < floor or row[-1].compute_s < floor)
        before = row.pop() if joins else Layer(layer.name, 0.0, 0.0, 0.0, 0.0)
        row.append(
            Layer(
                before.name,
                before.forward_s + layer.forward_s,
                before.backward_s + layer.backward_s,
                out,
                before.parameter_bytes + layer.parameter_bytes,
            )
        )
    return chain(row)


def modules(
    profile: LayerProfile, *, samples: int, shrink: float, slow: float
) -> list[tuple[str, Any]]:
    """Return the layers of a chain, in order.

    Args:
        profile: of minibatches.
        samples: that make a minibatch; passes of fewer take less time and carry less.
        shrink: sizes are divided by it.
        slow: times are multiplied by it.
    """
    per, pace = shrink * 4 * samples, slow / samples
    return [
        (
            layer.name,
            Emulated(
                seconds=(layer.forward_s * pace, layer.backward_s * pace),
                outputs=max(1, round(layer.activation_bytes / per)),
                weights=max(1, round(layer.parameter_bytes / (4 * shrink))),
            ),
        )
        for layer in profile.layers
    ]


class Emulated(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """One layer, from (samples, any) to (samples, outputs).

    Args:
        seconds: of a sample's forward and backward pass.
        outputs: numbers per sample.
        weights: parameters.
    """

    def __init__(self, *, seconds: tuple[float, float], outputs: int, weights: int) -> None:
        super().__init__()
        self._seconds, self._outputs = seconds, outputs
        self.weight = torch.nn.Parameter(0.1 * torch.randn(weights))

    def forward(self, x: Any) -> Any:
        """Take the layer's time, and again when gradients come back."""
        return _Paced.apply(x, self.weight, self._outputs, self._seconds)


class _Paced(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """y = tanh(x + w + mean(w)), with x and w cut off or repeated to y's length.

    By hand, so that the arithmetic is part of the time that a pass takes.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, outputs: int, seconds: tuple[float, float]) -> Any:
        begun = time.perf_counter()
        y = torch.tanh(_of_length(x, outputs) + _of_length(weight[None], outputs) + weight.mean())
        ctx.save_for_backward(y)
        ctx.lengths, ctx.backward_s = (x.shape[1], len(weight)), len(x) * seconds[1]
        _until(begun + len(x) * seconds[0])
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        begun = time.perf_counter()
        (y,) = ctx.saved_tensors
        length, weights = ctx.lengths
        inner = gradient * (1 - y * y)
        of_weight = _folded(inner.sum(dim=0, keepdim=True), weights)[0]
        of_weight += inner.sum() / weights
        of_x = _folded(inner, length) if ctx.needs_input_grad[0] else None
        _until(begun + ctx.backward_s)
        return of_x, of_weight, None, None


def _until(when: float) -> None:
    time.sleep(max(0.0, when - time.perf_counter()))


def _of_length(rows: Any, length: int) -> Any:
    """Return rows of numbers cut off, or repeated, to this length."""
    have = rows.shape[1]
    return rows[:, :length] if have >= length else rows.repeat(1, -(-length // have))[:, :length]


def _folded(rows: Any, length: int) -> Any:
    """Return the gradient of `_of_length` for rows of this length."""
    missing = -rows.shape[1] % length
    return torch.nn.functional.pad(rows, (0, missing)).unflatten(1, (-1, length)).sum(dim=1)
