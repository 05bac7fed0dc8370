"""Command line of the trials: `python -m tests.releases`, as `make test-releases` calls it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.releases.release_table import lines
from tests.releases.release_trial import SERIES, missing, readers_of, try_release


def main() -> int:
    """Return 0: every step passed; 1: one failed; 2: no release could be tried."""
    args = _arguments()
    if args.table:
        results = [json.loads(line) for line in args.table.read_text("utf-8").splitlines()]
    else:
        results = _run(args)
        if args.results:
            text = "".join(json.dumps(result) + "\n" for result in results)
            args.results.write_text(text, encoding="utf-8")
    print("\n".join(lines(results)))
    if not results:
        return 2
    return 1 if any("failure" in result for result in results) else 0


def _run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Try the releases side by side; the results are in the order of the arguments."""
    wanted = []
    for series in args.releases:
        if reason := missing(series):
            print(f"releases: {series} skipped: {reason}", file=sys.stderr, flush=True)
        else:
            wanted.append(series)

    def one(series: str) -> list[dict[str, Any]]:
        pyslurm = args.pyslurm and series.startswith("25.11")
        readers = readers_of(series, pyslurm=pyslurm)
        name = f"{args.name}-{series.replace('.', '-')}"
        results = try_release(series, name=name, readers=readers, pyslurm=pyslurm)
        print(f"releases: {series} done", file=sys.stderr, flush=True)
        return results

    with ThreadPoolExecutor(args.at_once) as pool:
        return [result for results in pool.map(one, wanted) for result in results]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.releases", description=__doc__)
    parser.add_argument("releases", nargs="*", default=SERIES, metavar="RELEASE")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="clusters at once (2)")
    parser.add_argument(
        "--pyslurm", action="store_true", help="try 25.11 with the package index's pyslurm, too"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="write a line for each trial")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only print these results")
    name = f"{os.environ.get('SELASTIC_CLUSTER', 'selastic')}-slurm"
    parser.add_argument("--name", default=name, help="of the clusters (now %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
