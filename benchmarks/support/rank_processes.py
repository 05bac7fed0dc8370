"""Ranks of a benchmark on this machine, started by `esrun --local` so that reports are sent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks import ROOT

#: Set to 1: several ranks use each GPU.
SHARED_GPUS_VARIABLE = "BENCHMARKS_SHARED_GPUS"
#: Name of the machine for NCCL. It refuses two ranks of one machine on one GPU, and connects ranks
#: of several machines by sockets: ranks that share a GPU have different values.
NCCL_HOST_VARIABLE = "NCCL_HOSTID"


def shared_gpus() -> bool:
    """Return whether several ranks use each GPU."""
    return os.environ.get(SHARED_GPUS_VARIABLE) == "1"


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
    program = [sys.executable, "-m", module, *arguments]
    if shared_gpus():
        program = ["sh", "-c", f'{NCCL_HOST_VARIABLE}=rank-$RANK exec "$@"', "sh", *program]
    # A job that this runs in is another matter.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "RANK"))}
    done = subprocess.run(
        [*esrun, *program],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != expected:
        raise SystemExit(f"a rank failed ({done.returncode}):\n{done.stdout}{done.stderr}")
