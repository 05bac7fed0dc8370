"""Surface terms of layers on volumes, against counts by hand."""

from __future__ import annotations

import pytest

from slurm_elastic.core.slab_grid import SlabGrid, SlidingWindow, TransposedWindow
from slurm_elastic.models.spatial.volume_layers import VolumeLayer

_WIDTH, _FACE = 16, 16 * 16


def _layer(window: SlidingWindow | TransposedWindow, out: int = _WIDTH) -> VolumeLayer:
    extents = ((_WIDTH,) * 3, (out,) * 3)
    return VolumeLayer("layer", "convolution", (3, 5), extents, (window,) * 3)


@pytest.mark.parametrize(
    ("kernel", "dilation", "planes"), [(1, 1, 0), (3, 1, 1), (5, 1, 2), (3, 2, 2)]
)
def test_planes_of_a_convolution_follow_its_reach(kernel: int, dilation: int, planes: int) -> None:
    layer = _layer(SlidingWindow(kernel, 1, planes, dilation))
    face = 3 * _FACE * planes
    for ranks in (2, 4):
        sent = [layer.halo_values(SlabGrid((ranks, 1, 1), index)) for index in range(ranks)]
        assert sent == [face, *[2 * face] * (ranks - 2), face]
        assert layer.halo_values(SlabGrid((1, 1, 1))) == 0


def test_pooling_sends_planes_only_where_windows_overlap() -> None:
    grids = [SlabGrid((2, 1, 1), index) for index in range(2)]
    apart, over = (_layer(SlidingWindow(k, 2, p), _WIDTH // 2) for k, p in ((2, 0), (3, 1)))
    assert [apart.halo_values(grid) for grid in grids] == [0, 0]
    # The upper rank needs one plane of the lower one.
    assert [over.halo_values(grid) for grid in grids] == [3 * _FACE, 0]


def test_transposed_convolution_by_its_stride_sends_nothing() -> None:
    layer = _layer(TransposedWindow(2, 2, 0), 2 * _WIDTH)
    assert layer.halo_values(SlabGrid((2, 1, 1), 1)) == 0


def test_cut_of_two_dimensions_sends_corners_with_the_second() -> None:
    layer = _layer(SlidingWindow(3, 1, 1))
    half = _WIDTH // 2
    assert layer.halo_values(SlabGrid((2, 2, 1), 0)) == 3 * _WIDTH * (half + half + 1)


def test_group_returns_as_many_gradients_as_it_sends_values() -> None:
    for parts in ((4, 1, 1), (2, 2, 1), (3, 1, 1)):
        grids = [SlabGrid(parts, index) for index in range(SlabGrid(parts).size)]
        layer = _layer(SlidingWindow(5, 1, 2))
        sent = sum(layer.halo_values(grid) for grid in grids)
        assert sent == sum(layer.returned_values(grid) for grid in grids) > 0


def test_volume_that_is_gathered_is_sent_to_all_others() -> None:
    layer = VolumeLayer("flatten", "elementwise", (3, 3 * _WIDTH**3), ((_WIDTH,) * 3, ()))
    assert layer.gathers(SlabGrid((4, 1, 1)))
    assert layer.halo_values(SlabGrid((4, 1, 1), 2)) == 3 * 3 * _FACE * 4
