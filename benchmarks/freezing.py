"""Time saved by frozen layers, and their loss of accuracy.

    python -m benchmarks.freezing [--steps 12] [--rounds 4] [--seeds 3] [--json]

Saving: eight equal blocks and a linear layer (16.85 MB of gradients) on two ranks of this
machine, gloo. One job; its frozen prefix goes round 0, 2, 4, 6, 8 blocks, so that a busy
machine slows all of them alike. Wall and CPU seconds of a step are rank 0's medians. Where torch
sees GPUs it runs on these (`make test-gpu`).

Cost: `docs/examples/train_cnn.py` with all layers training and with `--freeze auto`, by seed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.support.rank_processes import run_ranks

WIDTH, BLOCKS, BATCH = 512, 8, 128
RANKS = 2
_PREFIXES = (0, 2, 4, 6, 8)
#: Steps after a change of the prefix that are not measured: the choice takes two to arrive.
_SETTLE = 3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.freezing")
    parser.add_argument("--steps", type=int, default=12, help="measured with each prefix, a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3, help="0: only the saving")
    parser.add_argument("--max-penalty", type=float, default=40.0, metavar="PERCENT")
    parser.add_argument("--width", type=int, default=WIDTH, help="of a block")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        _rank(args.rank, steps=args.steps, rounds=args.rounds, width=args.width)
        return
    rows = saving(steps=args.steps, rounds=args.rounds, width=args.width)
    figures: dict[str, Any] = {"saving": rows}
    if args.seeds:
        figures["cost"] = [cost(seed, args.max_penalty) for seed in range(args.seeds)]
    if args.json:
        print(json.dumps(figures))
    else:
        _show(figures, args.max_penalty)


def saving(
    *, steps: int, rounds: int, width: int = WIDTH, ranks: int = RANKS
) -> list[dict[str, float]]:
    """Return by prefix: bytes in a step's all-reduce, wall and CPU seconds of a step."""
    with tempfile.TemporaryDirectory() as out:
        arguments = ["--rank", out, "--steps", str(steps), "--rounds", str(rounds)]
        run_ranks(ranks, "benchmarks.freezing", [*arguments, "--width", str(width)])
        rows = json.loads((Path(out) / "rows.json").read_text(encoding="utf-8"))
    return list(rows)


def cost(seed: int, max_penalty: float) -> dict[str, Any]:
    """Return one seed's accuracy (mean of the last three epochs) and CPU seconds, by mode."""
    figures: dict[str, Any] = {"seed": seed}
    for freeze in ("off", "auto"):
        with tempfile.TemporaryDirectory() as out:
            script = str(ROOT / "docs" / "examples" / "train_cnn.py")
            options = {
                "--out": out,
                "--samples": "6144",
                "--seed": str(seed),
                "--freeze": freeze,
                "--max-penalty": str(max_penalty),
            }
            subprocess.run(
                [sys.executable, script, *(word for pair in options.items() for word in pair)],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            text = (Path(out) / "epochs.jsonl").read_text(encoding="utf-8")
        epochs = [json.loads(line) for line in text.splitlines()]
        figures[freeze] = {
            "accuracy": statistics.fmean(line["accuracy"] for line in epochs[-3:]),
            "cpu_s": sum(line["cpu_s"] for line in epochs),
            "frozen": [line["frozen"] for line in epochs],
        }
    return figures


class _All:
    """Criterion by which all layers have converged."""

    plastic = False

    def see(self, look: Any) -> int:
        return int(look.layers)

    def thawed(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _network(width: int) -> list[tuple[str, Any]]:
    """Return the blocks and the linear layer behind them."""
    import torch  # noqa: PLC0415

    class Block(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(width)
            self.first = torch.nn.Linear(width, width)
            self.second = torch.nn.Linear(width, width)

        def forward(self, x: Any) -> Any:
            return x + self.second(torch.relu(self.first(self.norm(x))))

    blocks = [(f"block{i}", Block()) for i in range(BLOCKS)]
    return [*blocks, ("head", torch.nn.Linear(width, 4))]


def _rank(out: Path, *, steps: int, rounds: int, width: int) -> None:
    """Run one of the ranks; the first writes rows.json."""
    # Here: the process that starts the ranks needs no torch.
    import torch  # noqa: PLC0415

    from slurm_elastic.training import Freezing, init  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.manual_seed(0)
    turn = len(_PREFIXES) * (steps + _SETTLE)
    total = 40 + rounds * turn
    points = torch.randn(BATCH, width)
    job = init(
        _network(width),
        torch.nn.CrossEntropyLoss(),
        lambda p: torch.optim.AdamW(p, lr=1e-4),
        torch.utils.data.TensorDataset(points, (points[:, 0] > 0).long()),
        global_batch=BATCH,
        epochs=total,
        checkpoint_dir=out / "ckpt",
        checkpoint_every_s=1e9,
        freeze=Freezing(
            criterion=_All(), max_penalty=1.0, every=1, passes=1, begin=0.0, end=1.0, settled=1e9,
            alpha=1.0,
        ),
    )  # fmt: skip
    walls: dict[int, list[float]] = defaultdict(list)
    cpus: dict[int, list[float]] = defaultdict(list)
    sent: dict[int, int] = {}
    job.freeze(0)
    certified_at: int | None = None
    for batch in job:
        begun = time.perf_counter(), time.process_time()
        job.step(batch)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if certified_at is None:
            if len(job.penalties) > BLOCKS:
                certified_at = batch.step
            continue
        place = (batch.step - certified_at - 1) % turn
        wanted, within = _PREFIXES[place // (steps + _SETTLE)], place % (steps + _SETTLE)
        if within == 0:
            job.freeze(wanted)
        elif within >= _SETTLE and job.frozen == wanted:
            walls[wanted].append(time.perf_counter() - begun[0])
            cpus[wanted].append(time.process_time() - begun[1])
            sent[wanted] = job.reduced_bytes
    if job.rank == 0:
        rows = [
            {
                "frozen": n,
                "bytes": sent[n],
                "step_s": statistics.median(walls[n]),
                "cpu_s": statistics.median(cpus[n]),
                "steps": len(walls[n]),
            }
            for n in _PREFIXES
        ]
        (out / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    job.finish()


def _show(measured: dict[str, Any], max_penalty: float) -> None:
    print("frozen   all-reduce   step      CPU of rank 0")
    first = measured["saving"][0]
    for row in measured["saving"]:
        print(
            f"{row['frozen']} of {BLOCKS}   {row['bytes'] / 1e6:6.2f} MB   "
            f"{row['step_s'] * 1e3:5.1f} ms   {row['cpu_s'] * 1e3:5.1f} ms"
            f"   ({row['step_s'] / first['step_s']:.2f}, {row['cpu_s'] / first['cpu_s']:.2f}"
            f" of none; {row['steps']} steps)"
        )
    if "cost" in measured:
        print(f"\nCNN, max-penalty {max_penalty:g}%: accuracy, CPU seconds, layers frozen by epoch")
    for row in measured.get("cost", []):
        off, auto = row["off"], row["auto"]
        print(
            f"seed {row['seed']}: {off['accuracy']:.2%} -> {auto['accuracy']:.2%}, "
            f"{off['cpu_s']:.1f} -> {auto['cpu_s']:.1f} s, {auto['frozen']}"
        )


if __name__ == "__main__":
    main()
