"""Layers that are found in a model."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from slurm_elastic.models.spatial.volume_layers import KeptVolume  # noqa: E402
from slurm_elastic.training.spatial.network_trace import trace_network  # noqa: E402


def test_kept_tensors_are_those_that_torch_keeps() -> None:
    nn = torch.nn
    model = nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.AvgPool3d(2), nn.Flatten()
    )
    sizes: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # Statistics of the normalisation are no volumes.
        if tensor.dim() == 5 and tensor.untyped_storage().data_ptr() not in weights:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(1, 2, 8, 8, 8))
    network = trace_network(model, 2, (8, 8, 8))
    assert network.kept == (KeptVolume(2, (8,) * 3), *[KeptVolume(4, (8,) * 3)] * 2)
    assert 8**3 * sum(volume.channels for volume in network.kept) == sum(sizes.values())


def test_parameters_and_operations_are_counted() -> None:
    model = torch.nn.Sequential(torch.nn.Conv3d(2, 4, 3), torch.nn.ConvTranspose3d(4, 3, 2, 2))
    network = trace_network(model, 2, (6, 6, 6))
    assert [layer.kind for layer in network.layers] == ["convolution", "transposed"]
    assert network.parameters == (2 * 4 * 27 + 4) + (4 * 3 * 8 + 3)
    assert network.operations == 2 * (2 * 4 * 27 + 4 * 3 * 8) * 4**3


@pytest.mark.parametrize("padding", ["same", 2])
def test_tracing_changes_no_model(padding: str | int) -> None:
    model = torch.nn.Conv2d(1, 1, 5, padding=padding)
    before = model.weight.clone()
    layer = trace_network(model, 1, (8, 8)).layers[0]
    assert layer.extents == ((8, 8), (8, 8))
    assert torch.equal(model.weight, before)
    assert not model._forward_hooks
