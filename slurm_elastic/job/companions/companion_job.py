"""State of one companion in esrun, and the srun that runs its ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable

from slurm_elastic.core.member_orders import CompanionRow
from slurm_elastic.job import srun
from slurm_elastic.job.companions.companion_channel import CompanionPlace
from slurm_elastic.job.environment.joint_shape import CompanionPart
from slurm_elastic.job.launch import RankLaunch, SrunProcess
from slurm_elastic.job.slurm_env import SlurmAllocation
from slurm_elastic.job.steps.step import Step


class CompanionJob:
    """State of one companion.

    Attributes:
        job_id: of the companion.
        gpus: number that it holds; each runs a rank.
        change: number of the change that has ordered it.
        mark: of its ranks.
        state: one of `member_orders.COMPANION_STATES`.
        place: where it runs; None: not yet.
        step: its ranks; None: not started.
        end_by: monotonic time at which its ranks are ended if it has not left by itself; None: it
            is not to leave.
        gone_by: monotonic time at which the job is cancelled if its script has not ended it.
        is_part: whether its ranks were started with the program, which cannot go on without them;
            else they have joined a running training.
        group: GPUs and nodes of the training with its ranks, as last formed or planned.
    """

    def __init__(self, job_id: int, gpus: int, change: int, mark: str) -> None:
        self.job_id, self.gpus, self.change, self.mark = job_id, gpus, change, mark
        self.state = "submitted"
        self.place: CompanionPlace | None = None
        self.step: Step | None = None
        self.end_by: float | None = None
        self.gone_by: float | None = None
        self.is_part = False
        self.group = (gpus, 1)

    @property
    def row(self) -> CompanionRow:
        """Its row in a report."""
        return (self.job_id, self.gpus, self.state)

    @property
    def desired(self) -> bool:
        """Whether its ranks have joined a running training, or are to."""
        return self.state in ("starting", "joined") and not self.is_part

    @property
    def awaited(self) -> bool:
        """Whether it has not joined yet, and is to."""
        return self.state in ("submitted", "running", "starting")

    def part(self, launch: RankLaunch) -> CompanionPart:
        """Return it as a part of the next start of the program."""
        assert self.place is not None
        allocation = companion_allocation(self.job_id, self.place, launch.allocation.run_id)
        return CompanionPart(allocation, self.gpus, self.mark)

    def start_ranks(
        self,
        launch: RankLaunch,
        *,
        port: int,
        first_rank: int,
        nodes: int,
        on_end: Callable[[int], None],
    ) -> None:
        """Start its ranks, which then join the training.

        Args:
            launch: of the base.
            port: of the store in rank 0's process.
            first_rank: provisional number of its first rank.
            nodes: number of nodes with it.
            on_end: called with the exit code of its ranks, from another thread.

        Raises:
            OSError: srun cannot be started.
        """
        assert self.place is not None
        allocation = companion_allocation(self.job_id, self.place, launch.allocation.run_id)
        command = srun.command(
            allocation,
            (self.gpus,),
            launch.options.program,
            gpus=True,
            user_options=launch.options.srun_args,
            companion=True,
        )
        env = srun.companion_environment(
            launch.environment,
            allocation,
            master=(launch.nodes[0], port),
            first_rank=first_rank,
            nodes=nodes,
            mark=self.mark,
        )
        step = self.step = Step(SrunProcess(command, env, self.mark))
        threading.Thread(
            target=lambda: on_end(step.wait()), name=f"step of {self.job_id}", daemon=True
        ).start()
        self.state = "starting"

    @property
    def has_ranks(self) -> bool:
        """Whether its srun runs."""
        return self.step is not None and not self.step.ends_within(0)

    def kill_srun(self) -> None:
        """End an srun that has not noticed the end of its ranks, as after a cut of the network."""
        if self.step is not None and not self.step.ends_within(0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.step.child.pid, signal.SIGKILL)


def companion_mark(launch: RankLaunch, job_id: int) -> str:
    """Return the mark of the processes of a companion's ranks."""
    return f"{launch.mark}+{job_id}"


def companion_allocation(job_id: int, place: CompanionPlace, run_id: str) -> SlurmAllocation:
    """Return the allocation of a companion."""
    cluster = run_id.rpartition("-")[0]
    return SlurmAllocation({
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOB_NODELIST": place.node,
        "SLURM_JOB_CPUS_PER_NODE": str(place.cpus),
        "SLURM_GPUS_ON_NODE": str(place.gpus),
        "SLURMD_NODENAME": place.node,
        "SLURM_CLUSTER_NAME": cluster,
    })  # fmt: skip
