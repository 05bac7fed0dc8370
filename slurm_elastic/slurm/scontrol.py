"""Every write to Slurm: one place, with a timeout and one line per failure.

A call that returns has been accepted by slurmctld. An accepted update is not
atomic and some fields are ignored silently, so callers read back what they
wrote; this module does not guess.
"""

from __future__ import annotations

import math
import signal
import subprocess
from collections.abc import Callable, Mapping

import structlog

from slurm_elastic.core.cluster import Job
from slurm_elastic.core.errors import SlurmElasticError

#: Reservations of ours: they do not wait for running jobs, end without killing anybody (FLEX),
#: and leave pending jobs that still name them free to start (NO_HOLD_JOBS_AFTER).
RESERVATION_FLAGS = "IGNORE_JOBS,FLEX,NO_HOLD_JOBS_AFTER"

#: Exit code of timeout(1) when it had to kill.
_KILLED = 137
_UNREACHABLE = ("Unable to contact slurm controller", "Socket timed out", "Connection refused")


class ScontrolError(SlurmElasticError):
    """slurmctld refused a write; the text is its own."""


class SlurmUnreachableError(ScontrolError):
    """slurmctld did not answer; the write may or may not have happened."""


class NotActiveError(SlurmElasticError):
    """This controller is not, or no longer, the active one: nothing was written.

    No `ScontrolError`: nobody shall take it for an answer of slurmctld and go on.
    """


def always() -> float:
    """The right to write of a controller that is alone: seconds that it lasts."""
    return math.inf


class Scontrol:
    """Writes to Slurm on behalf of the controller's account.

    Array tasks go by the name that people type: the raw id of an array's last task is the
    array's own, and would mean all of them.

    Args:
        timeout_s: seconds before a call counts as unanswered.
        right: asked right before every call; seconds for which this process may still write,
            or NotActiveError. A call is killed when they are over, even if this process is stopped.
    """

    def __init__(self, *, timeout_s: float = 30.0, right: Callable[[], float] = always) -> None:
        self._timeout_s, self._right = timeout_s, right
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

    def hold(self, job: Job) -> None:
        """Keep a pending job from starting until its owner, or an operator, releases it."""
        self._run("uhold", job.display_id)

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
        strange = next((w for w in words if not w.isprintable()), None)
        if strange is not None:  # of a name that a user made; nothing of ours is called so
            raise ScontrolError(f"scontrol {words[0]}: {strange!r:.100} is no word for it")
        limit = min(self._timeout_s, self._right())
        # Not subprocess's own timeout alone: a stopped process cannot kill its child.
        killed = ["timeout", "-s", "KILL", f"{limit:.3f}"] if self._right is not always else []
        try:
            done = subprocess.run(
                [*killed, "scontrol", *words],
                capture_output=True,
                timeout=limit + bool(killed),
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            raise SlurmUnreachableError(f"scontrol {words[0]}: no answer in {limit:g} s") from None
        except FileNotFoundError:
            raise SlurmUnreachableError("scontrol is not on PATH: install slurm-client") from None
        text = " ".join((done.stderr + done.stdout).decode(errors="replace").split())
        self._log.debug("scontrol", words=" ".join(words), rc=done.returncode, text=text)
        if done.returncode == 0:
            return
        if killed and done.returncode in (_KILLED, -signal.SIGKILL):
            raise SlurmUnreachableError(f"scontrol {words[0]}: no answer in {limit:.3g} s")
        kind = SlurmUnreachableError if any(u in text for u in _UNREACHABLE) else ScontrolError
        raise kind(f"scontrol {' '.join(words[:2])}: {text or f'exit code {done.returncode}'}")


class LeaseWrites(Scontrol):
    """Writes of the lease itself (`controller.lease`): not bound by the right that it gives.

    Args:
        timeout_s: seconds before a call counts as unanswered; it is killed then.
        account: the controller's own.
    """

    def __init__(self, *, timeout_s: float, account: str) -> None:
        super().__init__(timeout_s=timeout_s, right=lambda: math.inf)
        self._account = account

    def create_lease(self, name: str, *, node: str, comment: str) -> None:
        """Make a reservation that keeps nothing from anybody; refused if the name exists.

        It begins in 2098, further ahead than Slurm looks for a job without a time limit (a
        year), for a minute, over what runs and what is reserved. A node has to be named: Slurm
        makes none without, and when it may choose it wants an idle one.
        """
        self._run(
            "create",
            "reservation",
            f"ReservationName={name}",
            f"Nodes={node}",
            f"Users={self._account}",
            "StartTime=2098-01-01T00:00:00",
            "Duration=1",
            "Flags=IGNORE_JOBS,OVERLAP",
            f"Comment={comment}",
        )
