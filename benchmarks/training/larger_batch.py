"""Loss of accuracy with a larger batch at the same number of samples, by learning-rate rule.

    python -m benchmarks.training.larger_batch [--batch 512] [--seeds 3] [--json]

The network and images of `docs/examples/train_cnn.py` on one rank: SGD with momentum, a cosine
schedule over eight epochs, batches of 64. After the first epoch the larger batch is ordered at
once, as far as no controller would go in one decision. Accuracy is that on 2048 held-out images.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import tempfile
from typing import Any

from benchmarks import ROOT
from slurm_elastic.training import init  # before torch

import torch  # isort: skip
from torch import nn

EXAMPLE = ROOT / "docs" / "examples" / "train_cnn.py"
EPOCHS, SAMPLES, BATCH = 8, 4096, 64
_FIRST = SAMPLES // BATCH


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.larger_batch")
    parser.add_argument("--batch", type=int, default=512, help="after the first epoch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        trained(rule, seed=seed, batch=args.batch)
        for seed in range(args.seeds)
        for rule in ("", "constant", "sqrt", "linear", "adascale")
    ]
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{'batch':<6}{'rule':<10}{'seed':>4}{'steps':>7}{'schedule':>10}{'accuracy':>10}")
    for row in rows:
        print(
            f"{row['batch']:<6}{row['rule'] or '-':<10}{row['seed']:>4}{row['steps']:>7}"
            f"{row['schedule']:>10}{row['accuracy']:>10.1%}"
        )


def trained(rule: str, *, seed: int, batch: int) -> dict[str, Any]:
    """Train once and return the figures; rule "" keeps the batch.

    Returns:
        Steps taken and steps of the schedule, and the accuracy at the end.
    """
    example = _example()
    os.environ["SLURM_ELASTIC"] = f"1,batch={BATCH}-{max(BATCH + 1, batch)}"
    torch.manual_seed(seed)
    model = example.network()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    steps = 0
    with tempfile.TemporaryDirectory() as out:
        job = init(
            model,
            nn.CrossEntropyLoss(),
            optimizer,
            example.images(SAMPLES, seed=seed, draw=1),
            global_batch=BATCH,
            epochs=EPOCHS,
            checkpoint_dir=out,
            seed=seed,
            scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * _FIRST),
            batch_rule=rule or "constant",
        )
        orders = job._reporter.orders  # noqa: SLF001 - no controller orders here

        def ordered(**options: Any) -> Any:
            late = rule and job.steps_done >= _FIRST
            return dataclasses.replace(orders(**options), batch=batch if late else None)

        job._reporter.orders = ordered  # type: ignore[method-assign]  # noqa: SLF001
        for part in job:
            job.step(part)
            steps += 1
        held_out = example.images(2048, seed=seed, draw=2)
        accuracy = example.validate(job.model, held_out, job.device)
        job.finish()
    return {
        "rule": rule,
        "batch": batch if rule else BATCH,
        "seed": seed,
        "steps": steps,
        "schedule": job.scheduler.last_epoch,
        "accuracy": accuracy["accuracy"],
    }


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("train_cnn", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
