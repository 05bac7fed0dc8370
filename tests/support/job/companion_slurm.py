"""A stand-in for sbatch, srun, squeue and scancel in one folder; the test starts submitted jobs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.patience import PATIENCE_S

SBATCH = """#!/bin/sh
[ -e "$HOME/hang" ] && exec sleep 60
if [ -s "$HOME/refusals" ]; then
    head -n1 "$HOME/refusals" >"$HOME/refusal"; sed -i 1d "$HOME/refusals"
    [ "$(cat "$HOME/refusal")" = none ] || { cat "$HOME/refusal" >&2; exit 1; }
fi
id=$(cat "$HOME/next" 2>/dev/null || echo 5001)
echo $((id+1)) >"$HOME/next"
mkdir "$HOME/$id"
printf '%s\\n' "$@" >"$HOME/$id/options"
cat >"$HOME/$id/script"
env >"$HOME/$id/environment"
echo $id
"""

#: Runs each task here, and ends them as the real one.
SRUN = """#!/bin/sh
tasks=1
while [ "$1" != sh ]; do
    case $1 in --ntasks=*) tasks=${1#*=};; --jobid=*) export SLURM_JOB_ID=${1#*=};; esac
    shift
done
export SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=$tasks CUDA_VISIBLE_DEVICES=0,1,2,3
i=0 pids=
while [ $i -lt $tasks ]; do
    SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & pids="$pids $!"
    i=$((i+1))
done
trap 'kill -KILL $pids' TERM
code=0
for pid in $pids; do wait $pid || code=$?; done
exit $code
"""

SQUEUE = """#!/bin/sh
for word; do case $word in --jobs=*) id=${word#*=};; esac; done
options=$HOME/$id/options
[ -e "$options" ] || exit 1
echo "$id" "$(sed -n 's/^--comment=//p' "$options")" "$(sed -n 's/^--job-name=//p' "$options")"
"""

SCANCEL = """#!/bin/sh
echo "$@" >>"$HOME/cancelled"
"""


def eventually(happens: Callable[[], object], text: str = "it") -> None:
    """Wait until something is true, at most half a minute."""
    end = time.monotonic() + PATIENCE_S
    while not happens():
        assert time.monotonic() < end, f"{text} has not happened"
        time.sleep(0.01)


class CompanionSlurm:
    """Commands of Slurm in a folder, and the jobs that were submitted.

    Args:
        folder: an empty one; it is the home directory of all that runs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        commands = folder / "bin"
        commands.mkdir()
        scripts = (("sbatch", SBATCH), ("srun", SRUN), ("squeue", SQUEUE), ("scancel", SCANCEL))
        for name, text in scripts:
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        self.env = {
            "PATH": f"{commands}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(folder),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NAME": "train",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_JOB_CPUS_PER_NODE": "4",
            "SLURM_GPUS_ON_NODE": "2",
            "SLURMD_NODENAME": "localhost",
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_NTASKS": "2",
            "SLURM_GPUS_PER_NODE": "2",
        }

    def submitted(self) -> list[int]:
        """Return the ids of the submitted jobs."""
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal())

    def options(self, job_id: int) -> list[str]:
        """Return the options with which a job was submitted."""
        return (self.folder / str(job_id) / "options").read_text().splitlines()

    def environment(self, job_id: int) -> dict[str, str]:
        """Return the environment with which a job was submitted."""
        lines = (self.folder / str(job_id) / "environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def refuse(self, *answers: str) -> None:
        """Let the next calls of sbatch fail with these errors; "none" lets one succeed."""
        (self.folder / "refusals").write_text("".join(f"{answer}\n" for answer in answers))

    def run(self, job_id: int, *, gpus: int = 1) -> subprocess.Popen[bytes]:
        """Start the batch script of a submitted job."""
        script = self.folder / str(job_id) / "script"
        script.chmod(0o755)
        env = self.environment(job_id) | {
            "SLURM_JOB_ID": str(job_id),
            "SLURMD_NODENAME": "localhost",
            "SLURM_JOB_CPUS_PER_NODE": str(2 * gpus),
            "SLURM_GPUS_ON_NODE": str(gpus),
        }
        process = self.running[job_id] = subprocess.Popen([str(script)], env=env)
        return process

    def ended(self, job_id: int) -> int:
        """Wait until the script of a job has ended; return its exit code."""
        return self.running[job_id].wait(timeout=30)

    def cancelled(self) -> list[str]:
        """Return the calls of scancel."""
        path = self.folder / "cancelled"
        return path.read_text().splitlines() if path.exists() else []

    def close(self) -> None:
        """End what still runs."""
        for process in self.running.values():
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
