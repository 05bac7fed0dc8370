"""All writes to Slurm, each with a timeout and one line per failure.

A call that returns was accepted by slurmctld. An accepted update is not atomic, and some fields
are ignored without an error, so callers read back what they wrote.
"""

from __future__ import annotations

import math
import signal
import subprocess
from collections.abc import Callable, Mapping

import structlog

from slurm_elastic.core.cluster import Job
from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.slurm.command_environment import command_environment

#: Flags of our reservations: these do not wait for running jobs, end without killing jobs (FLEX),
#: and let pending jobs that still name them start afterwards (NO_HOLD_JOBS_AFTER).
RESERVATION_FLAGS = "IGNORE_JOBS,FLEX,NO_HOLD_JOBS_AFTER"

#: Exit code of timeout(1) when it had to kill.
_KILLED = 137
_UNREACHABLE = ("Unable to contact slurm controller", "Socket timed out", "Connection refused")


class ScontrolError(SlurmElasticError):
    """Refusal of a write by slurmctld, with its text."""


class SlurmUnreachableError(ScontrolError):
    """No answer from slurmctld; the write may or may not have happened."""


class NotActiveError(SlurmElasticError):
    """Failure because this controller is not, or no longer, the active one; nothing was written.

    Not a `ScontrolError`: code that handles slurmctld's refusals must not catch it.
    """


def always() -> float:
    """Return the right to write of a controller without a standby: infinite seconds."""
    return math.inf


class Scontrol:
    """Writes to Slurm as the controller's account.

    Array tasks are named `4711_3`, not by raw id: the raw id of an array's last task is also that
    of the array, and would mean all tasks.

    Args:
        timeout_s: seconds before a call counts as unanswered.
        right: called before every write; returns the seconds for which this process may still
            write, or raises NotActiveError. The write is killed when they are over, even if this
            process is stopped.
    """

    def __init__(self, *, timeout_s: float = 30.0, right: Callable[[], float] = always) -> None:
        self._timeout_s, self._right = timeout_s, right
        self._log = structlog.get_logger("scontrol")

    def update(self, job: Job, fields: Mapping[str, str]) -> None:
        """Change a job in one call; an empty value clears a field."""
        self._run("update", f"jobid={job.display_id}", *(f"{k}={v}" for k, v in fields.items()))

    def requeue(self, job: Job) -> None:
        """Send a running batch job back to the queue, where it waits for about two minutes.

        `Incomplete` keeps Slurm from restarting a job that has just ended. The job is never held:
        after the wait (cred_expire, 121 s by default) it starts, even if the controller is dead.
        """
        self._run("requeue", "Incomplete", job.display_id)

    def requeue_ended(self, job: Job) -> None:
        """Send a batch job that has just failed back to the queue, as `requeue`."""
        self._run("requeue", job.display_id)

    def release(self, job: Job) -> None:
        """Lift a hold of ours, and restore the priority that Slurm computes."""
        self._run("release", job.display_id)

    def hold(self, job: Job) -> None:
        """Keep a pending job from starting until its owner, or an operator, releases it."""
        self._run("uhold", job.display_id)

    def cancel(self, job: Job) -> None:
        """End a companion, whether it is pending or running.

        A slurmctld that is killed forgets jobs of the last seconds and gives their ids to others.
        User and name keep scancel, which waits for slurmctld, from ending another job. One that has
        ended is no error.
        """
        filters = [f"--user={job.uid}", *([f"--name={job.name}"] if job.name.isprintable() else ())]
        self._run("--quiet", *filters, job.display_id, program="scancel")

    def create_reservation(
        self, name: str, *, nodes: str, users: str, minutes: int, comment: str
    ) -> None:
        """Reserve whole nodes for `users` from now on; jobs that run there go on."""
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

    def power_down(self, nodes: str) -> None:
        """Switch idle nodes off by the site's SuspendProgram.

        A job that begins there in these seconds runs; Slurm switches the node off after it. With
        POWER_DOWN_ASAP the node would be drained, and stays so if slurmctld dies then.
        """
        self._run("update", f"NodeName={nodes}", "State=POWER_DOWN")

    def power_up(self, nodes: str) -> None:
        """Switch nodes on by the site's ResumeProgram; of those without power only."""
        self._run("update", f"NodeName={nodes}", "State=POWER_UP")

    def _run(self, *arguments: str, program: str = "scontrol") -> None:
        unprintable = next((w for w in arguments if not w.isprintable()), None)
        if unprintable is not None:  # a user's name with control characters
            problem = f"{unprintable!r:.100} is invalid: expected printable characters"
            raise ScontrolError(f"{program} {arguments[0]}: {problem}")
        limit = min(self._timeout_s, self._right())
        # timeout(1) as well as subprocess's timeout: a stopped process cannot kill its child.
        killed = ["timeout", "-s", "KILL", f"{limit:.3f}"] if self._right is not always else []
        try:
            process = subprocess.run(
                [*killed, program, *arguments],
                capture_output=True,
                timeout=limit + bool(killed),
                check=False,
                stdin=subprocess.DEVNULL,
                env=command_environment(),
            )
        except subprocess.TimeoutExpired:
            raise SlurmUnreachableError(
                f"{program} {arguments[0]}: no answer in {limit:g} s"
            ) from None
        except FileNotFoundError:
            raise SlurmUnreachableError(f"{program} is not on PATH: install slurm-client") from None
        text = " ".join((process.stderr + process.stdout).decode(errors="replace").split())
        self._log.debug(program, words=" ".join(arguments), rc=process.returncode, text=text)
        # With filters, `scancel --quiet` ends so, without a word, where there is no such job.
        is_gone = program == "scancel" and process.returncode == 1 and not text
        if process.returncode == 0 or is_gone:
            return
        if killed and process.returncode in (_KILLED, -signal.SIGKILL):
            raise SlurmUnreachableError(f"{program} {arguments[0]}: no answer in {limit:.3g} s")
        kind = SlurmUnreachableError if any(u in text for u in _UNREACHABLE) else ScontrolError
        raise kind(
            f"{program} {' '.join(arguments[:2])}: {text or f'exit code {process.returncode}'}"
        )


class LeaseWrites(Scontrol):
    """Writes of the leader lease (`controller.leader`), which need no right to write.

    Args:
        timeout_s: seconds before a call counts as unanswered and is killed.
        account: the controller's account.
    """

    def __init__(self, *, timeout_s: float, account: str) -> None:
        super().__init__(timeout_s=timeout_s, right=lambda: math.inf)
        self._account = account

    def create_lease(self, name: str, *, node: str, comment: str) -> None:
        """Create a reservation that blocks no job; refused if the name exists.

        It is for one minute in 2098, further ahead than Slurm looks for a job without a time limit
        (a year), and may overlap jobs and reservations. Slurm needs the name of a node: when it
        chooses one itself, that has to be idle.
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
