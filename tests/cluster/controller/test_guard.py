"""Jobs that make no progress are held, and limits of the site; each with its reason."""

import json
from collections.abc import Iterator

import pytest

from tests.support.container_cluster.selasticd import Daemon, eager_config, held, running, shown
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

#: Fails as soon as it runs, and sends itself back.
HOPELESS = """
export SLURM_ELASTIC_CONTROLLER=ctld:7321
esrun sh -c 'exit 3' || scontrol requeue $SLURM_JOB_ID
sleep 60
"""
#: Fails as well, but each time one checkpoint later.
STUBBORN = """
export SLURM_ELASTIC_CONTROLLER=ctld:7321
d=/shared/scratch/guard-$SLURM_JOB_ID; mkdir -p $d; cd $d
esrun --checkpoint "$d/*.pt" --complete '{stem}.ok' sh -c \
  'n=$(ls | wc -l); sleep 1; echo x >.tmp; mv .tmp $n.pt; touch $n.ok; sleep 3; exit 3' || \
  scontrol requeue $SLURM_JOB_ID
sleep 60
"""


@pytest.fixture
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    with running(cluster, reporters=("alice",)) as daemon:
        yield daemon


def again(cluster: SlurmCluster, job: int, run: int) -> None:
    """Start a job at once when it is back in the queue, where Slurm has not after two minutes."""

    def back() -> bool:
        found = shown(cluster, job)
        waits = found["restart_cnt"] == run and found["job_state"] == ["PENDING"]
        return waits or found["restart_cnt"] > run

    until(back, seconds=60, what=f"for attempt {run} of job {job}")
    # Started within a second of its requeue it fails: "Job credential revoked".
    start = f"sleep 2; scontrol update jobid={job} StartTime=now"
    cluster.exec(start, user="alice", check=False)  # refused if it runs by now


def test_who_gets_nowhere_is_held_and_who_gets_on_is_not(
    cluster: SlurmCluster, daemon: Daemon
) -> None:
    options = ("--elastic=1", "-o/dev/null", "-Ca100&rack2")
    hopeless = cluster.sbatch(HOPELESS, "-Jreal", *options)
    stubborn = cluster.sbatch(STUBBORN, "-Jreal", *options)
    again(cluster, hopeless, 1)
    daemon.wait_for(f"JobId={hopeless} Action=hold Reason=no-progress attempts=2", timeout=60)
    found = shown(cluster, hopeless)
    assert found["state_reason"] == "JobHeldUser"
    assert found["restart_cnt"] >= 2  # more if Slurm failed to launch it, which is no attempt
    why = "no progress in 2 attempts in a row: it has reported no checkpoint; exit code 3"
    assert found["comment"] == "selastic: held, no-progress attempts=2 exit_code=3"
    until(lambda: why in daemon.selastic("explain", str(hopeless)))
    assert f"held: {why}" in daemon.selastic("status")
    assert f"Stopped={why}" in daemon.selastic("show", str(hopeless))
    (row,) = json.loads(daemon.selastic("history", str(hopeless), "--json"))["changes"]
    assert (row["action"], row["reason"]["text"], row["outcome"]) == ("hold", why, "done")
    for run in (1, 2):
        again(cluster, stubborn, run)
    said = daemon.selastic("release", str(hopeless))
    assert said == f"{hopeless}: released: Slurm may start it again\n"
    daemon.wait_for(f"JobId={hopeless} Hold=released")
    found = shown(cluster, hopeless)
    assert (found["state_reason"] == "JobHeldUser", found["comment"]) == (False, "")
    until(lambda: shown(cluster, stubborn)["restart_cnt"] == 3, seconds=60)
    assert f"JobId={stubborn} Action=hold" not in daemon.log()
    assert shown(cluster, stubborn)["state_reason"] != "JobHeldUser"


def test_limits_hold_and_are_read_again(cluster: SlurmCluster, daemon: Daemon) -> None:
    def limit(text: str) -> None:
        daemon.configure(eager_config(extra=f"[limits]\n{text}\n"))
        cluster.exec(["selastic", "--config", f"{daemon.home}/elastic.toml", "reconfigure"])

    limit("share = 0.0")
    shape = ("--elastic=1-4", "-o/dev/null", "-Ca100&rack2", "--time=10")
    job = cluster.sbatch("exec sleep 600", *shape)
    cluster.wait(job, "RUNNING")
    why = "elasticity may have 0 GPUs above MIN ([limits]), and 0 are in use"
    until(lambda: why in " ".join(daemon.selastic("explain", str(job), check=False).split()))
    limit("resizes_per_user = 0")
    why = "would grow to 4 a100, but alice has used 0 of 0 resizes this hour"
    until(lambda: why in " ".join(daemon.selastic("explain", str(job), check=False).split()))
    assert sum(held(cluster, job).values()) == 1
    limit("resizes_per_user = 1")
    until(lambda: sum(held(cluster, job).values()) == 4, seconds=60)
    rigid = cluster.sbatch("exec sleep 600", "--gres=gpu:2", "-Ca100&rack2", "-o/dev/null")
    cluster.wait(rigid, "RUNNING", timeout=60)
    assert sum(held(cluster, job).values()) in (1, 2)
    # All runs together keep to the limit; whole minutes are all that Slurm knows.
    until(lambda: held(cluster, job))
    text = cluster.exec(f"sacct -DXPn -j {job} --format=State,ElapsedRaw").stdout
    ended = [int(s) for state, s in (r.split("|") for r in text.split()) if state == "REQUEUED"]
    left = 60 * shown(cluster, job)["time_limit"]["number"]
    assert len(ended) == 2
    assert 600 - sum(ended) - 70 <= left <= 600 - sum(ended) + 1


def test_a_shrunk_job_gets_a_longer_limit_and_gives_it_back(
    cluster: SlurmCluster, daemon: Daemon
) -> None:
    stated = eager_config(extra="[limits]\nvain_attempts = 0\n")
    stated = stated.replace("[resize]", "[resize]\nextend_time = true")
    stated = stated.replace("[speedup]", "[speedup]\nloss_in_node = 0.0")
    daemon.configure(stated)
    cluster.exec(["selastic", "--config", f"{daemon.home}/elastic.toml", "reconfigure"])
    here = ("-Ca100&rack2", "-o/dev/null")
    job = cluster.sbatch("exec sleep 9000", "--elastic=1-4", "--gres=gpu:4", "--time=60", *here)
    until(lambda: sum(held(cluster, job).values()) == 4, seconds=60)
    begun = shown(cluster, job)["start_time"]["number"]

    def limit(gpus: int) -> int:
        until(lambda: sum(held(cluster, job).values()) == gpus, seconds=60, what=f"{gpus} GPUs")
        return int(shown(cluster, job)["time_limit"]["number"])

    def rigid(gpus: int) -> int:
        return cluster.sbatch("exec sleep 600", f"--gres=gpu:{gpus}", *here)

    others = [rigid(2)]
    longer = limit(2)
    ran = (shown(cluster, job)["start_time"]["number"] - begun) / 60
    assert 2 * (60 - ran) - 1 <= longer <= 120
    why = "since it runs on 2 of 4 GPUs"
    until(lambda: why in " ".join(daemon.selastic("explain", str(job)).split()))
    assert "ExtendedBy=" in daemon.selastic("show", str(job))
    daemon.wait_for(rf"JobId={job} Transition=\d+ TimeLimit={60 * longer} Extended=\d+")
    try:
        cluster.exec(["scontrol", "update", "PartitionName=gpu", "MaxTime=100"])
        others.append(rigid(1))  # one GPU would mean four times as long
        assert 95 <= limit(1) <= 100
    finally:
        cluster.exec(["scontrol", "update", "PartitionName=gpu", "MaxTime=7-0"])
    cluster.exec(["scancel", *map(str, others)])
    assert 55 <= limit(4) <= 60
    cluster.exec(["scontrol", "update", f"jobid={job}", "TimeLimit=30"], user="alice")
    rigid(2)
    assert 25 <= limit(2) <= 30
    daemon.wait_for(
        rf"JobId={job} Transition=\d+ TimeLimit=1800 Was=\d+ Reason=limit-set-by-others"
    )
