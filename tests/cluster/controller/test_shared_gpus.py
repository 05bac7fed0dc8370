"""selasticd on a real cluster whose GPUs may be shared: jobs ask for shards of them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from slurm_elastic.models.colocation.shared_speeds import PartOfNode, SharedSpeeds
from tests.support.container_cluster.selasticd import (
    PYTHON,
    Daemon,
    eager_config,
    gpus,
    running,
    shown,
)
from tests.support.container_cluster.slurm_cluster import (
    SlurmCluster,
    cluster_name,
    temporary_cluster,
    until,
)

SLEEP = "exec sleep 600"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with temporary_cluster(f"{cluster_name()}-shards", "--nodes=1", "--shards=2") as cluster:
        yield cluster


def test_an_elastic_job_takes_no_gpu_that_others_share_and_gives_way_to_them(
    cluster: SlurmCluster,
) -> None:
    def half() -> int:
        return cluster.sbatch(SLEEP, "--gres=shard:1", "-o/dev/null", user="bob")

    with running(cluster) as daemon:
        assert "slurmctld is read through json" in daemon.log()
        cluster.wait(half(), "RUNNING")
        job = cluster.sbatch(SLEEP, "--elastic=1-4", "-o/dev/null", "-t10")
        until(lambda: gpus(cluster, job) == 3, what=daemon.log)
        # The other half of the GPU is free; for the next one the elastic job gives way.
        cluster.wait(half(), "RUNNING")
        third = half()
        cluster.wait(third, "RUNNING")
        until(lambda: gpus(cluster, job) == 2, what=daemon.log)
        until(lambda: '"used": 4' in daemon.selastic("topology", "--json"), what=daemon.log)
        # Nothing is tried for a fourth GPU.
        log = daemon.log()
        assert "To='4 " not in log, log
        daemon.check_log()


def halves(cluster: SlurmCluster, *jobs: int) -> list[list[str]]:
    """Return the GPUs of each running job, in Slurm's notation; [] if it does not run."""
    records = [shown(cluster, job) for job in jobs]
    return [r["gres_detail"] if r["job_state"] == ["RUNNING"] else [] for r in records]


def learn_that_slow_jobs_slow_others(daemon: Daemon) -> None:
    """Write into the ledger of a daemon that does not run what it would have measured."""
    speeds = SharedSpeeds()
    slow = PartOfNode(application="alice/slow", gpus=1)
    for name in ("alice/sbatch", "bob/sbatch"):  # of jobs without a name
        beside = PartOfNode(application=name, gpus=1)
        for part, other, step_s in ((beside, slow, 2.0), (slow, beside, 1.0)):
            speeds.record_alone(part.application, "", 1.0)
            for _ in range(9):
                speeds.record_shared(
                    part, [other], node_type="a100, one GPU", setting="", step_s=step_s
                )
    write = (
        "import json, sys; from slurm_elastic.controller.state.ledger import Ledger;"
        f" Ledger('{daemon.home}/ledger.sqlite').put('neighbour_speeds', json.load(sys.stdin))"
    )
    daemon.cluster.exec([PYTHON, "-c", write], user="selastic", stdin=json.dumps(speeds.to_json()))


def test_two_jobs_that_allow_it_share_a_gpu_until_one_falls_free(cluster: SlurmCluster) -> None:
    begun = cluster.exec(["date", "+%FT%T"]).stdout.strip()
    cluster.sbatch(SLEEP, "--gres=gpu:2", "-o/dev/null", user="bob")
    leaves = cluster.sbatch(SLEEP, "--gres=gpu:1", "-o/dev/null", user="bob")
    first = cluster.sbatch(SLEEP, "--elastic=1,share=yes", "-o/dev/null", "-t10")
    cluster.wait(first, "RUNNING")
    second = cluster.sbatch(SLEEP, "--elastic=1,share=yes", "-o/dev/null", "-t10", user="bob")
    refuses = cluster.sbatch(SLEEP, "--elastic=1", "-o/dev/null", "-t10", "--nice=1000")
    with running(cluster) as daemon:  # without the site's permission
        until(lambda: daemon.log().count("Round ") > 1)
        assert "no change would be made" in daemon.selastic("plan"), daemon.log()
        sharing = '[neighbours]\nshare_gpus = "act"\n'
        daemon.configure(eager_config(extra=sharing))
        daemon.signal("HUP")
        until(
            lambda: halves(cluster, first, second) == [["shard:1(0/2,0/2,0/2,1/2)"]] * 2,
            what=daemon.log,
        )
        until(lambda: f"beside alice's {first}" in daemon.selastic("explain", str(second)))
        rows = daemon.selastic("status", "-P", "-o", "JOBID,GPUS").split()
        assert {f"{first}|1/2", f"{second}|1/2", f"{refuses}|-"} <= set(rows)
        cluster.exec(["scancel", str(refuses), str(leaves)])
        until(
            lambda: (
                sorted(h[0][:5] for h in halves(cluster, first, second) if h) == ["gpu:a", "shard"]
            ),
            what=daemon.log,
        )
        usage = json.loads(daemon.selastic("usage", "--json", user="root"))
        spent = {row["job_id"]: row for row in usage["jobs"]}[second]
        assert 0 < spent["gpu_seconds"] < spent["seconds"], usage
        # A third one joins the job that has half of a GPU, by a controller that dies meanwhile.
        slow = cluster.sbatch(
            SLEEP, "--elastic=1,share=yes", "-o/dev/null", "-t10", "-Jslow", "--hold"
        )
        daemon.when(slow, "COOL", daemon.kill_command, first=f"scontrol release {slow}")
        assert shown(cluster, slow)["tres_per_node"] == "gres/shard:1"
        daemon.start()
        until(lambda: halves(cluster, slow)[0][:1] == ["shard:1(0/2,0/2,0/2,1/2)"], what=daemon.log)
        # As it slows the one that was there first, it waits again, for a whole GPU.
        daemon.stop()
        learn_that_slow_jobs_slow_others(daemon)
        daemon.start()
        cluster.wait(slow, "PENDING")
        until(lambda: "waits again" in daemon.selastic("history", str(slow)), what=daemon.log)
        until(lambda: "gpu" in shown(cluster, slow)["tres_per_node"], what=daemon.log)
        cluster.exec(["scancel", str(first), str(second), str(slow)])

        def accounted() -> dict[str, Any]:
            words = ("usage", "--check", "--json", "-S", begun)
            return json.loads(daemon.selastic(*words, user="root", check=False))

        # Of the first or the second: whole, half, whole; of the other one a half, as of the third.
        until(lambda: accounted()["equal"] >= 5, what=accounted)
        assert accounted()["differences"] == []
        daemon.check_log()


def test_under_goodput_two_waiting_jobs_share_the_last_free_gpu_without_a_restart(
    cluster: SlurmCluster,
) -> None:
    cluster.cancel()
    cluster.sbatch(SLEEP, "--gres=gpu:3", "-o/dev/null", user="bob")
    leaves = cluster.sbatch(SLEEP, "--gres=gpu:1", "-o/dev/null", user="bob")
    cluster.wait(leaves, "RUNNING")
    sharing = '[neighbours]\nshare_gpus = "act"\n'
    text = eager_config(policy="goodput", queue="controller", extra=sharing)
    with running(cluster, text) as daemon:
        options = ("--elastic=1,share=yes", "-o/dev/null", "-t10")
        jobs = [cluster.sbatch(SLEEP, *options, user=user) for user in ("alice", "bob")]
        until(lambda: all(f"JobId={job} Lease=" in daemon.log() for job in jobs), what=daemon.log)
        cluster.exec(["scancel", str(leaves)])
        until(
            lambda: halves(cluster, *jobs) == [["shard:1(0/2,0/2,0/2,1/2)"]] * 2,
            what=daemon.log,
        )
        assert [shown(cluster, job)["restart_cnt"] for job in jobs] == [0, 0], daemon.log()
        daemon.check_log()
