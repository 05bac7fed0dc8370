"""The two networks of the paper on spatial groups (TPDS 32(7), 2021), of any size."""

from __future__ import annotations

import torch
from torch import nn


def cosmoflow(width: int, *, norm: bool = False, channels: int = 4, first: int = 16) -> nn.Module:
    """Return a CosmoFlow for cubes of this width: four parameters of a universe.

    Args:
        width: a power of 2.
        norm: batch normalisation after each convolution.
        channels: of the input.
        first: channels of the first convolution; twice as many in each block, up to 16 times.
    """
    layers: list[nn.Module] = []
    now, extent = channels, width
    for block in range(width.bit_length() - 3):
        wide = min(first * 2**block, first * 16)
        layers.append(nn.Conv3d(now, wide, 3, padding=1))
        if norm:
            layers.append(nn.BatchNorm3d(wide))
        layers += [nn.LeakyReLU(0.3), nn.AvgPool3d(3, 2, 1)]
        now, extent = wide, extent // 2
    layers += [nn.Flatten(), nn.Linear(now * extent**3, 2048), nn.LeakyReLU(0.3)]
    layers += [nn.Linear(2048, 256), nn.LeakyReLU(0.3), nn.Linear(256, 4)]
    return nn.Sequential(*layers)


class UNet3d(nn.Module):  # type: ignore[misc] # torch is untyped here
    """A 3D U-Net: three levels and a bottom, three classes for each voxel.

    Args:
        channels: of the input.
        first: channels of the first convolution; 32 in the paper.
    """

    def __init__(self, channels: int = 1, first: int = 32) -> None:
        super().__init__()
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        self.join = nn.ModuleList()
        now = channels
        for level in range(3):
            wide = first * 2**level
            self.down.append(_block(now, wide, 2 * wide))
            now = 2 * wide
        self.pool = nn.MaxPool3d(2)
        self.bottom = _block(now, now, 2 * now)
        now *= 2
        for level in reversed(range(3)):
            skip = first * 2 ** (level + 1)
            self.up.append(nn.ConvTranspose3d(now, now, 2, stride=2))
            self.join.append(_block(now + skip, skip, skip))
            now = skip
        self.last = nn.Conv3d(now, 3, 1)

    def forward(self, volume: torch.Tensor) -> torch.Tensor:
        """Return a score of each class for each voxel."""
        skips = []
        for block in self.down:
            volume = block(volume)
            skips.append(volume)
            volume = self.pool(volume)
        volume = self.bottom(volume)
        for up, join in zip(self.up, self.join, strict=True):
            volume = join(torch.cat([skips.pop(), up(volume)], dim=1))
        scores: torch.Tensor = self.last(volume)
        return scores


def _block(channels: int, middle: int, out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(channels, middle, 3, padding=1),
        nn.BatchNorm3d(middle),
        nn.ReLU(),
        nn.Conv3d(middle, out, 3, padding=1),
        nn.BatchNorm3d(out),
        nn.ReLU(),
    )
