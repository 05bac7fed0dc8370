"""Stages x replicas, as the partitioner chooses them, compared with data parallelism.

    python -m benchmarks.pipeline [--ranks 2 4] [--model lm|linear|FILE] [--rounds 5] [--json]

Ranks are processes in network namespaces of their own on a slow, full-duplex network
(slow_network.py). Layers are emulated: passes sleep as long as a profile says;
parameters, activations and all that travels are real. `lm` is like an LSTM language model,
FILE a layer profile that `selastic partition` reads. So that two cores can carry it, sizes
and network are `--shrink` times smaller (64), times and network `--slow` times slower (3); both
leave ratios as they are. `--rate` is the emulated network's, 10 Gb/s. `linear` is eight fully
connected layers that really compute, as they are, on 200 Mb/s.

In one run: rank 0 measures each layer, all ranks measure the network, the partitioner
plans from both; then all arms take turns, in blocks, with the same samples:

- data parallel: one flat all-reduce after the backward pass, as our library does;
- data parallel, DDP: PyTorch's, whose all-reduce overlaps the backward pass;
- gpipe, 1f1b: the plan, one update per step of 12 micro-batches, same numerics (checked);
- pipedream: the plan, an update per minibatch, numerics of its own.

The planner's unit is one GPU's share of a step; `planned` is its time for a whole step, by
the published costs (compute and reduction add up, activations overlap). `replayed` adds
the schedule's fill and drain and its waiting for transfers (schedule_replay.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.pipeline import slow_network
from slurm_elastic.models.pipedream import profile_reader

_BASE = "data parallel"
#: Bits/s of a port, by default: of emulated devices; of this machine's.
_RATE, _REAL_RATE = 10e9, 200e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipeline")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=(2, 3, 4, 6))
    parser.add_argument("--model", default="lm", help="lm, linear, or a layer profile's file")
    parser.add_argument("--rate", type=float, metavar="BITS", help="per second")
    parser.add_argument("--shrink", type=float, default=64.0, help="of sizes and rate")
    parser.add_argument("--slow", type=float, default=3.0, help="of times and rate")
    parser.add_argument("--rounds", type=int, default=5, help="each a block of every arm")
    parser.add_argument("--steps", type=int, default=3, help="of a block")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for name in ("rate", "shrink", "slow", "rounds", "steps"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            parser.error(f"--{name}: give more than 0")
    if importlib.util.find_spec("torch") is None:
        sys.exit("benchmarks.pipeline: needs PyTorch: pip install torch")
    try:
        if args.model not in ("lm", "linear"):
            profile_reader.read(Path(args.model))
        slow_network.enter("benchmarks.pipeline", sys.argv[1:])
        results = []
        for ranks in args.ranks:
            results.append(measure(args, ranks))
            if not args.json:
                _show(results[-1])
    except (slow_network.NoNetworkError, profile_reader.LayerProfileError) as error:
        sys.exit(f"benchmarks.pipeline: {error}")
    if args.json:
        print(json.dumps(results))


def measure(args: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Run once with so many ranks; return the figures of rank 0 and the spread of the ratios."""
    real = args.model == "linear"
    shrink, slow = (1.0, 1.0) if real else (args.shrink, args.slow)
    bits = (args.rate or (_REAL_RATE if real else _RATE)) / shrink / slow
    options = {
        "--ranks": ranks,
        "--bits": bits,
        "--model": args.model,
        "--shrink": shrink,
        "--slow": slow,
        "--rounds": args.rounds,
        "--steps": args.steps,
    }
    command = [sys.executable, "-m", "benchmarks.pipeline.ranks"]
    command += [str(word) for pair in options.items() for word in pair]
    with slow_network.Switch(bits) as switch:
        processes = [switch.start([*command, "--rank", str(rank)]) for rank in range(ranks)]
        said, _ = processes[0].communicate()
        if processes[0].returncode:
            sys.exit(f"benchmarks.pipeline: rank 0 of {ranks} failed, see above")
    figures: dict[str, Any] = json.loads(said.splitlines()[-1])
    base = figures["step_s"][_BASE]
    return figures | {
        "ranks": ranks,
        "bits_per_s": bits,
        "faster": {
            name: [b / s for b, s in zip(base, row, strict=True)]
            for name, row in figures["step_s"].items()
        },
    }


def _show(row: dict[str, Any]) -> None:
    plan, wire = row["plan"], row["wire"]
    shape = "-".join(str(stage["replicas"]) for stage in plan)
    print(
        f"\n{row['ranks']} ranks, ports of {row['bits_per_s'] / 1e6:.0f} Mb/s each way; measured, "
        f"both ways: {wire['both_ways'] * 8e-6:.0f} Mb/s in an all-reduce, "
        f"{wire['exchange'] * 8e-6:.0f} in an exchange\n"
        f"{row['parameter_bytes'] / 1e6:.2f} MB of parameters, {row['single_s'] * 1e3:.0f} ms of "
        f"compute per minibatch; planned {shape}:"
    )
    for stage in plan:
        print(
            f"    {stage['replicas']} x {stage['layers']} layers, {_ms(stage['compute_s'])} ms, "
            f"{stage['parameter_bytes'] / 1e6:.2f} MB, sends {stage['output_bytes'] / 1e3:.0f} kB"
        )
    print(f"{'ms per step':20}{'planned':>9}{'replayed':>10}{'measured':>10}{'range':>14}"
          f"{'planned/measured':>18}{'throughput':>12}{'range':>14}")  # fmt: skip
    for name, seconds in row["step_s"].items():
        middle = statistics.median(seconds)
        planned, replayed = row["planned_s"].get(name), row["replayed_s"].get(name)
        faster = row["faster"][name]
        print(
            f"{name:20}{_ms(planned):>9}{_ms(replayed):>10}{_ms(middle):>10}"
            f"{_ms(min(seconds)) + '-' + _ms(max(seconds)):>14}"
            f"{f'{planned / middle:.2f}' if planned else '':>18}"
            f"{f'{statistics.median(faster):.2f}x':>12}"
            f"{f'{min(faster):.2f}-{max(faster):.2f}':>14}"
        )
    planned, faster = row["planned_s"], statistics.median(row["faster"]["pipedream"])
    ratio = planned[_BASE] / planned["pipedream"]
    print(
        f"pipedream over data parallel: planned {ratio:.2f}, measured {faster:.2f}: "
        f"{abs(faster / ratio - 1):.0%} off; losses of all but pipedream are equal to "
        f"{row['difference']:.0e} (relative)",
        flush=True,
    )


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.0f}"


if __name__ == "__main__":
    main()
