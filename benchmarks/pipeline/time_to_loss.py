"""Time to a loss: a pipeline with weight stashing against data parallelism, on a slow network.

    python -m benchmarks.pipeline.time_to_loss [--ranks 2] [--loss 0.02] [--network 200e6]
        [--rate 0.1] [--seeds 3]

Eight fully connected layers that really compute learn a smooth function of eight numbers. Ranks are
processes in network namespaces of their own (slow_network.py). All arms see the same
samples in the same order, each once, so that the loss of a step is that of samples not seen before.
They take turns, blocks of 12 steps, until the mean loss of a block is at most `--loss`:

- data parallel: one flat all-reduce after the backward pass, one update per step;
- the same with as many times the learning rate as there are ranks; DDP and 1f1b with that, too;
- pipedream: the partitioner's plan, an update for each of a step's minibatches (one per rank),
  with the weights of older versions that its forward passes had seen.

A seed is that of the parameters and of the samples; the layers are measured, and the plan is made,
anew for each. Medians are shown, and least and most of all seeds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.pipeline import slow_network

_BASE = "data parallel"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline.time_to_loss")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 3, 4, 6))
    parser.add_argument("--loss", type=float, default=0.02, help="mean of a block, to be reached")
    parser.add_argument("--network", type=float, default=200e6, metavar="BITS", help="per second")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--width", type=int, default=256, help="of the layers")
    parser.add_argument("--most", type=int, default=60, help="blocks of an arm")
    parser.add_argument("--seeds", type=int, default=1, help="runs, with seeds from 0 on")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for name in ("loss", "network", "rate", "width", "most", "seeds"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name}: give more than 0")
    if importlib.util.find_spec("torch") is None:
        sys.exit("benchmarks.pipeline.time_to_loss: needs PyTorch: pip install torch")
    try:
        slow_network.enter("benchmarks.pipeline.time_to_loss", sys.argv[1:])
        runs = [race(args, seed) for seed in range(args.seeds)]
    except slow_network.NoNetworkError as error:
        sys.exit(f"benchmarks.pipeline.time_to_loss: {error}")
    if args.json:
        print(json.dumps(runs))
    else:
        _show(runs, args)


def race(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run all ranks with one seed; return the figures of rank 0."""
    options = {
        "--ranks": args.ranks, "--bits": args.network, "--width": args.width, "--loss": args.loss,
        "--most": args.most, "--rate": args.rate, "--seed": seed,
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.pipeline.loss_ranks"]
    command += [str(word) for pair in options.items() for word in pair]
    with slow_network.Switch(args.network) as switch:
        processes = [switch.start([*command, "--rank", str(rank)]) for rank in range(args.ranks)]
        said, _ = processes[0].communicate()
        if processes[0].returncode:
            sys.exit(f"benchmarks.pipeline.time_to_loss: rank 0 of {args.ranks} failed, see above")
    figures: dict[str, Any] = json.loads(said.splitlines()[-1])
    return figures


def _show(runs: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    first = runs[0]
    print(
        f"{args.ranks} ranks, ports of {args.network / 1e6:.0f} Mb/s,"
        f" {first['parameter_bytes'] / 1e6:.2f} MB of parameters, {first['batch']} samples a step,"
        f" learning rate {args.rate:g}; to a loss of {args.loss:g}, {len(runs)} seed(s)"
    )
    for seed, run in enumerate(runs):
        plan = "-".join(str(replicas) for replicas, _ in run["plan"])
        layers = "+".join(str(count) for _, count in run["plan"])
        print(f"seed {seed}: plan {plan} of {layers} layers")
    print(f"{'':26}{'reached':>8}{'seconds':>22}{'of first':>20}{'updates':>18}{'ms a step':>11}")
    for name in first["arms"]:
        rows = [run["arms"][name] for run in runs]
        reached = sum(row["losses"][-1] <= args.loss for row in rows)
        step_ms = [
            1e3 * row["seconds"] * run["batch"] / row["samples"]
            for run, row in zip(runs, rows, strict=True)
        ]
        of_first = [
            row["seconds"] / run["arms"][_BASE]["seconds"]
            for run, row in zip(runs, rows, strict=True)
        ]
        print(
            f"{name:26}{f'{reached}/{len(runs)}':>8}"
            f"{_range([row['seconds'] for row in rows], '{:.1f}'.format):>22}"
            f"{_range(of_first, '{:.2f}'.format):>20}"
            f"{_range([row['updates'] for row in rows], '{:.0f}'.format):>18}"
            f"{statistics.median(step_ms):>11.0f}"
        )


def _range(values: Sequence[float], text: Callable[[float], str]) -> str:
    """Return the median, and least and most if there are several.

    >>> _range([3.0, 1.0, 2.0], "{:.0f}".format)
    '2 (1 to 3)'
    """
    median = text(statistics.median(values))
    return f"{median} ({text(min(values))} to {text(max(values))})" if len(values) > 1 else median


if __name__ == "__main__":
    main()
