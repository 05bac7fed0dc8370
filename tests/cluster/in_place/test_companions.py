"""Companions on the real cluster; the test takes the controller's part.

The program regroups without torch (`drivers/regrouping.py`).
"""

import json
import time
from collections.abc import Iterator

import pytest

from tests.support.container_cluster import forgotten_seconds
from tests.support.container_cluster.esrun_stand_in import StandIn, running_stand_in
from tests.support.container_cluster.growing_job import DIRECTORY, GrowingJob
from tests.support.container_cluster.slow_links import cut
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until


@pytest.fixture
def controller(cluster: SlurmCluster) -> Iterator[StandIn]:
    cluster.exec(f"install -d -o alice -g alice {DIRECTORY}")
    with running_stand_in(cluster, DIRECTORY) as stand_in:
        yield stand_in
    cluster.exec(f"rm -rf {DIRECTORY}")


def test_a_job_grows_over_nodes_and_shrinks(cluster: SlurmCluster, controller: StandIn) -> None:
    job = GrowingJob(controller, "--gres=gpu:2", "--cpus-per-task=4", "--mem-per-cpu=100")
    first, second = job.submit(2, 1)
    fields = job.fields(first)
    assert fields["JobName"] == f"{job.fields(job.job)['JobName']}+1"
    assert (fields["Reason"], fields["Requeue"]) == ("JobHeldUser", "0")
    assert fields["Comment"] == f"selastic:companion:{job.job}:0:1"
    assert (fields["NumTasks"], fields["CPUs/Task"], fields["MinMemoryCPU"]) == ("2", "2", "100M")
    assert fields["UserId"].startswith("alice(")
    assert fields["TimeLimit"] in ("00:30:00", "00:29:00")
    record = {"companion": {"base": job.job, "change": 1, "run": 0}, "v": 1}
    assert json.loads(fields["AdminComment"]) == record, "users cannot write it"
    job.release(first, "g02")
    job.release(second, "g01")
    report = job.report(change=1, change_state="done")
    assert sorted(report["companions"]) == [[first, 2, "joined"], [second, 1, "joined"]]
    assert (report["gpus"], report["nodes"], report["pause_s"]) == (5, 2, 0.01)
    by_companion = {words[6]: words for words in job.newcomers() if words[3] == "0"}
    assert by_companion[str(first)][0] == "g02"
    assert by_companion[str(first)][4] == "0,1"
    assert by_companion[str(second)][0] == "g01"
    assert by_companion[str(second)][4] == "2", "the base holds 0 and 1"
    assert {words[5] for words in job.newcomers()} == {"g01"}
    assert sorted(int(words[1]) for words in job.newcomers()) == [2, 3, 4]
    job.order(leave=(first,))
    report = job.report(change=2, change_state="done")
    assert (report["gpus"], report["nodes"]) == (3, 1)
    assert cluster.wait(first, "COMPLETED") == "COMPLETED"
    cluster.exec(f"touch {job.home}/finish", user="alice")
    assert cluster.wait(job.job, "COMPLETED") == "COMPLETED"
    assert cluster.wait(second, "COMPLETED") == "COMPLETED"
    until(lambda: not job.left_behind(), what=job.left_behind)
    assert cluster.exec(f"sacct -n -X -j {first} -o AllocTRES%80").stdout.count("gres/gpu=2") == 1


@pytest.mark.parametrize("name", ["other", "{}+1"], ids=["another name", "a companion's name"])
def test_a_job_that_gets_the_id_of_a_forgotten_companion_is_let_alone(
    cluster: SlurmCluster, controller: StandIn, name: str
) -> None:
    """slurmctld is killed before it has saved a companion, and gives its id to another job."""
    job = GrowingJob(controller)
    time.sleep(6)  # slurmctld forgets what is younger
    cluster.exec(forgotten_seconds.KEEP)
    (companion,) = job.submit(2)
    cluster.exec(forgotten_seconds.FORGET)
    until(lambda: cluster.state(job.job) == "RUNNING")
    other_name = name.format(job.fields(job.job)["JobName"])
    other = cluster.sbatch("sleep 600", f"--job-name={other_name}", "--nodelist=g02")
    assert other == companion
    members = {"change": 1, "join": [2], "leave": [], "deadline_s": 120.0, "gpu_type": ""}
    controller.order(job.job, "run", members={**members, "cancel": True})
    job.report(change=1, change_state="failed")
    assert cluster.wait(other, "RUNNING") == "RUNNING"
    cluster.exec(f"touch {job.home}/finish", user="alice")
    cluster.wait(job.job, "COMPLETED")
    time.sleep(2)
    assert cluster.state(other) == "RUNNING"


FORMS = {
    "per-task": ("-n1 --gpus-per-task=1 -c2 --mem=800", ""),
    "total": ("--gpus=1 --mem-per-gpu=300", ""),
    "tasks-per-gpu": ("--gpus=1 --ntasks-per-gpu=1", "export SBATCH_GPUS=3"),
    "by-gpu": ("--gpus=1 --cpus-per-gpu=2 --exclusive=user", "export SBATCH_GRES=gpu:4"),
}


def test_a_base_of_any_form_gets_the_same_companions(
    cluster: SlurmCluster, controller: StandIn
) -> None:
    jobs = [
        GrowingJob(controller, *form.split(), profile=profile) for form, profile in FORMS.values()
    ]
    for number, job in enumerate(jobs):
        job_id = job.grow(2, f"g0{3 + number}")
        until(lambda job=job: len(job.newcomers()) == 2)  # type: ignore[misc]
        assert {words[4] for words in job.newcomers()} == {"0,1"}
        assert "gres/gpu=2" in job.fields(job_id)["AllocTRES"]
    cluster.exec(f"scancel {' '.join(str(job.job) for job in jobs)}")
    for job in jobs:
        until(lambda job=job: not job.left_behind(), what=job.left_behind)  # type: ignore[misc]


def test_the_end_of_the_base_ends_its_companions(
    cluster: SlurmCluster, controller: StandIn
) -> None:
    job = GrowingJob(controller, words="stubborn")
    joined = job.grow(1, "g02")
    (held,) = job.submit(1)
    cluster.exec(f"scancel {job.job}")
    cluster.wait(joined, "COMPLETED", "FAILED", timeout=20)
    cluster.wait(held, "CANCELLED", timeout=20)
    until(lambda: not job.left_behind(), what=job.left_behind)


def test_companions_end_when_esrun_is_killed(cluster: SlurmCluster, controller: StandIn) -> None:
    job = GrowingJob(controller, words="stubborn")
    joined = job.grow(2, "g02")
    cluster.exec("pkill -KILL -f bin/esrun", node="g01")
    cluster.wait(job.job, "FAILED", timeout=40)
    cluster.wait(joined, "FAILED", timeout=20)
    until(lambda: not job.left_behind(), what=job.left_behind)


def test_a_job_survives_its_companions(cluster: SlurmCluster, controller: StandIn) -> None:
    """Cancelled; ranks killed; script killed; script stopped."""
    job = GrowingJob(controller)
    cancelled = job.grow(1, "g02")
    cluster.exec(f"scancel {cancelled}", user="alice")
    cluster.wait(cancelled, "CANCELLED", timeout=20)
    killed = job.grow(1, "g03")
    cluster.exec(f"scancel -s KILL {killed}.0", user="alice")
    cluster.wait(killed, "COMPLETED", timeout=20)
    scriptless = job.grow(1, "g04")
    cluster.exec("pkill -KILL -f companion_script", node="g04")
    cluster.wait(scriptless, "FAILED", "CANCELLED", timeout=40)
    stopped = job.grow(1, "g05")
    cluster.exec("pkill -STOP -f companion_script", node="g05")
    cluster.wait(stopped, "CANCELLED", timeout=60)
    job.report(companions=[[stopped, 1, "ended"]], gpus=1)
    assert job.grow(1, "g06")
    assert cluster.state(job.job) == "RUNNING"
    cluster.exec(f"touch {job.home}/finish", user="alice")
    cluster.wait(job.job, "COMPLETED")
    until(lambda: not job.left_behind(), what=job.left_behind)
    log = job.log()
    assert "internal error" not in log
    lines = [
        f"companion {cancelled} leaves: Slurm ended a companion",
        f"companion {stopped} leaves: The script of a companion lost its connection",
    ]
    for line in lines:
        assert line in log, log


def test_a_companion_whose_network_is_cut(cluster: SlurmCluster, controller: StandIn) -> None:
    job = GrowingJob(controller, words="stubborn")
    companion = job.grow(2, "g06")
    with cut(cluster, "g06"):
        job.report(companions=[[companion, 2, "ended"]], gpus=1)
        ranks = f"pgrep -f '{job.home[:-1]}[{job.home[-1]}]/program.py' || true"
        until(lambda: not cluster.exec(ranks, node="g06").stdout, what="ranks are left on g06")
    cluster.wait(companion, "FAILED", "CANCELLED", "NODE_FAIL", timeout=60)
    assert cluster.state(job.job) == "RUNNING"
    cluster.exec(f"touch {job.home}/finish", user="alice")
    cluster.wait(job.job, "COMPLETED")
    until(lambda: not job.left_behind(), what=job.left_behind)
    cluster.wait_until_idle("g06")


def test_ranks_that_do_not_leave_are_ended(cluster: SlurmCluster, controller: StandIn) -> None:
    job = GrowingJob(controller, words="stubborn")
    companion = job.grow(2, "g02")
    job.order(leave=(companion,), deadline_s=2.0)
    job.report(change=2, change_state="done")
    assert cluster.wait(companion, "COMPLETED", timeout=20) == "COMPLETED"


def test_newcomers_that_are_late_are_given_up(cluster: SlurmCluster, controller: StandIn) -> None:
    job = GrowingJob(controller, words="late")
    (held, started) = job.submit(1, 1, deadline_s=8.0)
    job.release(started, "g02")
    report = job.report(change=1, change_state="failed")
    assert report["change_reason"]["code"] == "companion-late"
    cluster.wait(held, "CANCELLED")
    cluster.wait(started, "COMPLETED")
    assert report["gpus"] == 1


def test_a_limit_of_submitted_jobs(cluster: SlurmCluster, controller: StandIn) -> None:
    job = GrowingJob(controller)
    modify = "sacctmgr -i modify user alice set MaxSubmitJobs="
    cluster.exec(f"{modify}2")
    try:
        job.order(1, 1)
        report = job.report(change=1, change_state="failed")
        names = cluster.exec("squeue -h -u alice -o '%A %T'").stdout.split("\n")
    finally:
        cluster.exec(f"{modify}-1")
    assert "AssocMaxSubmitJobLimit" in report["change_reason"]["parameters"]["error"]
    assert [name for name in names if "PENDING" in name] == [], "the first one was cancelled"
    assert job.grow(1, "g02")
