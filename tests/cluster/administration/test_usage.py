"""`selastic usage` agrees with sacct to the second, whatever happened to the jobs."""

import json
from collections.abc import Iterator

import pytest

from tests.support.container_cluster.selasticd import Daemon, gpus, running, shown
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until


@pytest.fixture
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    with running(cluster, reporters=("alice",)) as daemon:
        yield daemon
        cluster.exec("scontrol update nodename=g05 state=resume", check=False)


def test_usage_and_sacct_agree(cluster: SlurmCluster, daemon: Daemon) -> None:
    def submit(seconds: int, directive: str, *options: str) -> int:
        words = (f"--elastic={directive}", "-o/dev/null", *options)
        return cluster.sbatch(f"exec sleep {seconds}", *words)

    def rows(job: int) -> list[str]:
        text = cluster.exec(f"sacct -DXPn -j {job} --format=State,ElapsedRaw,AllocTRES").stdout
        return text.splitlines()

    begun = cluster.exec("date +%Y-%m-%dT%H:%M:%S").stdout.strip()
    growing = submit(600, "1-4", "-Ca100&rack2")
    requeued, lost = submit(600, "1"), submit(600, "2", "-wg05")
    suspended, array = submit(600, "1"), submit(3, "1", "--array=1-3")
    for job in (growing, requeued, lost, suspended):
        cluster.wait(job, "RUNNING")
    until(lambda: gpus(cluster, growing) == 4, seconds=60)
    cluster.exec(["scontrol", "suspend", str(suspended)])
    cluster.exec(["scontrol", "requeue", str(requeued)], user="alice")
    cluster.exec("scontrol update nodename=g05 state=down reason=test")
    daemon.kill()
    cluster.exec(["scontrol", "resume", str(suspended)])
    unseen = submit(2, "3")
    cluster.wait(unseen, "COMPLETED")
    cluster.exec("sleep 6; pkill -9 slurmctld; sleep 1; cluster-start slurmctld")
    cluster.exec(["scancel", str(suspended)], user="alice")
    daemon.start()
    cluster.exec(["scancel", str(growing), str(requeued), str(lost)], user="alice")
    until(lambda: cluster.state(growing) == "CANCELLED", seconds=60)

    def check() -> tuple[int, str]:
        command = ["selastic", "usage", "--check", "-S", begun, "-u", "alice"]
        done = cluster.exec(command, user="alice", check=False)
        return done.returncode, done.stdout + done.stderr

    until(lambda: check()[0] == 0, seconds=90, what="usage and sacct agree")
    words = check()[1]
    states = {state: rows(job)[0] for state, job in (("requeued", requeued), ("lost", lost))}
    assert states["requeued"].startswith("REQUEUED")
    assert states["lost"].startswith("NODE_FAIL")
    assert int(words.split()[0]) >= 8, words
    used = json.loads(daemon.selastic("usage", "--json", "-S", begun))["jobs"]
    mine = {row["job_id"]: row["gpu_seconds"] for row in used}
    for job in (growing, requeued, lost, suspended, unseen):
        fields = [row.split("|") for row in rows(job)]
        counts = [(int(s), dict(p.partition("=")[::2] for p in t.split(","))) for _, s, t in fields]
        assert mine[job] == sum(s * int(c.get("gres/gpu", 0)) for s, c in counts), (job, fields)
    assert len([j for j in used if j["display_id"].startswith(f"{array}_")]) in (0, 3)
    assert shown(cluster, unseen)["job_state"] == ["COMPLETED"]
