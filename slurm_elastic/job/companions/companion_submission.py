"""Submission of companions by sbatch, and their cancellation.

A companion is submitted held, with a clean environment and every option on the command line:
variables of the base, of the user's profile and of SPANK plugins would change its shape. The
controller places and releases it.
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.core.member_orders import CompanionComment
from slurm_elastic.core.reason import Reason
from slurm_elastic.job.companions.companion_channel import (
    HOSTS_VARIABLE,
    PORT_VARIABLE,
    SECRET_VARIABLE,
)
from slurm_elastic.job.companions.reason_log import log_text, printable

#: Variables that sbatch, and after it the companion's script, gets from the environment.
_KEPT = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR"),
    *("LD_LIBRARY_PATH", "SLURM_CONF", "MUNGE_SOCKET"),
)
#: Reservations of the controller: it gives a companion one itself if it has to.
_CONTROLLER_RESERVATION = "selastic_"

_TIMEOUT_S = 20.0


class CompanionRefusedError(SlurmElasticError):
    """A companion that cannot be submitted; the message is one line.

    Args:
        reason: of `launcher_codes`.
    """

    def __init__(self, reason: Reason) -> None:
        super().__init__(log_text(reason))
        self.reason = reason


class CompanionShape(NamedTuple):
    """CPUs and memory for each GPU of a companion, as the base has them.

    Attributes:
        cpus: of each GPU.
        memory: option of sbatch, with {gpus} in place of their number; "": the site's default.
    """

    cpus: int
    memory: str

    @classmethod
    def of_base(
        cls, env: Mapping[str, str], cpus: Sequence[int], gpus: Sequence[int]
    ) -> CompanionShape:
        """Return the shape for companions of a job.

        Args:
            env: of its batch script.
            cpus: number of each node.
            gpus: number of each node.
        """
        used = [(c, g) for c, g in zip(cpus, gpus, strict=True) if g]
        return cls(
            cpus=max(1, min((c // g for c, g in used), default=1)),
            memory=_memory(env, max((g for _, g in used), default=1)),
        )

    def options(self, gpus: int) -> list[str]:
        """Return the options of sbatch for a companion with this number of GPUs."""
        words = [f"--ntasks={gpus}", f"--ntasks-per-node={gpus}", f"--cpus-per-task={self.cpus}"]
        if self.memory.startswith("--mem="):
            per_gpu = int(self.memory.removeprefix("--mem="))
            return [*words, f"--mem={per_gpu * gpus}M"]
        return [*words, self.memory] if self.memory else words


def _memory(env: Mapping[str, str], gpus: int) -> str:
    """Return the option for the memory of one GPU."""
    for name, option in (("CPU", "--mem-per-cpu"), ("GPU", "--mem-per-gpu")):
        value = env.get(f"SLURM_MEM_PER_{name}", "")
        if value.isdecimal() and int(value):
            return f"{option}={value}M"
    value = env.get("SLURM_MEM_PER_NODE", "")
    return f"--mem={max(1, int(value) // gpus)}" if value.isdecimal() and int(value) else ""


class CompanionSubmission:
    """Submission of the companions of one job.

    Args:
        env: of the base's batch script.
        job_id, run: of the base.
        shape: of each GPU.
        port: port on which esrun listens for their scripts.
        secret: shared by both.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        job_id: int,
        run: int,
        shape: CompanionShape,
        port: int,
        secret: str,
    ) -> None:
        self._env, self._job_id, self._run, self._shape = env, job_id, run, shape
        self._kept = {name: env[name] for name in _KEPT if name in env}
        self._clean = self._kept | {
            HOSTS_VARIABLE: ",".join(own_hosts(env)),
            PORT_VARIABLE: str(port),
            SECRET_VARIABLE: secret,
        }

    def submit(self, change: int, gpus: int, gpu_type: str) -> int:
        """Submit one companion, held; return its job id.

        Raises:
            CompanionRefusedError: it is refused, or there was no answer in time.
        """
        try:
            done = subprocess.run(
                self.command(change, gpus, gpu_type),
                input=batch_script(),
                env=self._clean,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise CompanionRefusedError(Reason("sbatch-unanswered", waited_s=_TIMEOUT_S)) from None
        except OSError as error:
            raise CompanionRefusedError(
                Reason("sbatch-failed", error=printable(error.strerror))
            ) from None
        text = done.stdout.strip().partition(";")[0]
        if done.returncode or not text.isdecimal():
            raise CompanionRefusedError(Reason("sbatch-failed", error=refusal(done.stderr)))
        return int(text)

    def cancel(self, job_id: int, change: int, *, kill_ranks: bool = False) -> None:
        """Cancel a companion; one that has ended is no error.

        A slurmctld that is killed forgets jobs of the last seconds and gives their ids to others.
        So the comment, which no other job has, is read first. The name bars other jobs that get the
        id while scancel waits for slurmctld.

        Args:
            job_id: of the companion.
            change: number of the change that has ordered it.
            kill_ranks: send its ranks SIGKILL before; else they get KillWait.
        """
        name = self._name_of(job_id, change)
        if name is None:
            return
        scancel = ("scancel", "--quiet", f"--name={name}")
        if kill_ranks:
            self._slurm(*scancel, "--signal=KILL", f"{job_id}.0")
        self._slurm(*scancel, str(job_id))

    def _name_of(self, job_id: int, change: int) -> str | None:
        """Return the name that a companion has in Slurm; None: it has ended, or is another job."""
        shown = self._slurm("squeue", "--noheader", f"--jobs={job_id}", "--format=%A %k %j")
        own = f"{job_id} {self._comment(change)} "
        lines = (line for line in shown.split("\n") if line.startswith(own))
        return next((line.removeprefix(own) for line in lines), None)

    def _slurm(self, *command: str) -> str:
        """Run a command of Slurm; return its output, "" if it fails."""
        try:
            done = subprocess.run(
                command,
                env=self._kept,
                capture_output=True,
                text=True,
                errors="surrogateescape",
                check=False,
                timeout=_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return "" if done.returncode else done.stdout

    def _comment(self, change: int) -> str:
        """Return the comment of the companions of a change."""
        return str(CompanionComment(base=self._job_id, run=self._run, change=change))

    def command(self, change: int, gpus: int, gpu_type: str) -> list[str]:
        """Return the command line of sbatch."""
        env = self._env
        words = [
            *("sbatch", "--hold", "--parsable", "--no-requeue", "--nodes=1", "--output=/dev/null"),
            f"--job-name={env.get('SLURM_JOB_NAME', 'job')}+1",
            f"--comment={self._comment(change)}",
            f"--gres=gpu{':' if gpu_type else ''}{gpu_type}:{gpus}",
            *self._shape.options(gpus),
        ]
        for option, name in (("partition", "PARTITION"), ("account", "ACCOUNT"), ("qos", "QOS")):
            if value := env.get(f"SLURM_JOB_{name}"):
                words.append(f"--{option}={value}")
        reservation = env.get("SLURM_JOB_RESERVATION", "")
        if reservation and not reservation.startswith(_CONTROLLER_RESERVATION):
            words.append(f"--reservation={reservation}")
        if minutes := minutes_left(env):
            words.append(f"--time={minutes}")
        return words


def minutes_left(env: Mapping[str, str]) -> int | None:
    """Return the minutes that a job may still run, at least 1; None if it is not known."""
    end = env.get("SLURM_JOB_END_TIME", "")
    if not end.isdecimal():
        return None
    return max(1, -int(-(int(end) - time.time()) // 60))


def own_hosts(env: Mapping[str, str]) -> list[str]:
    """Return the names by which other nodes may reach this host, the likeliest first."""
    names = (env.get("SLURMD_NODENAME", ""), socket.gethostname())
    return list(dict.fromkeys(name for name in names if name))


def batch_script() -> str:
    """Return the script of a companion: it runs `companion_script` by this Python."""
    root = str(Path(__file__).resolve().parents[3])
    module = "slurm_elastic.job.companions.companion_script"
    program = (
        f"import sys; sys.path.insert(0, {root!r}); from {module} import main; sys.exit(main())"
    )
    return f"#!/bin/sh\nexec {shlex.join([sys.executable, '-I', '-c', program])}\n"


def refusal(errors: str) -> str:
    r"""Return why sbatch refuses, in one line.

    >>> refusal("sbatch: error: Batch job submission failed: Access/permission denied\n")
    'Access/permission denied'
    """
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in errors.splitlines()]
    lines = [line.strip() for line in lines if line.strip()]
    text = ": ".join(lines) or "it failed without a message"
    text = text.replace("Batch job submission failed: ", "")
    return printable(text)
