"""One rank of `benchmarks.spatial`: a training in one spatial group, and what it costs."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from benchmarks.spatial.networks import UNet3d, cosmoflow
from slurm_elastic.core.slab_grid import SlabGrid
from slurm_elastic.models.spatial.volume_layers import VolumeLayer
from slurm_elastic.training.spatial import slab_rules  # noqa: F401 - registers the rules
from slurm_elastic.training.spatial.network_trace import trace_network
from slurm_elastic.training.spatial.slab_layers import slab_of
from slurm_elastic.training.spatial.slab_tensor import plain, slab_tensor
from slurm_elastic.training.spatial.spatial_group import PlaneMessages, SpatialGroup

#: Channels of the input, and channels of the first convolution: small, for processors.
NETWORKS: dict[str, tuple[int, Callable[[int], nn.Module]]] = {
    "cosmoflow": (4, lambda width: cosmoflow(width, first=8)),
    "unet": (1, lambda _: UNet3d(first=8)),
    "paper": (4, cosmoflow),
}


def main() -> None:
    """Run one rank; it writes its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spatial.ranks")
    parser.add_argument("--part", choices=("group", "layers", "overlap"), required=True)
    parser.add_argument("--network", choices=NETWORKS, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--parts", type=int, default=1, help="of the group whose layers are timed")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    channels, make = NETWORKS[args.network]
    model, volume = make(args.width), torch.randn(1, channels, *[args.width] * 3)
    if args.part == "layers":
        alone = AbsentGroup(SlabGrid((args.parts, 1, 1), args.parts // 2), range(args.parts))
        figures: dict[str, Any] = {"layers": _layer_times(model, volume, alone, args.steps)}
    else:
        distributed.init_process_group("gloo", rank=rank, world_size=ranks)
        grid = SlabGrid((ranks, 1, 1), rank)
        group = SpatialGroup(grid, range(ranks))
        part = _group_figures if args.part == "group" else _overlap_figures
        figures = part(model, volume, group, args.steps)
        distributed.barrier()
    (args.out / f"{rank}.json").write_text(json.dumps(figures), encoding="utf-8")


class KeptBytes:
    """Bytes of tensors kept for the backward pass, each memory counted once, without weights."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._sizes: dict[int, int] = {}

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self._sizes.values())

    def __enter__(self) -> KeptBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor


def _step(model: nn.Module, volume: torch.Tensor, group: SpatialGroup) -> None:
    """Run both passes of one sample, without the exchange of the weights' gradients."""
    model.zero_grad(set_to_none=True)
    output = model(volume)
    (output.square().mean() / group.size).backward()


def _cut(volume: torch.Tensor, group: SpatialGroup) -> torch.Tensor:
    extents = tuple(volume.shape[2:])
    whole = slab_tensor(volume, SpatialGroup(SlabGrid((1, 1, 1)), [0]), extents)
    whole.group = group
    # A copy: the memory of a view is that of the whole volume.
    slab = slab_of(volume, whole).clone(memory_format=torch.contiguous_format)
    return slab_tensor(slab, group, extents)


def _group_figures(
    model: nn.Module, volume: torch.Tensor, group: SpatialGroup, steps: int
) -> dict[str, Any]:
    """Return bytes kept and sent, and the times of a step."""
    slab = _cut(volume, group)
    kept = KeptBytes(model)
    with kept:
        loss = model(slab).square().mean() / group.size
    forward_bytes = group.sent_bytes
    loss.backward()
    figures: dict[str, Any] = {
        "kept": kept.total,
        "sent": [forward_bytes, group.sent_bytes - forward_bytes],
        "link": _link_times(group) if group.size > 1 else [0.0, 0.0],
        "cpu_s": [],
    }
    for _ in range(steps):
        begun = time.process_time()
        _step(model, slab, group)
        figures["cpu_s"].append(time.process_time() - begun)
    return figures


def _link_times(group: SpatialGroup) -> list[float]:
    """Return the CPU seconds of a message, and of a byte."""

    def cpu_s(values: int, repeated: int) -> float:
        mine, other = torch.zeros(values), torch.empty(values)
        peer = group.grid.index ^ 1
        if peer >= group.size:
            return 0.0
        begun = time.process_time()
        for _ in range(repeated):
            group.start([(peer, mine)], [(peer, other)]).wait()
        return (time.process_time() - begun) / repeated

    cpu_s(1, 5)
    large = 1 << 18
    small_s = statistics.median(cpu_s(1, 100) for _ in range(5))
    large_s = statistics.median(cpu_s(large, 10) for _ in range(5))
    return [small_s, max(0.0, large_s - small_s) / (4 * large)]


class AbsentGroup(SpatialGroup):
    """Place of one rank in a group without the other ranks: their planes are zeros."""

    def start(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> PlaneMessages:
        """Send nothing."""
        for _, memory in receives:
            memory.zero_()
        return PlaneMessages([], [tensor.contiguous() for _, tensor in sends])

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of this rank."""
        return tensor

    def collect(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of this rank for each rank."""
        return torch.stack([tensor] * self.size)


class WaitingGroup(SpatialGroup):
    """A group whose messages are over before any other work."""

    def start(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> PlaneMessages:
        """Send and receive."""
        messages = super().start(sends, receives)
        messages.wait()
        return messages


def _layer_times(
    model: nn.Module, volume: torch.Tensor, group: SpatialGroup, steps: int
) -> list[float]:
    """Return the CPU seconds of each layer's passes, on the slab of one rank of a group.

    The layers take turns, as in a step: repeated alone, one would find its data in the cache.
    """
    layers = trace_network(model, volume.shape[1], tuple(volume.shape[2:])).layers
    seconds: list[list[float]] = [[] for _ in layers]
    for _ in range(1 + steps):
        for position, layer in enumerate(layers):
            module = model.get_submodule(layer.name)
            seconds[position].append(_layer_pass(module, layer, group, first=not position))
    return [statistics.median(row[1:]) for row in seconds]  # the first one allocates


def _layer_pass(
    module: nn.Module, layer: VolumeLayer, group: SpatialGroup, *, first: bool
) -> float:
    """Return the CPU seconds of both passes of a layer; the network's input gets no gradient."""
    inputs = layer.extents[0]
    cut = bool(inputs) and group.grid.divides(inputs)
    shape = [part.stop - part.start for part in group.grid.slab(inputs)] if cut else inputs
    leaf = torch.randn(1, layer.channels[0], *shape).requires_grad_(not first)
    module.zero_grad(set_to_none=True)
    begun = time.process_time()
    output = module(slab_tensor(leaf, group, inputs) if cut else leaf)
    forward_s = time.process_time() - begun
    result = plain(output)
    if not result.requires_grad:
        return forward_s
    gradient = torch.randn(result.shape)
    begun = time.process_time()
    result.backward(gradient)
    return forward_s + time.process_time() - begun


def _overlap_figures(
    model: nn.Module, volume: torch.Tensor, group: SpatialGroup, steps: int
) -> dict[str, Any]:
    """Return the seconds of both passes: without planes, waiting for them, and overlapped.

    Arms take turns, in an order that is turned around in every round.
    """
    arms = {
        "alone": AbsentGroup(group.grid, range(group.size)),
        "waiting": WaitingGroup(group.grid, range(group.size)),
        "overlapped": group,
    }
    slabs = {arm: _cut(volume, arm_group) for arm, arm_group in arms.items()}
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(1 + steps):
        for arm in arms if turn % 2 else reversed(arms):
            distributed.barrier()
            begun = time.monotonic()
            _step(model, slabs[arm], group)
            if turn:  # the first one allocates
                times[arm].append(time.monotonic() - begun)
    return {"times": times}


if __name__ == "__main__":
    main()
