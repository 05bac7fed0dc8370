"""Listed sizes, GPU types that have the nodes, and the ends of jobs, on a real Slurm."""

import json

import pytest

from tests.support.container_cluster.selasticd import Daemon, gpus, shown, submit_running
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

pytestmark = pytest.mark.usefixtures("no_trace")


def submission(cluster: SlurmCluster, *options: str, script: str = "exec sleep 600"):
    """Submit as alice; return the output of sbatch, and the job's id, 0 if it was refused."""
    done = cluster.exec(
        ["sbatch", "--parsable", "-o/dev/null", *options],
        user="alice",
        stdin=f"#!/bin/bash\n{script}\n",
        check=False,
    )
    job = int(done.stdout.split(";")[0]) if done.returncode == 0 else 0
    cluster.jobs += [job] if job else []
    return done.stdout + done.stderr, job


def explained(daemon: Daemon, job: int) -> dict:
    """Return selasticd's answer about a job, as soon as it has seen it."""
    answer = ""

    def known() -> bool:
        nonlocal answer
        answer = daemon.selastic("explain", "--json", str(job), check=False)
        return answer.startswith("{")

    until(known, what=lambda: answer)
    return json.loads(answer)


# --- sizes ---


def test_a_job_grows_and_gives_way_on_its_listed_sizes_only(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    job = submit_running(cluster, directive="1-4,sizes=1:4")
    until(lambda: gpus(cluster, job) == 4)
    rigid = cluster.sbatch("exec sleep 600", "--gres=gpu:2", "-o/dev/null", "-Ca100&rack2")
    cluster.wait(rigid, "RUNNING")
    until(lambda: gpus(cluster, job) == 1)
    changes = json.loads(daemon.selastic("history", "--json", str(job)))["changes"]
    sizes = [int(c[side].split()[0]) for c in changes for side in ("from", "to")]
    assert set(sizes) == {1, 4}


def test_a_directive_with_sizes_can_be_replaced(daemon: Daemon, cluster: SlurmCluster) -> None:
    job = submit_running(cluster, directive="1-4,sizes=4:1:2")
    shown_job = json.loads(shown(cluster, job)["admin_comment"])
    assert shown_job["elastic"] == "1-4,sizes=1:2:4"
    until(lambda: gpus(cluster, job) == 4)
    daemon.selastic("update", "--elastic=1-3,sizes=3", str(job))
    until(lambda: gpus(cluster, job) == 3)
    refused = daemon.selastic("update", "--elastic=1-3,sizes=4", str(job), check=False)
    assert "sizes: 4 is outside 1-3; remove it or widen MIN-MAX" in refused


def test_a_shape_that_is_not_listed_is_refused(daemon: Daemon, cluster: SlurmCluster) -> None:
    said, job = submission(cluster, "--elastic=1-8,sizes=1:2:4", "--gres=gpu:3")
    assert job == 0
    assert "elastic: the job asks for 3 GPUs to start with, not among its sizes" in said
    said, job = submission(cluster, "--elastic=1-8,sizes=1:2:4", "--gres=gpu:4")
    assert "elastic: 1, 2 or 4 GPUs; starts at 4." in said
    cluster.wait(job, "RUNNING")


# --- types that have the nodes: the cluster has three nodes of each ---


@pytest.mark.parametrize(
    ("options", "kinds", "nodes"),
    [
        (("--nodes=4", "--ntasks=4", "--gpus-per-task=1"), {"a100", "v100"}, 2),
        (("--nodes=3", "--ntasks=3", "--gpus-per-task=1"), {"a100", "v100"}, 3),
        (("--nodes=3", "--ntasks=3", "--gpus-per-task=1", "--exclude=g02"), {"v100"}, 3),
    ],
)
def test_a_request_without_a_type_gets_one_that_has_the_nodes(
    daemon: Daemon, cluster: SlurmCluster, options: tuple[str, ...], kinds: set[str], nodes: int
) -> None:
    said, job = submission(cluster, "-Jraw", "--elastic=1-8", *options)
    assert job, said
    cluster.wait(job, "RUNNING")
    record = shown(cluster, job)
    types = {g.split(":")[1] for g in record["gres_detail"]}
    assert len(types) == 1
    assert types <= kinds
    assert len(record["gres_detail"]) == nodes


def test_what_no_type_has_is_refused_in_one_line(daemon: Daemon, cluster: SlurmCluster) -> None:
    said, job = submission(cluster, "--elastic=1-8", "--nodes=4", "--gres=gpu:1")
    assert job == 0
    assert "no GPU type that the job may use has 4 GPUs on 4 nodes in its partition" in said
    assert "a100: 3 nodes of 4 GPUs" in said
    assert "v100: 3 nodes of 4 GPUs" in said


# --- how jobs ended ---


def test_explain_tells_how_jobs_ended(daemon: Daemon, cluster: SlurmCluster) -> None:
    until_told = "until [ -e /shared/scratch/end-$SLURM_JOB_ID ]; do sleep 0.2; done"
    scripts = {
        "COMPLETED": until_told,
        "FAILED": f"{until_told}; exit 3",
        "CANCELLED": "sleep 600",
    }
    jobs = {
        state: submission(cluster, f"-Jraw-{state}", "--elastic=1-2", script=script)[1]
        for state, script in scripts.items()
    }
    for job in jobs.values():
        show = ("show", "job", str(job), "--json")
        until(lambda words=show: '"running": {' in daemon.selastic(*words, check=False))
        cluster.exec(f"touch /shared/scratch/end-{job}")
    cluster.exec(["scancel", str(jobs["CANCELLED"])])
    for state, job in jobs.items():
        cluster.wait(job, state)
        until(lambda job=job: explained(daemon, job)["ended"] is not None)
        ended = explained(daemon, job)["ended"]
        assert (ended["state"], ended["gpus"], ended["runs"]) == (state, 1, 1)
        assert ended["reported"]
        assert ended["time"] > 1_700_000_000
    assert explained(daemon, jobs["FAILED"])["ended"]["exit_code"] == 3
    text = daemon.selastic("explain", str(jobs["FAILED"]))
    assert f"{jobs['FAILED']} raw-FAILED failed with exit code 3 at " in text
    assert "Never proven:" in text
    assert "Next" not in text
    assert "was cancelled at" in daemon.selastic("explain", str(jobs["CANCELLED"]), user="bob")


def test_explain_a_job_that_never_ran(daemon: Daemon, cluster: SlurmCluster) -> None:
    _, job = submission(cluster, "--elastic=1-2", "--begin=now+1hour")
    until(lambda: " waits for " in daemon.selastic("explain", str(job), check=False))
    cluster.exec(["scancel", str(job)])
    until(lambda: explained(daemon, job)["ended"] is not None)
    text = daemon.selastic("explain", str(job))
    assert "was cancelled" in text
    assert "Never ran:" in text
