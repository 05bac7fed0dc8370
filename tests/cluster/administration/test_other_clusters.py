"""A second cluster in the same slurmdbd, and users whose environment names it."""

from collections.abc import Iterator

import pytest

from tests.support.container_cluster.selasticd import Daemon, gpus, running
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

#: The other cluster has alice's account with a limit of no GPU, and each job of this one under the
#: same number, with other times.
SECOND_CLUSTER = """
set -e
sacctmgr -iQ add cluster other
sacctmgr -iQ add account research cluster=other
sacctmgr -iQ modify account research cluster=other set GrpTRES=gres/gpu=0
sacctmgr -iQ add user alice account=research cluster=other
"""
COPIED_JOBS = """
own=$(sacctmgr -nP show cluster format=cluster | grep -v '^other$')
mysql slurm_acct_db -e "
    INSERT INTO other_job_table SELECT * FROM ${own}_job_table;
    UPDATE other_job_table SET time_end = time_end + 100, tres_alloc = '1=1' WHERE time_end > 0;"
"""


@pytest.fixture
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    cluster.exec(SECOND_CLUSTER)
    with running(cluster, reporters=("alice",)) as daemon:
        yield daemon
    cluster.exec("sacctmgr -iQ delete cluster other", check=False)


def test_limits_and_accounting_are_those_of_the_own_cluster(
    cluster: SlurmCluster, daemon: Daemon
) -> None:
    begun = cluster.exec("date +%Y-%m-%dT%H:%M:%S").stdout.strip()
    job = cluster.sbatch("exec sleep 600", "--elastic=1-2", "-o/dev/null")
    until(lambda: gpus(cluster, job) == 2, seconds=60, what="it grows: the limit is another's")
    cluster.exec(["scancel", str(job)], user="alice")
    until(lambda: cluster.state(job) == "CANCELLED", seconds=30, what="its end")

    def check() -> tuple[int, str]:
        command = f"export SLURM_CLUSTERS=other; selastic usage --check -S {begun}"
        done = cluster.exec(command, user="alice", check=False)
        return done.returncode, done.stdout + done.stderr

    until(lambda: check()[0] == 0, seconds=60, what=lambda: check()[1])
    cluster.exec(COPIED_JOBS)
    copied = cluster.exec(f"sacct -M other -nXP -j {job} --format=JobID").stdout
    assert copied.split() == [str(job)]
    code, said = check()
    assert code == 0, said
    assert int(said.split()[0]) >= 1, said
