"""Time to a loss: a pipeline with weight stashing against data parallelism, on a slow network.

    python -m benchmarks.time_to_loss [--ranks 2] [--loss 0.02] [--network 200e6] [--rate 0.1]

Eight fully connected layers that really compute learn a smooth function of eight numbers. Ranks are
processes in network namespaces of their own (drivers/slow_network.py). All arms see the same
samples in the same order, each once, so that the loss of a step is that of samples not seen before.
They take turns, blocks of 12 steps, until the mean loss of a block is at most `--loss`:

- data parallel: one flat all-reduce after the backward pass, one update per step;
- the same with as many times the learning rate as there are ranks; DDP and 1f1b with that, too;
- pipedream: the partitioner's plan, an update for each of a step's minibatches (one per rank),
  with the weights of older versions that its forward passes had seen.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from typing import Any

from benchmarks.drivers import slow_network

_BASE = "data parallel"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.time_to_loss")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 3, 4, 6))
    parser.add_argument("--loss", type=float, default=0.02, help="mean of a block, to be reached")
    parser.add_argument("--network", type=float, default=200e6, metavar="BITS", help="per second")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--width", type=int, default=256, help="of the layers")
    parser.add_argument("--most", type=int, default=60, help="blocks of an arm")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for name in ("loss", "network", "rate", "width", "most"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name}: give more than 0")
    if importlib.util.find_spec("torch") is None:
        sys.exit("benchmarks.time_to_loss: needs PyTorch: pip install torch")
    try:
        slow_network.enter("benchmarks.time_to_loss", sys.argv[1:])
        figures = race(args)
    except slow_network.NoNetworkError as error:
        sys.exit(f"benchmarks.time_to_loss: {error}")
    if args.json:
        print(json.dumps(figures))
    else:
        _show(figures, args)


def race(args: argparse.Namespace) -> dict[str, Any]:
    """Run all ranks; return the figures of rank 0."""
    options = {
        "--ranks": args.ranks, "--bits": args.network, "--width": args.width, "--loss": args.loss,
        "--most": args.most, "--rate": args.rate,
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.drivers.loss_race"]
    command += [str(word) for pair in options.items() for word in pair]
    with slow_network.Switch(args.network) as switch:
        processes = [switch.start([*command, "--rank", str(rank)]) for rank in range(args.ranks)]
        said, _ = processes[0].communicate()
        if processes[0].returncode:
            sys.exit(f"benchmarks.time_to_loss: rank 0 of {args.ranks} failed, see above")
    figures: dict[str, Any] = json.loads(said.splitlines()[-1])
    return figures


def _show(figures: dict[str, Any], args: argparse.Namespace) -> None:
    plan = "-".join(str(replicas) for replicas, _ in figures["plan"])
    layers = "+".join(str(count) for _, count in figures["plan"])
    print(
        f"{args.ranks} ranks, ports of {args.network / 1e6:.0f} Mb/s, plan {plan} of {layers}"
        f" layers, {figures['parameter_bytes'] / 1e6:.2f} MB of parameters, {figures['batch']}"
        f" samples a step, learning rate {args.rate:g}; to a loss of {args.loss:g}"
    )
    print(f"{'':26}{'reached':>8}{'seconds':>9}{'of first':>10}{'samples':>9}{'updates':>9}"
          f"{'ms a step':>11}{'last loss':>11}")  # fmt: skip
    rows = figures["arms"]
    for name, row in rows.items():
        reached = row["losses"][-1] <= args.loss
        steps = row["samples"] / figures["batch"]
        print(
            f"{name:26}{'yes' if reached else 'no':>8}{row['seconds']:>9.1f}"
            f"{row['seconds'] / rows[_BASE]['seconds']:>10.2f}{row['samples']:>9}"
            f"{row['updates']:>9}{1e3 * row['seconds'] / steps:>11.0f}{row['losses'][-1]:>11.4f}"
        )


if __name__ == "__main__":
    main()
