"""Losses of a small GPT on one rank and on four: how rounding grows with the training.

    python -m benchmarks.training.loss_drift [--rates 6e-3,2e-2] [--steps 150]

The same batches, AdamW, gradients clipped to norm 1, no dropout. Columns: largest difference of the
loss from that on one rank, over the steps up to the given one. Beside four ranks: one rank whose
initial weights are changed by a relative 10⁻⁷ (float32) or 10⁻¹⁵ (float64), less than the type
resolves ten times over. If the division among ranks were wrong, four ranks would
differ in float64 as they do in float32, and from the first step on.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path

from benchmarks import ROOT
from benchmarks.support.rank_processes import run_ranks

NOISE = {"float32": 1e-7, "float64": 1e-15}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.loss_drift")
    parser.add_argument("--rates", default="6e-3,2e-2", help="learning rates")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--train", metavar="OUT,TYPE,RATE,NOISE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        out, dtype, rate, noise = args.train.split(",")
        _train(Path(out), dtype, float(rate), float(noise), steps=args.steps)
        return
    marks = [step for step in (10, 30, 50, 110, args.steps) if step <= args.steps]
    print("up to step            ", *(f"{step:>8}" for step in marks))
    for rate in map(float, args.rates.split(",")):
        for dtype, noise in NOISE.items():
            alone = losses(1, dtype, rate, 0.0, steps=args.steps)
            for label, ranks, change in (("four ranks", 4, 0.0), (f"± {noise:.0e}", 1, noise)):
                other = losses(ranks, dtype, rate, change, steps=args.steps)
                worst = [max(abs(alone[s] - other[s]) for s in alone if s <= m) for m in marks]
                row = f"{dtype} {rate:.0e} {label:<10}"
                print(row, *(f"{value:8.0e}" for value in worst), flush=True)


def losses(ranks: int, dtype: str, rate: float, noise: float, *, steps: int) -> dict[int, float]:
    """Return the losses by step of a training with this number of ranks."""
    with tempfile.TemporaryDirectory() as out:
        arguments = ["--steps", str(steps), "--train", f"{out},{dtype},{rate},{noise}"]
        run_ranks(ranks, "benchmarks.training.loss_drift", arguments)
        text = (Path(out) / "losses.json").read_text(encoding="utf-8")
        return {int(step): loss for step, loss in json.loads(text).items()}


def _train(out: Path, dtype: str, rate: float, noise: float, *, steps: int) -> None:
    from slurm_elastic.training import init  # noqa: PLC0415, I001 - before torch

    import torch  # noqa: PLC0415

    sys.path.insert(0, str(ROOT / "docs" / "examples"))
    train_gpt = importlib.import_module("train_gpt")

    torch.set_default_dtype(getattr(torch, dtype))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(OrderedDict(train_gpt.layers(4, tied=True)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=generator))
    job = init(
        model,
        train_gpt.loss_fn,
        torch.optim.AdamW(model.parameters(), lr=rate),
        train_gpt.pieces(16 * steps, 0),
        global_batch=16,
        epochs=1,
        checkpoint_dir=out / "ckpt",
        clip_norm=1.0,
        checkpoint_every_s=1e9,
    )
    by_step = {batch.step: job.step(batch) for batch in job}
    if job.rank == 0:
        (out / "losses.json").write_text(json.dumps(by_step), encoding="utf-8")
    job.finish()


if __name__ == "__main__":
    main()
