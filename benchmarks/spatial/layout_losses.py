"""One rank of a training of docs/examples/train_volumes.py, which writes the losses of its steps.

As the script, but in a given precision, with a given number of ranks that share a sample.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slurm_elastic.training import init

_SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "train_volumes.py"
#: Voxels of a side, channels of the first block, samples of a step, and steps of an epoch.
_WIDTH, _FILTERS, _BATCH, _EPOCH = 32, 8, 4, 4


def main() -> None:
    """Train as one rank."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spatial.layout_losses")
    parser.add_argument("--network", choices=("cosmoflow", "unet"), required=True)
    parser.add_argument("--group", type=int, required=True, help="ranks that share a sample")
    parser.add_argument("--dtype", choices=("float32", "float64"), required=True)
    parser.add_argument(
        "--micro", type=int, required=True, help="samples through the model at once"
    )
    parser.add_argument("--steps", type=int, required=True, help=f"a multiple of {_EPOCH}")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    script, dtype = _script(), getattr(torch, args.dtype)
    classes = args.network == "unet"
    model = script.UNet(_FILTERS) if classes else script.cosmoflow(_WIDTH, _FILTERS)
    model.to(dtype)
    fields = script.RandomFields(_EPOCH * _BATCH, _WIDTH, classes=classes, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        job = init(
            model,
            nn.CrossEntropyLoss() if classes else nn.MSELoss(),
            torch.optim.AdamW(model.parameters(), lr=2e-3),
            InPrecision(fields, dtype),
            global_batch=_BATCH,
            micro_batch=args.micro,
            epochs=args.steps // _EPOCH,
            checkpoint_dir=Path(folder),
            spatial=(args.group, 1, 1) if args.group > 1 else None,
        )
        losses = [job.step(batch) for batch in job]
        job.finish()
    (args.out / f"{os.environ['RANK']}.json").write_text(json.dumps(losses), encoding="utf-8")


class InPrecision:
    """Samples of the example as numbers of another type; classes stay as they are.

    Args:
        fields: the samples.
        dtype: of the numbers.
    """

    def __init__(self, fields: Any, dtype: torch.dtype) -> None:
        self._fields, self._dtype, self.extents = fields, dtype, fields.extents

    def __len__(self) -> int:
        return len(self._fields)

    def read(self, index: int, slab: tuple[slice, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a part of a sample, and its target."""
        volume, target = self._fields.read(index, slab)
        if target.is_floating_point():
            target = target.to(self._dtype)
        return volume.to(self._dtype), target

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.read(index, tuple(slice(0, extent) for extent in self.extents))


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("train_volumes", _SCRIPT)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{_SCRIPT}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
