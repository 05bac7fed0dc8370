"""`python -m tests.fuzz --surface inbox --minutes 5 --seed 1`: hostile input, counted.

Each surface is a module beside this one with `run(seconds, seed) -> Tally`. A run adds one line
of JSON to the results, so that later runs add up; `--total` prints the sums. With `--replay
SEED.N` one input of a surface that has `one(rng)` is tried again, with its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import random
import sys
import time
from collections import Counter
from pathlib import Path

from tests.fuzz import guided

RESULTS = Path(__file__).resolve().parent / "results.jsonl"


def surfaces() -> list[str]:
    """Return the names of the modules that have `run`."""
    here = Path(__file__).parent
    names = (m.name for m in pkgutil.iter_modules([str(here)]))
    return [n for n in names if "\ndef run(seconds" in (here / f"{n}.py").read_text("utf-8")]


def total(path: Path) -> str:
    """Return a table of all runs: surface, runs, inputs, crashes."""
    runs: Counter[str] = Counter()
    inputs: Counter[str] = Counter()
    crashes: Counter[str] = Counter()
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        name = row["surface"]
        runs[name] += 1
        inputs[name] += row["inputs"]
        crashes[name] += len(row["crashes"])
    lines = [f"{'surface':<12}{'runs':>6}{'inputs':>14}{'crashes':>9}"]
    lines += [f"{n:<12}{runs[n]:>6}{inputs[n]:>14,}{crashes[n]:>9}" for n in sorted(runs)]
    return "\n".join(lines)


def main() -> int:
    """Run; return 1 if any input crashed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--surface", action="append", choices=surfaces(), help="default: all")
    parser.add_argument("--minutes", type=float, default=1.0, help="for each surface")
    parser.add_argument("--seed", type=int, default=None, help="default: drawn and shown")
    parser.add_argument("--results", type=Path, default=RESULTS, help="gets a line a run")
    parser.add_argument("--guided", action="store_true", help="by coverage (needs atheris)")
    parser.add_argument("--replay", metavar="SEED.N", help="try one input again")
    parser.add_argument("--list", action="store_true", help="the surfaces")
    parser.add_argument("--total", action="store_true", help="sum up the results")
    args = parser.parse_args()
    if args.total:
        print(total(args.results))
        return 0
    if args.list:
        for name in surfaces():
            doc = importlib.import_module(f"tests.fuzz.{name}").__doc__ or ""
            print(f"{name:<12}{doc.strip().splitlines()[0]}")
        return 0
    crashed = False
    for name in args.surface or surfaces():
        module = importlib.import_module(f"tests.fuzz.{name}")
        if args.replay:
            print(module.one(random.Random(args.replay)))
            continue
        seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
        begun = time.monotonic()
        if args.guided:
            tally = guided.run_guided(name, args.minutes * 60)
        else:
            tally = module.run(args.minutes * 60, seed)
        row = {
            "surface": name,
            "seed": seed,
            "engine": "atheris" if args.guided else "random",
            "at": int(time.time()),
            "seconds": round(time.monotonic() - begun),
            "inputs": tally.inputs,
            "crashes": tally.crashes,
            "notes": dict(sorted(tally.notes.items())),
        }
        with args.results.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        print(f"{name}: seed {seed}, {tally.inputs:,} inputs, {len(tally.crashes)} crashes")
        for text in tally.crashes:
            print(f"  {text.encode('ascii', 'backslashreplace').decode()}")
        crashed = crashed or bool(tally.crashes)
    return int(crashed)


if __name__ == "__main__":
    sys.exit(main())
