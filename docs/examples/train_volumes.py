#!/usr/bin/env python3
"""Two 3D networks on generated volumes, of which several ranks may share each sample.

    python docs/examples/train_volumes.py --out /tmp/cosmo                     # one rank
    esrun --local 2 python docs/examples/train_volumes.py --out /tmp/two --group 2
    python docs/examples/train_volumes.py --out /tmp/unet --network unet
    sbatch docs/examples/train_volumes.sbatch                   # as the directive says

`cosmoflow` finds two parameters of a random field: its amplitude and how fast its waves weaken with
their frequency. `unet` divides the voxels of a field into three classes. No rank ever makes a whole
volume: it asks the dataset for the slab that it holds. The losses do not depend on the ranks.

Writes OUT/losses.jsonl: one line per step with the loss and the layout.
"""

# Before torch: the library starts torch faster than torch does.
from slurm_elastic.training import init  # isort: skip

import argparse
import json
import math
from pathlib import Path

import torch
from torch import nn

#: Waves that a field consists of, and channels of a volume.
WAVES, CHANNELS = 12, 2
#: Values of the first channel at which the class of a voxel changes.
THRESHOLDS = (-0.4, 0.4)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a 3D network on generated volumes.")
    parser.add_argument("--out", type=Path, required=True, help="directory on a shared file system")
    parser.add_argument("--network", choices=("cosmoflow", "unet"), default="cosmoflow")
    parser.add_argument("--width", type=int, default=32, help="voxels of a side, a power of two")
    parser.add_argument(
        "--filters", type=int, default=8, help="channels of the first block; published: 16, 32"
    )
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=4)
    parser.add_argument("--group", type=int, metavar="N", help="ranks that share a sample")
    parser.add_argument("--checkpoint-every", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class RandomFields:
    """Sums of plane waves, with a target of two numbers each, or a class for each voxel."""

    def __init__(self, samples: int, width: int, *, classes: bool, seed: int) -> None:
        self.extents = (width, width, width)
        self.samples, self.classes, self.seed = samples, classes, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.read(index, tuple(slice(0, extent) for extent in self.extents))

    def read(self, index: int, slab: tuple[slice, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the [channel, depth, height, width] part of a sample, and its target."""
        generator = torch.Generator().manual_seed(self.seed * self.samples + index)
        amplitude, decay = 0.5 + torch.rand(2, generator=generator)
        frequencies = torch.randint(1, 5, (WAVES, 3), generator=generator).double()
        phases = 2 * math.pi * torch.rand(CHANNELS, WAVES, generator=generator).double()
        strengths = amplitude * frequencies.norm(dim=1) ** -decay
        axes = [
            torch.arange(part.start, part.stop, dtype=torch.float64) / extent
            for part, extent in zip(slab, self.extents, strict=True)
        ]
        positions = torch.stack(torch.meshgrid(*axes, indexing="ij"))
        angles = 2 * math.pi * torch.einsum("wa,adhv->wdhv", frequencies, positions)
        waves = torch.cos(angles + phases[:, :, None, None, None])
        volume = torch.einsum("w,cwdhv->cdhv", strengths, waves).float()
        if self.classes:
            return volume, torch.bucketize(volume[0], torch.tensor(THRESHOLDS))
        return volume, torch.stack([amplitude, decay])


def cosmoflow(width: int, filters: int) -> nn.Sequential:
    """Return log2(width) - 2 blocks down to 4 voxels a side, and three dense layers."""
    layers: list[nn.Module] = []
    before = CHANNELS
    for block in range(int(math.log2(width)) - 2):
        after = filters * 2**block
        layers += [nn.Conv3d(before, after, 3, padding=1), nn.LeakyReLU(0.3)]
        layers += [nn.AvgPool3d(3, stride=2, padding=1)]
        before = after
    layers += [nn.Flatten(), nn.Linear(before * 4**3, 64), nn.LeakyReLU(0.3)]
    layers += [nn.Linear(64, 32), nn.LeakyReLU(0.3), nn.Linear(32, 2)]
    return nn.Sequential(*layers)  # without dropout, whose draws depend on the number of groups


def block(before: int, middle: int, after: int) -> nn.Sequential:
    """Return two convolutions; each sample is normalised by itself, whatever the batch."""
    return nn.Sequential(
        nn.Conv3d(before, middle, 3, padding=1),
        nn.InstanceNorm3d(middle, affine=True),
        nn.ReLU(),
        nn.Conv3d(middle, after, 3, padding=1),
        nn.InstanceNorm3d(after, affine=True),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """A U-Net of three levels; every level is a volume, so that nothing is ever gathered."""

    def __init__(self, filters: int) -> None:
        super().__init__()
        f = filters
        self.down = nn.ModuleList(
            [block(CHANNELS, f, 2 * f), block(2 * f, 2 * f, 4 * f), block(4 * f, 4 * f, 8 * f)]
        )
        self.bottom = block(8 * f, 8 * f, 16 * f)
        self.enlarge = nn.ModuleList(
            [nn.ConvTranspose3d(n * f, n * f, 2, stride=2) for n in (16, 8, 4)]
        )
        self.up = nn.ModuleList(
            [
                block((16 + 8) * f, 8 * f, 8 * f),
                block((8 + 4) * f, 4 * f, 4 * f),
                block((4 + 2) * f, 2 * f, 2 * f),
            ]
        )
        self.last = nn.Conv3d(2 * f, len(THRESHOLDS) + 1, 1)
        self.pool = nn.MaxPool3d(2)

    def forward(self, volume: torch.Tensor) -> torch.Tensor:
        skips = []
        for level in self.down:
            volume = level(volume)
            skips.append(volume)
            volume = self.pool(volume)
        volume = self.bottom(volume)
        for enlarge, level in zip(self.enlarge, self.up, strict=True):
            volume = level(torch.cat([enlarge(volume), skips.pop()], dim=1))
        return self.last(volume)


def main() -> None:
    args = arguments()
    if args.width < 16 or args.width & (args.width - 1):
        raise SystemExit(
            f"train_volumes.py: --width {args.width} is invalid: expected 16, 32, 64, …"
        )
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    classes = args.network == "unet"
    model = UNet(args.filters) if classes else cosmoflow(args.width, args.filters)
    job = init(
        model,
        nn.CrossEntropyLoss() if classes else nn.MSELoss(),
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        RandomFields(args.samples, args.width, classes=classes, seed=args.seed),
        global_batch=args.global_batch,
        epochs=args.epochs,
        checkpoint_dir=args.out / "checkpoints",
        seed=args.seed,
        checkpoint_every_s=args.checkpoint_every,
        spatial=(args.group, 1, 1) if args.group else None,
    )
    steps = args.epochs * math.ceil(args.samples / args.global_batch)
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "losses.jsonl").open("a", buffering=1) as losses:
        for batch in job:
            loss = job.step(batch)
            if job.rank == 0:
                line = {"step": batch.step, "loss": loss, "layout": job.layout}
                losses.write(json.dumps(line) + "\n")
                if batch.step % 8 == 0:
                    print(f"step {batch.step} of {steps}: loss {loss:.4f}", flush=True)
    job.finish()


if __name__ == "__main__":
    main()
