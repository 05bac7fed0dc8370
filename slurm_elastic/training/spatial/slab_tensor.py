"""Activations of which each rank of a spatial group holds a slab.

A `SlabTensor` has the shape of the whole volume, samples x channels x spatial dimensions, and is
used like any tensor: functions that have a rule (`slab_rules`) compute the slab of their result,
with messages where these are needed, and all others are refused in one line. So a model needs no
change, and nothing is computed on a slab that would mean something else on the whole.

Where a result would have fewer planes than ranks, and where a layer needs the whole volume, it is
gathered: from there on every rank computes the same, on plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from slurm_elastic.core.slab_grid import SpatialCutError
from slurm_elastic.training.spatial.spatial_group import SpatialGroup

#: Function from (function, arguments, keyword arguments) to the result.
Rule = Callable[..., Any]
#: Rules by the function's name without underscores around it.
RULES: dict[str, Rule] = {}


class SlabTensor(torch.Tensor):  # type: ignore[misc] # torch is untyped here
    """Tensor of a whole volume; this rank holds a slab of it."""

    group: SpatialGroup
    extents: tuple[int, ...]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute a function of torch by its rule."""
        del types
        name = getattr(func, "__name__", str(func))
        rule = RULES.get(name.strip("_"))
        if rule is None:
            raise SpatialCutError(
                f"model: {name} of a tensor that is cut in space is invalid: expected one of the"
                " operations in docs/spatial.md; use spatial_whole(x) before it"
            )
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch's own documentation
            return rule(func, list(args), dict(kwargs or {}))

    def __repr__(self, **_: Any) -> str:
        """Return the shapes of slab and volume, without values."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return f"SlabTensor(slab {tuple(torch.Tensor.size(self))}, volume {self.extents})"

    @property
    def volume_shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        own = plain(self).shape
        return torch.Size([*own[: len(own) - len(self.extents)], *self.extents])


def slab_tensor(slab: torch.Tensor, group: SpatialGroup, extents: Sequence[int]) -> SlabTensor:
    """Return a slab as a tensor of the whole volume.

    Args:
        slab: of this rank; its last dimensions are the spatial ones.
        group: of the sample.
        extents: of the whole volume.

    Raises:
        SpatialCutError: the slab has not the shape that the cut gives this rank.
    """
    expected = tuple(part.stop - part.start for part in group.grid.slab(extents))
    actual = tuple(plain(slab).shape[-len(extents) :])
    if actual != expected:
        raise SpatialCutError(
            f"spatial: a slab of {'x'.join(map(str, actual))} is invalid: expected"
            f" {'x'.join(map(str, expected))}, this rank's part of {'x'.join(map(str, extents))}"
        )
    return wrapped(slab, group, tuple(extents))


def wrapped(slab: torch.Tensor, group: SpatialGroup, extents: tuple[int, ...]) -> SlabTensor:
    """Return a slab of the right shape as a tensor of the whole volume."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        result: SlabTensor = slab.as_subclass(SlabTensor)
    result.group, result.extents = group, extents
    return result


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's slab, connected in autograd; other tensors as they are."""
    if not isinstance(tensor, SlabTensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        return tensor.as_subclass(torch.Tensor)
