"""Layers on slabs compute what one rank computes, and what they cannot compute is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.spatial import networks
from slurm_elastic.core.slab_grid import SlabGrid, SpatialCutError
from slurm_elastic.training.spatial.network_trace import trace_network
from slurm_elastic.training.spatial.slab_layers import spatial_whole
from slurm_elastic.training.spatial.slab_tensor import SlabTensor, slab_tensor
from slurm_elastic.training.spatial.spatial_group import SpatialGroup
from tests.support.trainings.pipeline_ranks import spawn
from tests.support.trainings.spatial_ranks import largest_differences, spatial_group

EXTENTS = (6, 5, 4)


def _cosmoflow() -> nn.Module:
    convolutions, dense = networks.cosmoflow(16, first=2)[:-6], nn.LazyLinear(3)
    return nn.Sequential(*convolutions, nn.MaxPool3d(3, 2, 1), nn.Flatten(), dense)


def _unet() -> nn.Module:
    return networks.UNet3d(first=2)


@pytest.mark.parametrize(
    "cuts",
    [
        [(2, 1, 1), (1, 2), (2,)],
        [(3, 1, 1), (3, 1), (3,)],
        [(1, 4, 1), (2, 2), (4,)],
        [(2, 1, 2), (4, 1)],
        [(2, 2, 2)],
    ],
)
def test_results_gradients_and_statistics_are_those_of_one_rank(
    tmp_path: Path, cuts: list[tuple[int, ...]]
) -> None:
    """A cut of one dimension is also one of samples of one dimension, and so on."""
    for results in spawn(tmp_path, math.prod(cuts[0]), largest_differences, cuts):
        for single, differences in results:
            worst = max(differences, key=differences.__getitem__)
            assert differences[worst] < (1e-5 if single else 1e-10), worst


def _sent_and_predicted(
    rank: int, make: Callable[[], nn.Module], shape: tuple[int, ...], parts: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Return the bytes that the rank sends in forward and backward pass, and those predicted."""
    channels, *extents = shape
    group, model, volume = spatial_group(rank, parts), make(), torch.randn(1, *shape)
    model(volume)  # the last layer of one network learns its shape from it
    network = trace_network(model, channels, tuple(extents))
    slab = volume[(..., *group.grid.slab(extents))]
    output = model(slab_tensor(slab, group, tuple(extents)))
    sent = [group.sent_bytes]
    output.sum().backward()
    sent.append(group.sent_bytes - sent[0])
    return list(zip(sent, network.sent_bytes(group.grid), strict=True))


@pytest.mark.parametrize("parts", [(2, 1, 1), (3, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2)])
@pytest.mark.parametrize(
    ("make", "shape"), [(_cosmoflow, (4, 19, 18, 17)), (_unet, (1, 24, 16, 16))]
)
def test_ranks_send_the_bytes_that_the_model_predicts(
    tmp_path: Path,
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    parts: tuple[int, ...],
) -> None:
    for passes in spawn(tmp_path, math.prod(parts), _sent_and_predicted, make, shape, parts):
        for sent, predicted in passes:
            assert sent == predicted > 0


def _dice(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    probable = torch.softmax(output, dim=1)
    axes = (2, 3, 4)
    common, sizes = (probable * targets).sum(axes), (probable + targets).sum(axes)
    return 1.0 - (2.0 * common / sizes).mean()


def _intersection_over_union(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    predicted = output.argmax(dim=1)
    ratios = [
        ((predicted == i) & (labels == i)).sum() / ((predicted == i) | (labels == i)).sum()
        for i in range(3)
    ]
    return torch.stack(ratios).mean()


#: Of (output, targets): for each voxel a class, or values.
_OF_LABELS: dict[str, Callable[..., torch.Tensor]] = {
    "cross entropy": functional.cross_entropy,
    "weighted": nn.CrossEntropyLoss(
        torch.tensor([0.2, 0.3, 0.5]), ignore_index=1, label_smoothing=0.1
    ),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "each": lambda output, labels: functional.cross_entropy(
        output, labels, reduction="none"
    ).mean(),
    "likelihood": lambda output, labels: functional.nll_loss(output.log_softmax(1), labels),
    "accuracy": lambda output, labels: (output.argmax(1) == labels).float().mean(),
    "intersection over union": _intersection_over_union,
}
_OF_VALUES: dict[str, Callable[..., torch.Tensor]] = {
    "squared": functional.mse_loss,
    "absolute": functional.l1_loss,
    "smooth": functional.smooth_l1_loss,
    "probabilities": lambda output, values: functional.cross_entropy(output, values.softmax(1)),
    "binary": lambda output, values: functional.binary_cross_entropy(output.sigmoid(), values),
    "logits": functional.binary_cross_entropy_with_logits,
    "dice": _dice,
}


def _losses(rank: int, parts: tuple[int, ...]) -> dict[str, float]:
    """Return by loss or metric the largest difference from one rank: its value, its gradient."""
    group = spatial_group(rank, parts)
    torch.manual_seed(0)
    output, labels = torch.randn(2, 3, *EXTENTS), torch.randint(0, 3, (2, *EXTENTS))
    values = torch.rand(2, 3, *EXTENTS)
    slab = group.grid.slab(EXTENTS)
    differences = {}
    for name, function in (_OF_LABELS | _OF_VALUES).items():
        targets = labels if name in _OF_LABELS else values
        whole, own = (t.clone().requires_grad_() for t in (output, output[(..., *slab)]))
        expected = function(whole, targets)
        actual = function(
            slab_tensor(own, group, EXTENTS), slab_tensor(targets[(..., *slab)], group, EXTENTS)
        )
        differences[name] = float((actual - expected).detach().abs() / expected.detach().abs())
        if expected.requires_grad:
            expected.backward()
            (actual / group.size).backward()
            difference = (own.grad - whole.grad[(..., *slab)]).abs().max() / whole.grad.abs().max()
            differences[f"gradient of {name}"] = float(difference)
    return differences


@pytest.mark.parametrize("parts", [(2, 1, 1), (3, 1, 1), (2, 1, 2)])
def test_losses_and_metrics_are_those_of_the_whole_volume(
    tmp_path: Path, parts: tuple[int, ...]
) -> None:
    for differences in spawn(tmp_path, math.prod(parts), _losses, parts):
        assert len(differences) == 26, "two metrics have no gradient"
        worst = max(differences, key=differences.__getitem__)
        assert differences[worst] < 1e-6, worst


def _dropped(rank: int, parts: tuple[int, ...]) -> torch.Tensor:
    group = spatial_group(rank, parts)
    torch.manual_seed(7)
    cut = slab_tensor(torch.ones(1, 2, *EXTENTS)[(..., *group.grid.slab(EXTENTS))], group, EXTENTS)
    return spatial_whole(functional.dropout(cut, 0.4))


def test_dropout_does_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    alone = spawn(tmp_path / "1", 1, _dropped, (1, 1, 1))[0]
    for together in spawn(tmp_path / "2", 2, _dropped, (1, 1, 2)):
        assert torch.equal(together, alone)
    assert 0.4 < float((alone > 0).float().mean()) < 0.8


@pytest.fixture
def cut() -> SlabTensor:
    """Return a tensor of which this process has the first of two slabs."""
    group = SpatialGroup(SlabGrid((2, 1, 1)), [0, 1])
    return slab_tensor(torch.zeros(1, 3, 3, 5, 4), group, EXTENTS)


@pytest.mark.parametrize(
    ("operation", "culprit"),
    [
        (lambda x: x.mean(dim=2), "some of the spatial dimensions"),
        (lambda x: x.flip(2), "flip of a tensor that is cut in space"),
        (lambda x: x[:, :, 1:], "__getitem__ of a tensor that is cut in space"),
        (lambda x: functional.softmax(x, dim=2), "softmax along dimension 2"),
        (lambda x: torch.cat([x, x], dim=2), "cat along dimension 2"),
        (lambda x: functional.interpolate(x, scale_factor=2, mode="trilinear"), "trilinear"),
        (lambda x: functional.pad(x, [1, 1]), "pad of a tensor that is cut in space"),
    ],
)
def test_what_would_mean_something_else_on_a_slab_is_refused(
    cut: SlabTensor, operation: Callable[[torch.Tensor], torch.Tensor], culprit: str
) -> None:
    with pytest.raises(SpatialCutError, match=culprit):
        operation(cut)


def test_a_cut_tensor_has_the_shape_of_the_whole(cut: SlabTensor) -> None:
    assert cut.shape == cut.size() == (1, 3, *EXTENTS)
    assert (cut + 1.0).relu_().shape[2] == 6
    assert cut.numel() == 3 * math.prod(EXTENTS)


def test_a_volume_with_fewer_planes_than_ranks_names_both() -> None:
    with pytest.raises(SpatialCutError, match=r"volume of 3x5x4 .* cut of 4x1x1.*use fewer ranks"):
        SlabGrid((4, 1, 1)).slab((3, 5, 4))
