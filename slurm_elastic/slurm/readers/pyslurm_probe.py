"""Program that tries pyslurm: one built for another release crashes the process that uses it.

Exit code 0: it works, and tells all that the controller needs. The daemon runs it before it uses
pyslurm, while slurmctld answers.
"""

from __future__ import annotations

import os
import sys
import time


def main() -> None:
    """Import pyslurm, and read configuration, jobs and nodes as the controller does."""
    os.environ["PYSLURM_DISABLE_AUTO_INIT"] = "1"
    import pyslurm  # noqa: PLC0415

    from slurm_elastic.slurm.readers import pyslurm_records  # noqa: PLC0415
    from slurm_elastic.slurm.readers.job_parser import JobParser  # noqa: PLC0415

    pyslurm.slurm_init()
    str(pyslurm.slurmctld.Config.load().version)
    jobs = pyslurm.Jobs.load().values()
    nodes = pyslurm.Nodes.load().values()
    now = time.time()
    JobParser(mark=pyslurm_records.mark).jobs(jobs)
    for job in jobs:
        job.get_resource_layout_per_node()
        pyslurm_records.text(job, "name")
    for node in nodes:
        pyslurm_records.node(node, 0, barred=now < 0)
        if pyslurm_records.has_parts_of_gpus(node):
            sys.exit(f"it does not tell which GPUs of {node.name} are shared")


if __name__ == "__main__":
    main()
