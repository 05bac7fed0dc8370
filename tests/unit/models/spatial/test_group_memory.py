"""Memory of spatial groups: the paper's networks, shares of ranks, least groups."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from benchmarks.spatial.networks import UNet3d, cosmoflow  # noqa: E402
from slurm_elastic.core.slab_grid import SlabGrid  # noqa: E402
from slurm_elastic.models.spatial.group_memory import group_memory, least_group  # noqa: E402
from slurm_elastic.models.spatial.volume_layers import VolumeNetwork  # noqa: E402
from slurm_elastic.training.spatial.network_trace import trace_network  # noqa: E402

_GIB = 2**30


def _cosmoflow(width: int, *, norm: bool = False) -> VolumeNetwork:
    with torch.device("meta"):
        return trace_network(cosmoflow(width, norm=norm), 4, (width,) * 3)


def _unet(width: int) -> VolumeNetwork:
    with torch.device("meta"):
        return trace_network(UNet3d(), 1, (width,) * 3)


@pytest.mark.parametrize(
    ("width", "plain_gib", "norm_gib", "planes_mib", "of_convolutions_mib", "parameters_m"),
    [
        (128, 0.39, 0.55, 3.4, 1.4, 35.3),
        (256, 3.08, 4.41, 13.7, 5.9, 37.0),
        (512, 24.65, 35.31, 54.9, 23.6, 38.8),
    ],
)
def test_cosmoflow_keeps_and_sends_what_the_layer_sizes_imply(
    width: int,
    plain_gib: float,
    norm_gib: float,
    planes_mib: float,
    of_convolutions_mib: float,
    parameters_m: float,
) -> None:
    plain, normed = _cosmoflow(width), _cosmoflow(width, norm=True)
    assert group_memory(plain, (1, 1, 1)).activations / _GIB == pytest.approx(plain_gib, rel=0.02)
    assert group_memory(normed, (1, 1, 1)).activations / _GIB == pytest.approx(norm_gib, rel=0.02)
    inner = SlabGrid((4, 1, 1), 1)
    sent_mib = {
        kind: sum(layer.halo_values(inner) for layer in plain.layers if layer.kind == kind) / 2**18
        for kind in ("convolution", "pooling")
    }
    assert sent_mib["convolution"] == pytest.approx(of_convolutions_mib, rel=0.04)
    # The paper sends whole planes; here those of pooling layers are pooled first, to a quarter.
    whole_mib = plain.sent_bytes(inner)[0] / 2**20 + 3 * sent_mib["pooling"]
    assert whole_mib == pytest.approx(planes_mib, rel=0.02)
    assert plain.parameters / 1e6 == pytest.approx(parameters_m, rel=0.002)


@pytest.mark.parametrize(("traced", "width"), [(_cosmoflow, 128), (_unet, 64)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_keeps_its_share_and_planes_beside_it(
    traced: Callable[[int], VolumeNetwork], width: int, ranks: int
) -> None:
    network = traced(width)
    alone, cut = group_memory(network, (1, 1, 1)), group_memory(network, (ranks, 1, 1))
    assert alone.planes == 0
    assert cut.weights == alone.weights == 16 * network.parameters
    share = cut.activations / alone.activations
    # Dense layers are whole on each rank.
    assert 1 / ranks <= share <= 1 / ranks + 0.001
    assert 0 < cut.planes < 0.1 * alone.activations


def test_memory_grows_with_the_batch_and_the_size_of_a_value() -> None:
    network = _cosmoflow(128)
    one = group_memory(network, (2, 1, 1))
    many = group_memory(network, (2, 1, 1), batch=4, item=2)
    assert (many.activations, many.planes) == (2 * one.activations, 2 * one.planes)
    assert many.weights == one.weights


@pytest.mark.parametrize("memory_gb", [8, 16, 40])
def test_the_least_group_fits_and_a_smaller_one_does_not(memory_gb: int) -> None:
    network, memory = _cosmoflow(512), memory_gb * 10**9
    group = least_group(network, memory)
    assert group is not None
    assert group[0] > 1
    assert group_memory(network, group).total <= memory
    assert group_memory(network, (group[0] - 1, 1, 1)).total > memory


def test_no_group_has_room_for_weights_larger_than_a_gpu() -> None:
    network = _cosmoflow(128)
    assert least_group(network, 16 * network.parameters) is None
    assert least_group(network, 10**12) == (1, 1, 1)


def test_a_rank_of_an_uneven_cut_that_needs_most_is_counted() -> None:
    network = _cosmoflow(128)
    cut = group_memory(network, (3, 1, 1))
    shares = [
        4 * sum(volume.values(SlabGrid((3, 1, 1), index)) for volume in network.kept)
        for index in range(3)
    ]
    assert cut.activations == max(shares)
    assert math.ceil(group_memory(network, (1, 1, 1)).activations / 3) < cut.activations
