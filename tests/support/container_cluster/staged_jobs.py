"""Jobs of one cluster test that train at the same time, their records and logs."""

import contextlib
import json
import re
from typing import Any

from tests.support.container_cluster.selasticd import Daemon
from tests.support.container_cluster.slurm_cluster import SlurmCluster


class StagedJobs:
    """Named jobs that a controller resizes, with a folder and a log each in one directory.

    Attributes:
        stage: the directory, shared by all nodes: `NAME/` and `NAME.log` belong to job `NAME`.
        jobs: numbers of the jobs, by name.
    """

    def __init__(self, cluster: SlurmCluster, daemon: Daemon, stage: str) -> None:
        self.cluster = cluster
        self.daemon = daemon
        self.stage = stage
        self.jobs: dict[str, int] = {}

    def running(self, file: str) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
        """Return squeue's rows of the jobs that have not ended, and their last records.

        That is the state and the GPUs per node of each, and the last complete line of a file; both
        by one command, as tests look often.
        """
        ids = ",".join(map(str, self.jobs.values()))
        files = " ".join(f"{name}/{file}" for name in self.jobs)
        squeue = f"squeue -h -j {ids} -o '%i %T,%b' || exit"
        look = f"{squeue}; cd {self.stage}; tail -vn1 {files} 2>/dev/null || true"
        listing, *tails = re.split("^==> ", self.cluster.exec(look).stdout, flags=re.MULTILINE)
        listed = dict(line.split() for line in listing.splitlines() if line)
        running = {name: listed[str(job)] for name, job in self.jobs.items() if str(job) in listed}
        records = {}
        for tail in tails:
            path, _, line = tail.partition(" <==\n")
            with contextlib.suppress(ValueError):  # a line of which a part is written
                records[path.removesuffix(f"/{file}")] = json.loads(line)
        return running, records

    def sizes(self, name: str) -> tuple[str, list[int]]:
        """Return the final state of a job, and its GPUs: at its start and after each change."""
        rows = self.cluster.exec(
            f"sacct -DXPn -j {self.jobs[name]} --format=State,AllocTRES"
        ).stdout.splitlines()
        first = [int(n) for n in re.findall(r"gres/gpu=(\d+)", rows[0])]
        changes = json.loads(self.daemon.selastic("history", str(self.jobs[name]), "--json"))
        done = [row["to"] for row in changes["changes"] if row["outcome"] == "done"]
        return rows[-1].partition("|")[0], [*first, *(int(to.split()[0]) for to in done)]

    def records(self, name: str, file: str) -> list[dict[str, Any]]:
        """Return the records that a job has written, one per line."""
        text = self.cluster.exec(f"cat {self.stage}/{name}/{file}").stdout
        return [json.loads(line) for line in text.splitlines()]

    def log(self, name: str) -> str:
        """Return the log of a job; "" before it has one."""
        return self.cluster.exec(f"cat {self.stage}/{name}.log", check=False).stdout

    def logs(self) -> str:
        """Return the ends of the logs of all jobs and of the controller."""
        texts = [f"{name}:\n{self.log(name)[-4000:]}" for name in self.jobs]
        return "\n".join([*texts, self.daemon.log()[-8000:]])
