#!/usr/bin/env python3
"""Checks what train_library.py wrote: nothing lost, nothing twice, the same losses.

    python docs/examples/check_run.py OUT --samples 4096 --epochs 3 [--like REFERENCE_OUT]

Ends with code 0 and a line of figures, or with code 1 and what is wrong.
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
    """What is wrong with which samples were trained on when."""
    seen: dict[int, Counter] = defaultdict(Counter)
    computed: Counter = Counter()
    for path in sorted(out.glob("samples-rank*.jsonl")):
        for line in lines(path):
            seen[line["epoch"]].update(line["indices"])
            computed[line["step"], path.name] += 1
    found = [
        f"step {step} was computed {n} times by {name}"
        for (step, name), n in computed.items()
        if n > 1
    ]
    for epoch in range(epochs):
        missing = samples - len(seen[epoch])
        twice = sum(1 for n in seen[epoch].values() if n > 1)
        if missing or twice:
            found.append(f"epoch {epoch}: {missing} samples never seen, {twice} more than once")
    steps = sorted({step for step, _ in computed})
    if steps != list(range(1, len(steps) + 1)):
        found.append("steps are missing")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Check a run of train_library.py.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--like", type=Path, help="OUT of an uninterrupted run")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    args = parser.parse_args()
    found = faults(args.out, args.samples, args.epochs)
    mine = losses(args.out)
    worlds = [line["world"] for line in lines(args.out / "losses.jsonl")]
    text = f"{len(mine)} steps, ranks {worlds[0]}"
    text += "".join(f" -> {b}" for a, b in pairwise(worlds) if a != b)
    if args.like:
        reference = losses(args.like)
        if mine.keys() != reference.keys():
            found.append(f"{len(mine)} steps, the reference has {len(reference)}")
        worst = max(abs(mine[s] - reference[s]) for s in mine.keys() & reference.keys())
        text += f", largest difference of the loss {worst:.2e}"
        if worst > args.tolerance:
            found.append(f"losses differ by {worst:.2e}, more than {args.tolerance:g}")
    print("\n".join(found) or f"every sample once per epoch, no step twice: {text}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
