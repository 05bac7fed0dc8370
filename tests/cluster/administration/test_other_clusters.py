"""A second cluster in the same slurmdbd: named by users' environment, or in one federation."""

from collections.abc import Iterator

import pytest

from tests.support.container_cluster.added_settings import added_settings
from tests.support.container_cluster.selasticd import Daemon, eager_config, gpus, running, shown
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
#: A slurmctld of its own on the same host, for nodes that do not answer.
REMOTE = "SLURM_CONF=/etc/slurm-remote/slurm.conf"
FEDERATION = f"""
set -e
mkdir -p /etc/slurm-remote
sed -e 's/^ClusterName=.*/ClusterName=remote/' -e "s#/var/lib/slurm/ctld#/tmp/slurm-remote#" \
    -e 's#slurmctld\\.#slurmctld-remote.#' -e '/^NodeName/d; /^PartitionName/d; /^Topology/d' \
    /etc/slurm/slurm.conf >/etc/slurm-remote/slurm.conf
cat >>/etc/slurm-remote/slurm.conf <<END
SlurmctldPort=6827
NodeName=remote Port=7001 NodeAddr=127.0.0.1 CPUs=16 RealMemory=16000 Gres=gpu:a100:4
PartitionName=gpu Nodes=remote Default=YES
END
install -d -o slurm /tmp/slurm-remote
cp /etc/slurm/*.lua /etc/slurm-remote
sacctmgr -iQ add cluster remote
sacctmgr -iQ add account research cluster=remote
sacctmgr -iQ add user alice account=research cluster=remote
{REMOTE} slurmctld -i
# Its registration and a federation at once: slurmdbd refuses the latter.
for _ in $(seq 100); do
    sacctmgr -nP show cluster remote format=controlport | grep -q 6827 && break
    sleep 0.2
done
clusters=$(sacctmgr -nP show cluster format=cluster | paste -sd,)
for _ in $(seq 20); do
    sacctmgr -iQ add federation everywhere clusters=$clusters && break
    sleep 0.5
done
for _ in $(seq 100); do scontrol show federation | grep -q Synced:Yes && exit; sleep 0.2; done
exit 1
"""
NO_FEDERATION = f"""
{REMOTE} scancel --user=alice
sacctmgr -iQ delete federation everywhere
kill $(cat /run/slurm/slurmctld-remote.pid)
while kill -0 $(cat /run/slurm/slurmctld-remote.pid) 2>/dev/null; do sleep 0.1; done
sacctmgr -iQ delete cluster remote
rm -rf /etc/slurm-remote /tmp/slurm-remote
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


@pytest.fixture
def federation(cluster: SlurmCluster) -> Iterator[None]:
    """Join the cluster to a federation whose commands show the jobs of all clusters."""
    with added_settings(
        cluster, "FederationParameters=fed_display\n", shown="FederationParameters.*fed_display"
    ):
        try:
            cluster.exec(FEDERATION)
            yield
        finally:
            cluster.exec(NO_FEDERATION, check=False)


@pytest.mark.usefixtures("federation")
def test_in_a_federation_elastic_jobs_stay_and_give_nothing_to_jobs_of_other_clusters(
    cluster: SlurmCluster,
) -> None:
    script = "#!/bin/sh\nsleep 600\n"
    waits = f"{REMOTE} sbatch -M remote --parsable --gres=gpu:a100:4 -o/dev/null"
    rigid = cluster.exec(waits, user="alice", stdin=script).stdout.partition(";")[0]
    config = eager_config(extra='reader = "json"\n')
    with running(cluster, config, reporters=("alice",)) as daemon:
        job = cluster.sbatch("exec sleep 600", "--elastic=1-2", "-o/dev/null")
        until(lambda: gpus(cluster, job) == 2, what=daemon.log)
        assert rigid in cluster.exec("squeue -h -o %A").stdout.split()
        status = ""

        def is_shown() -> bool:
            nonlocal status
            status = daemon.selastic("status")
            return "2 elastic, 0 rigid   22 idle" in status

        until(is_shown, seconds=20, what=lambda: status)
        assert "waiting" not in status
        record = shown(cluster, job)
        own = cluster.exec("sacctmgr -nP show cluster format=cluster | grep -v remote").stdout
        assert record["federation_siblings_viable"] == own.strip()
        daemon.check_log()
