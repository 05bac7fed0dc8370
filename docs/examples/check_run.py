#!/usr/bin/env python3
"""Check the output of train_library.py: no sample lost or repeated, and equal losses.

    python docs/examples/check_run.py OUT --samples 4096 --epochs 3 [--like REFERENCE_OUT]

Exits with 0 and a line of figures, or with 1 and the errors.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(out: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in lines(out / "losses.jsonl")}


def faults(out: Path, samples: int, epochs: int) -> list[str]:
    """Return the errors in the samples of steps and epochs."""
    seen: dict[int, Counter] = defaultdict(Counter)
    computed: Counter = Counter()
    for path in sorted(out.glob("samples-rank*.jsonl")):
        for line in lines(path):
            seen[line["epoch"]].update(line["indices"])
            computed[line["step"], path.name] += 1
    errors = [
        f"step {step} was computed {n} times by {name}"
        for (step, name), n in computed.items()
        if n > 1
    ]
    for epoch in range(epochs):
        missing = samples - len(seen[epoch])
        twice = sum(1 for n in seen[epoch].values() if n > 1)
        if missing or twice:
            errors.append(f"epoch {epoch}: {missing} samples never seen, {twice} more than once")
    steps = sorted({step for step, _ in computed})
    if steps != list(range(1, len(steps) + 1)):
        errors.append("steps are missing")
    return errors


def main() -> int:
    parser = argparse.ArgumentParser(description="Check a run of train_library.py.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--like", type=Path, help="OUT of an uninterrupted run")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    args = parser.parse_args()
    errors = faults(args.out, args.samples, args.epochs)
    own_losses = losses(args.out)
    rank_counts = [line["world"] for line in lines(args.out / "losses.jsonl")]
    text = f"{len(own_losses)} steps, ranks {rank_counts[0]}"
    text += "".join(f" -> {b}" for a, b in pairwise(rank_counts) if a != b)
    if args.like:
        reference = losses(args.like)
        if own_losses.keys() != reference.keys():
            errors.append(f"{len(own_losses)} steps, the reference has {len(reference)}")
        both = own_losses.keys() & reference.keys()
        worst = max(abs(own_losses[s] - reference[s]) for s in both)
        text += f", largest difference of the loss {worst:.2e}"
        if worst > args.tolerance:
            errors.append(f"losses differ by {worst:.2e}, more than {args.tolerance:g}")
    print("\n".join(errors) or f"every sample once per epoch, no step twice: {text}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
