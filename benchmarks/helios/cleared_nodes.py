"""Benefit of nodes that jobs leave so that these can sleep: `[sleep] clear_s`.

    python -m benchmarks.helios.cleared_nodes [--seed 3] [--clear-s 14400]

A generated week on 24 nodes of eight GPUs: twelve jobs an hour by day, two by night, of one to
eight GPUs, half of them longer than 90 minutes, which may grow to twice their size. `selastic
compare --sleep` with policy `fair`, without and with `clear_s`; jobs scale as two of Amdahl's
curves say. Printed: average completion, restarts, and how long idle nodes could have slept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

CLUSTER, GROW = "a100:24x8", "2"
SCALINGS = ("amdahl:0.9", "amdahl:0.99")
CONFIG = '[sleep]\nmode = "act"\nboot_s = 600\nwindow_s = 7200\nclear_s = {}\n'
DAYS, BY_DAY, BY_NIGHT = 6, 12.0, 2.0  # jobs an hour, 8:00 to 20:00 and else
MEDIAN_S, SPREAD, SHORTEST_S, LONGEST_S = 5400.0, 1.3, 300, 16 * 3600


def week(seed: int) -> Iterator[str]:
    """Yield the lines of `sacct -P` for a week."""
    draw = random.Random(seed)
    yield "JobID|JobName|User|Submit|Start|End|ElapsedRaw|State|AllocTRES|NNodes"
    at, number = 0.0, 0
    while at < DAYS * 86400:
        rate = BY_DAY if 8 <= at / 3600 % 24 < 20 else BY_NIGHT
        at += draw.expovariate(rate / 3600)
        gpus = draw.choices((1, 2, 4, 8), (50, 25, 15, 10))[0]
        drawn_s = draw.lognormvariate(math.log(MEDIAN_S), SPREAD)
        seconds = int(min(LONGEST_S, max(SHORTEST_S, drawn_s)))
        start = datetime(2026, 10, 5) + timedelta(seconds=int(at))  # noqa: DTZ001 - as sacct
        end = start + timedelta(seconds=seconds)
        number += 1
        name, user = f"{draw.choice('abcd')}{gpus}", f"u{draw.randint(1, 6)}"
        times = f"{start.isoformat()}|{start.isoformat()}|{end.isoformat()}|{seconds}"
        tres = f"billing={8 * gpus},cpu={8 * gpus},gres/gpu:a100={gpus},gres/gpu={gpus},node=1"
        yield f"{1000 + number}|{name}|{user}|{times}|COMPLETED|{tres}|1"


def compared(trace: Path, config: Path, scaling: str) -> dict[str, Any]:
    """Return the answer of `selastic compare` for one of the curves."""
    command: list[str | Path] = [
        *(Path(sys.executable).with_name("selastic"), "compare", "--sacct", trace, "--sleep"),
        *("--cluster", CLUSTER, "--grow", GROW, "--policies", "fair", "--scaling", scaling),
        *("--config", config, "--json"),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.helios.cleared_nodes")
    parser.add_argument("--seed", type=int, default=3, help="of the week (%(default)s)")
    parser.add_argument("--clear-s", type=float, default=14400.0, help="%(default)g")
    args = parser.parse_args()
    table = Table(box=None)
    for name in ("scaling", "clear_s", "average h", "restarts per job", "node hours asleep"):
        table.add_column(name)
    with tempfile.TemporaryDirectory() as folder:
        trace, config = Path(folder, "week.txt"), Path(folder, "elastic.toml")
        trace.write_text("\n".join(week(args.seed)) + "\n")
        for scaling, clear_s in itertools.product(SCALINGS, (0.0, args.clear_s)):
            config.write_text(CONFIG.format(clear_s))
            answer = compared(trace, config, scaling)
            row = answer["policies"]["fair"][scaling]
            table.add_row(
                scaling,
                f"{clear_s:g}",
                f"{row['avg_jct_h']:.3f}",
                f"{row['restarts_per_job']:.2f}",
                f"{answer['sleep']['fair']['asleep_node_h']:.1f}",
            )
    Console(width=None if sys.stdout.isatty() else 100).print(table)


if __name__ == "__main__":
    main()
