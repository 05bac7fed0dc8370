"""The interior of a slab is computed while planes are under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from slurm_elastic.core.slab_grid import SlabGrid
from slurm_elastic.training.spatial import slab_rules  # noqa: F401 - registers the rules
from slurm_elastic.training.spatial.slab_tensor import plain, slab_tensor
from slurm_elastic.training.spatial.spatial_group import PlaneMessages, SpatialGroup

#: The last dimension is cut, so that nothing is pooled before planes are sent. The rank in the
#: middle of three has the planes from 4 to 8.
EXTENTS = (3, 3, 12)
#: An event, and the planes of what was computed.
Event = tuple[Any, ...]


class RecordingGroup(SpatialGroup):
    """The middle one of three ranks, without the others: their planes are zeros."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__(SlabGrid((1, 1, 3), 1), range(3))
        self._events = events

    def start(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> PlaneMessages:
        """Note that messages are started."""
        for _, memory in receives:
            memory.zero_()
        self._events.append(("start", [planes.shape[-1] for _, planes in sends]))
        return RecordedMessages(self._events)


class RecordedMessages(PlaneMessages):
    """Messages of which only the wait is noted."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__([], [])
        self._events = events

    def wait(self) -> None:
        """Note it."""
        self._events.append(("wait",))


class RecordedOperations(TorchDispatchMode):
    """Record of convolutions and pooling: the planes of their results, or what they differentiate.

    Args:
        events: to which they are added.
    """

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute, and note."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "convolution_backward":
            inputs, *_ = args[-1]
            self._events.append(("gradient of", "planes" if inputs else "weights"))
        elif name == "avg_pool3d_backward":
            self._events.append(("gradient of", args[0].shape[-1]))
        elif name in {"convolution", "avg_pool3d"}:
            self._events.append(("result", result.shape[-1]))
        return result


@pytest.mark.parametrize(
    ("layer", "forward", "backward"),
    [
        (
            nn.Conv3d(2, 2, 3, padding=1),
            [("start", [1, 1]), ("result", 2), ("wait",), ("result", 1), ("result", 1)],
            [
                *[("gradient of", "planes"), ("start", [1, 1])],
                *[("gradient of", "weights"), ("wait",)],
            ],
        ),
        (
            nn.AvgPool3d(3, 1, 1),
            [("start", [1, 1]), ("result", 2), ("wait",), ("result", 1), ("result", 1)],
            [
                *[("gradient of", 1), ("gradient of", 1), ("start", [1, 1])],
                *[("gradient of", 2), ("wait",)],
            ],
        ),
    ],
)
def test_what_needs_no_planes_of_others_is_computed_before_the_wait_for_them(
    layer: Callable[[torch.Tensor], torch.Tensor], forward: list[Event], backward: list[Event]
) -> None:
    events: list[Event] = []
    slab = torch.randn(1, 2, 3, 3, 4, requires_grad=True)
    with RecordedOperations(events):
        output = plain(layer(slab_tensor(slab, RecordingGroup(events), EXTENTS)))
        assert events == forward
        events.clear()
        output.backward(torch.ones(output.shape))
    # Pooling computes its results again.
    assert [event for event in events if event[0] != "result"] == backward
