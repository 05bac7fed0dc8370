"""Commands in the containers of a cluster, and programs that are copied there."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import ROOT

#: The Python in the containers that has slurm-elastic.
PYTHON = "/opt/slurm-elastic/bin/python"
_SHARED = "benchmarks/support/manual_controller.py"


def cluster_command(cluster: str) -> list[str]:
    """Return the beginning of a call of contrib/cluster/cluster."""
    return [str(ROOT / "contrib/cluster/cluster"), "--name", cluster]


def on_cluster(cluster: str, *words: str, user: str = "root", stdin: str = "") -> str:
    """Run a command in the cluster's head container; return its output.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(
        [*cluster_command(cluster), "exec", "--user", user, "--", *words],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"benchmarks: {' '.join(words)[:80]}: {done.stderr.strip()[-400:]}")
    return done.stdout


def place_driver(cluster: str, program: Path, folder: str) -> str:
    """Copy a program, and the controller that it may import, into the head container.

    Returns:
        Its path there.
    """
    on_cluster(cluster, "mkdir", "-p", f"{folder}/{Path(_SHARED).parent}")
    on_cluster(cluster, "tee", f"{folder}/{_SHARED}", stdin=(ROOT / _SHARED).read_text())
    path = f"{folder}/{program.name}"
    on_cluster(cluster, "tee", path, stdin=program.read_text())
    return path


@contextlib.contextmanager
def held_jobs(cluster: str, count: int) -> Iterator[None]:
    """Have so many held jobs of alice in the queue; they are cancelled at the end."""
    submit = f"for _ in $(seq {count}); do sbatch -H -Q --wrap true -o /dev/null; done"
    on_cluster(cluster, "bash", "-c", f"cd /tmp; {submit}", user="alice")
    yield
    on_cluster(cluster, "scancel", "-u", "alice", "--state=PENDING")
