"""Every write to Slurm: one place, with a timeout and one line per failure.

A call that returns has been accepted by slurmctld. An accepted update is not
atomic and some fields are ignored silently, so callers read back what they
wrote; this module does not guess.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

import structlog

from slurm_elastic.cluster import Job

#: Reservations of ours: they do not wait for running jobs, end without killing anybody (FLEX),
#: and leave pending jobs that still name them free to start (NO_HOLD_JOBS_AFTER).
RESERVATION_FLAGS = "IGNORE_JOBS,FLEX,NO_HOLD_JOBS_AFTER"

_UNREACHABLE = ("Unable to contact slurm controller", "Socket timed out", "Connection refused")


class ScontrolError(Exception):
    """slurmctld refused a write; the text is its own."""


class SlurmUnreachable(ScontrolError):  # noqa: N818 - reads as what it is
    """slurmctld did not answer; the write may or may not have happened."""


class Scontrol:
    """Writes to Slurm on behalf of the controller's account.

    Array tasks go by the name that people type: the raw id of an array's last task is the
    array's own, and would mean all of them.

    Args:
        timeout_s: seconds before a call counts as unanswered.
    """

    def __init__(self, *, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        self._log = structlog.get_logger("scontrol")

    def update(self, job: Job, fields: Mapping[str, str]) -> None:
        """Change a job in one call; an empty value clears a field."""
        self._run("update", f"jobid={job.display_id}", *(f"{k}={v}" for k, v in fields.items()))

    def requeue(self, job: Job) -> None:
        """Send a running batch job back to the queue, there to wait for about two minutes.

        `Incomplete` keeps Slurm from resurrecting a job that has just ended. The wait
        (cred_expire, 121 s by default) is what makes a dead controller harmless: the job is
        never held, and starts by itself.
        """
        self._run("requeue", "Incomplete", job.display_id)

    def release(self, job: Job) -> None:
        """Lift a hold of ours, and give the job back the priority that Slurm computes."""
        self._run("release", job.display_id)

    def create_reservation(
        self, name: str, *, nodes: str, users: str, minutes: int, comment: str
    ) -> None:
        """Keep whole nodes for `users` from now on, whoever runs there already."""
        self._run(
            "create",
            "reservation",
            f"ReservationName={name}",
            f"Nodes={nodes}",
            f"Users={users}",
            "StartTime=now",
            f"Duration={minutes}",
            f"Flags={RESERVATION_FLAGS}",
            f"Comment={comment}",
        )

    def update_reservation(self, name: str, fields: Mapping[str, str]) -> None:
        """Change a live reservation."""
        self._run("update", f"ReservationName={name}", *(f"{k}={v}" for k, v in fields.items()))

    def delete_reservation(self, name: str) -> None:
        """Remove a reservation; refused while a job names it."""
        self._run("delete", f"ReservationName={name}")

    def _run(self, *words: str) -> None:
        try:
            done = subprocess.run(
                ["scontrol", *words],
                capture_output=True,
                timeout=self._timeout_s,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            raise SlurmUnreachable(
                f"scontrol {words[0]}: no answer in {self._timeout_s:g} s"
            ) from None
        except FileNotFoundError:
            raise SlurmUnreachable("scontrol is not on PATH: install slurm-client") from None
        text = " ".join((done.stderr + done.stdout).decode(errors="replace").split())
        self._log.debug("scontrol", words=" ".join(words), rc=done.returncode, text=text)
        if done.returncode == 0:
            return
        kind = SlurmUnreachable if any(u in text for u in _UNREACHABLE) else ScontrolError
        raise kind(f"scontrol {' '.join(words[:2])}: {text or f'exit code {done.returncode}'}")
