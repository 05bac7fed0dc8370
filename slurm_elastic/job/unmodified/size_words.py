"""Words of a batch script that depend on the size of its job.

A program that is started again in the same run of its job gets the arguments of before. If the
batch script has computed them from the number of GPUs (`--accumulation $((64 / SLURM_NTASKS))`),
they are wrong then. So a program whose batch script mentions that number is started again only if
its command was the same on two sizes.
"""

from __future__ import annotations

import re
import subprocess

_TIMEOUT_S = 20.0
_WORDS = re.compile(
    r"SLURM_(?!ARRAY)\w*(?:NODE|TASK|GPU|PROC|CPU|TRES)\w*|(?:CUDA|ROCR|HIP)_VISIBLE_DEVICES"
    r"|nvidia-smi|rocm-smi|device_count"
)


def size_word(script: str) -> str:
    """Return the first word of a batch script that depends on the job's size; "" without one.

    >>> size_word("N=$((64 / SLURM_JOB_NUM_NODES))"), size_word("#SBATCH --nodes=2")
    ('SLURM_JOB_NUM_NODES', '')
    """
    lines = (line for line in script.splitlines() if not line.lstrip().startswith("#"))
    found = _WORDS.search("\n".join(lines))
    return found[0] if found else ""


def read_batch_script(job_id: int) -> str | None:
    """Return the batch script of a job, from slurmctld; None: it could not be read."""
    command = ("scontrol", "write", "batch_script", str(job_id), "-")
    try:
        done = subprocess.run(
            command, capture_output=True, check=False, stdin=subprocess.DEVNULL, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
