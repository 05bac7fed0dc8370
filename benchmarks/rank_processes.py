"""Ranks of a benchmark on this machine, started by `esrun --local` so that reports are sent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_ranks(ranks: int, module: str, arguments: Sequence[str], *, expected: int = 0) -> None:
    """Run a module in so many processes of one thread each, and wait for them.

    Args:
        ranks: number of processes.
        module: each of them runs.
        arguments: of its command line.
        expected: exit code of the ranks.

    Raises:
        SystemExit: a rank ended with another exit code; with the output of all.
    """
    esrun = [sys.executable, str(ROOT / "wrappers" / "esrun"), "--local", str(ranks)]
    # A job that this runs in is another matter.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RANK"))}
    done = subprocess.run(
        [*esrun, sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != expected:
        raise SystemExit(f"a rank failed ({done.returncode}):\n{done.stdout}{done.stderr}")
