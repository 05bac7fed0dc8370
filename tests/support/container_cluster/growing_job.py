"""A job on the real cluster that a test changes in place, in the controller's part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.support.container_cluster.esrun_stand_in import ADDRESS, StandIn
from tests.support.container_cluster.selasticd import PYTHON

DIRECTORY = "/shared/scratch/companions"
#: A program that regroups without torch.
PROGRAM = Path(__file__).parents[2] / "cluster" / "drivers" / "regrouping.py"


class GrowingJob:
    """A running job of alice on g01, which the test changes in place.

    Args:
        controller: stand-in for the controller.
        options: of sbatch.
        words: arguments of the program.
        profile: shell commands before esrun.
        program: shell command of the program in place of `PROGRAM`.
    """

    def __init__(
        self,
        controller: StandIn,
        *options: str,
        words: str = "",
        profile: str = "",
        program: str = f"{PYTHON} $PWD/program.py",
    ) -> None:
        self.controller, self.cluster = controller, controller.cluster
        self.home = f"{DIRECTORY}/job{len(self.cluster.jobs)}"
        write = f"mkdir -p {self.home}; cat >{self.home}/program.py"
        self.cluster.exec(write, user="alice", stdin=PROGRAM.read_text())
        self.job = self.cluster.sbatch(
            f"export SLURM_ELASTIC_CONTROLLER={ADDRESS}\n{profile}\nesrun {program} {words}",
            f"--chdir={self.home}",
            "--output=out",
            "--time=30",
            "--nodelist=g01",
            *(options or ("--gres=gpu:1",)),
        )
        self.change = 0
        self.companions: list[int] = []
        self.report(in_place=True)

    def report(self, **fields: Any) -> dict[str, Any]:
        return self.controller.wait_for(self.job, **fields)

    def order(self, *join: int, leave: tuple[int, ...] = (), deadline_s: float = 120.0) -> None:
        self.change += 1
        members = {"change": self.change, "join": join, "leave": leave, "deadline_s": deadline_s}
        self.controller.order(self.job, "run", members={**members, "gpu_type": ""})

    def submit(self, *join: int, **more: Any) -> list[int]:
        """Order companions; return their job ids once they are submitted."""
        self.order(*join, **more)
        rows = self.report(change=self.change, change_state="submitted")["companions"]
        submitted = [row[0] for row in rows if row[2] == "submitted"]
        self.companions += submitted
        self.cluster.jobs += submitted
        return submitted

    def release(self, job_id: int, node: str) -> None:
        """Place a companion and let it start, as the controller does."""
        update = f"scontrol update jobid={job_id} ReqNodeList={node} NumNodes=1-1"
        self.cluster.exec(f"{update} && scontrol release {job_id}", user="selastic")

    def grow(self, gpus: int, node: str) -> int:
        """Grow by one companion; return its job id."""
        (job_id,) = self.submit(gpus)
        self.release(job_id, node)
        self.report(change=self.change, change_state="done")
        return job_id

    def fields(self, job_id: int) -> dict[str, str]:
        """Return the fields of a job."""
        text = self.cluster.exec(f"scontrol show job -o {job_id}").stdout
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def left_behind(self) -> str:
        """Return the remains of this job: its ranks, and its companions in the queue."""
        busy = " ".join(map(str, [self.job, *self.companions]))
        jobs = f"squeue -h -j {busy.replace(' ', ',')} -o '%A %T'"
        # The pattern does not match the command line that contains it.
        ranks = f"pgrep -f '{self.home[:-1]}[{self.home[-1]}]([ /]|$)'"
        nodes = [f"g0{n}" for n in range(1, 7)]
        found = [self.cluster.exec(jobs, check=False).stdout]
        found += [self.cluster.exec(ranks, node=node, check=False).stdout for node in nodes]
        return "".join(found).strip()

    def newcomers(self) -> list[list[str]]:
        lines = self.cluster.exec(f"cat {self.home}/newcomers").stdout.splitlines()
        return sorted(line.split() for line in lines)

    def log(self) -> str:
        return self.cluster.exec(f"cat {self.home}/out").stdout
