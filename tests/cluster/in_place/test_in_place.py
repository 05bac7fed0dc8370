"""Changes in place on a real Slurm, from the controller's side: its writes, limits, and deaths.

Jobs sleep, and a stand-in says for them what esrun would; test_companions.py has the real one.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.container_cluster.selasticd import (
    Daemon,
    companions,
    eager_config,
    gpus,
    running,
    shown,
)
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

DRIVER = Path(__file__).parents[1] / "drivers" / "companion_reporter.py"
PYTHON = "/opt/slurm-elastic/bin/python"
CONFIG = eager_config().replace("[resize]", "[resize]\nmin_gain = 0.01")
#: Node with the GPUs of a test: rack 2's a100.
PLACE = "-Ca100&rack2"
#: Three GPUs that join are one companion: the loss of a part of them would leave three.
SIZES = "1-4,sizes=1:2:4"


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    cluster.exec(
        "sacctmgr -iQ add qos onejob set MaxJobsPerUser=1;"
        "sacctmgr -iQ add qos twogpus set MaxTRESPerUser=gres/gpu=2;"
        "sacctmgr -iQ add qos lowered set MaxTRESPerUser=gres/gpu=4;"
        "sacctmgr -iQ modify user alice set qos+=onejob,twogpus,lowered;"
        "sacctmgr -iQ add account narrow; sacctmgr -iQ add user alice account=narrow",
        check=False,
    )
    with running(cluster, CONFIG, reporters=()) as daemon:
        cluster.exec(
            "mkdir -p /tmp/drivers; cat >/tmp/drivers/companion_reporter.py",
            stdin=DRIVER.read_text(),
        )
        command = f"{PYTHON} /tmp/drivers/companion_reporter.py ctld:7321"
        started = cluster.exec(
            f"{command} </dev/null >/tmp/companions-alice 2>&1 & echo $!", user="alice"
        )
        yield daemon
        cluster.exec(f"kill {started.stdout.strip()}", user="alice", check=False)
        print(cluster.exec("cat /tmp/companions-alice").stdout)
    cluster.exec(
        "sacctmgr -iQ modify user alice set qos-=onejob,twogpus,lowered;"
        "sacctmgr -iQ delete qos onejob twogpus lowered;"
        "sacctmgr -iQ delete user alice account=narrow; sacctmgr -iQ delete account narrow",
        check=False,
    )


@pytest.fixture(autouse=True)
def nothing_is_left(daemon: Daemon, cluster: SlurmCluster) -> Iterator[None]:
    begun = len(daemon.log())
    yield
    gone = "! squeue -h -u alice,bob | grep -q ."
    cluster.exec("scancel -u alice; scancel -u bob")
    cluster.exec(f"for _ in $(seq 300); do {gone} && break; sleep 0.2; done")
    daemon.check_log(after=begun)


def submit(cluster: SlurmCluster, name: str = "place", *options: str, sizes: str = SIZES) -> int:
    """Submit a job that sleeps on one GPU and may have more; return its id once it runs."""
    job = cluster.sbatch(
        "exec sleep 1200", f"--elastic={sizes}", "-o/dev/null", f"--job-name={name}", "--time=60",
        PLACE, *options,
    )  # fmt: skip
    cluster.wait(job, "RUNNING")
    return job


def grown(daemon: Daemon, cluster: SlurmCluster, job: int) -> int:
    """Wait until a job has grown in place to four GPUs; return its companion."""
    daemon.wait_for(rf"JobId={job} Transition=\d+ State=DONE Action=grow", timeout=90)
    (companion,) = companions(cluster, job)
    assert gpus(cluster, job) == 1
    assert gpus(cluster, companion) == 3
    return companion


def run_count(cluster: SlurmCluster, job: int) -> int:
    return shown(cluster, job)["restart_cnt"]


def test_a_job_grows_and_shrinks_for_another_one(daemon: Daemon, cluster: SlurmCluster) -> None:
    job = submit(cluster, "place", "--wckey=paper")
    companion = grown(daemon, cluster, job)
    record = shown(cluster, companion)
    assert (record["resv_name"], record["wckey"]) == ("", "paper")
    assert record["priority"]["number"] < 4_000_000_000
    assert f'"base":{job},' in record["admin_comment"]
    assert 50 <= record["time_limit"]["number"] <= 60

    def rows() -> list[list[str]]:
        text = daemon.selastic("status", "--noheader", "--format=JOBID,GPUS")
        return [line.split() for line in text.splitlines()]

    until(lambda: [str(job), "4"] in rows(), what=rows)
    assert str(companion) not in [row[0] for row in rows()]
    assert "in-place" in daemon.selastic("history", "--format=JOBID,ACTION,KIND,PAUSE")
    begun = time.monotonic()
    rigid = cluster.sbatch("exec sleep 60", "-o/dev/null", PLACE, "--gres=gpu:a100:2", user="bob")
    cluster.wait(rigid, "RUNNING")
    print(f"rigid job runs {time.monotonic() - begun:.1f} s after its submission")
    until(lambda: gpus(cluster, job) == 1 and companion not in companions(cluster, job))
    assert run_count(cluster, job) == 0
    cluster.exec(["scancel", str(rigid)])
    daemon.wait_for(rf"JobId={job} Transition=\d+ State=DONE Action=shrink")


def test_a_job_grows_into_gpus_that_another_one_leaves(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    """Its companion waits at the head of the queue, in a reservation, before the other leaves."""
    giver = submit(cluster, sizes="1-3,sizes=1:3")
    daemon.wait_for(rf"JobId={giver} Transition=\d+ State=DONE Action=grow", timeout=90)
    taker = submit(cluster, sizes="1-3,sizes=1:3")

    def can_change() -> bool:
        text = daemon.selastic("show", str(taker), "--json", check=False)
        job = json.loads(text) if text.startswith("{") else {}  # not read yet
        if not job.get("reporting") or job["not_in_place"] is not None:
            return False
        # One that has just begun is not changed before [resize] min_interval_s is over.
        return bool(job["decision"]) and job["decision"]["waiting_for"] is None

    until(can_change, what=daemon.log)
    begun = len(daemon.log())
    daemon.selastic("update", str(giver), "--elastic=1-1")
    daemon.wait_for(rf"JobId={taker} Transition=\d+ State=DONE Action=grow", after=begun)
    log = daemon.log()[begun:]
    assert 0 <= log.find("State=START Action=grow") < log.find("State=LEAVE Action=shrink"), log
    assert run_count(cluster, giver) == run_count(cluster, taker) == 0
    assert len(companions(cluster, taker)) == 1
    assert not companions(cluster, giver)


def test_a_limit_on_jobs_leads_to_a_requeue(daemon: Daemon, cluster: SlurmCluster) -> None:
    job = submit(cluster, "place", "--qos=onejob")
    daemon.wait_for(
        rf"JobId={job} Transition=\d+ State=UNDONE Action=grow .*QOSMaxJobsPerUserLimit"
    )
    until(lambda: gpus(cluster, job) == 4, seconds=120)
    assert run_count(cluster, job) == 1
    assert not companions(cluster, job)
    assert "QOSMaxJobsPerUserLimit" in daemon.selastic("history")


def test_a_limit_on_gpus_is_kept(daemon: Daemon, cluster: SlurmCluster) -> None:
    job = submit(cluster, "place", "--qos=twogpus")
    daemon.wait_for(rf"JobId={job} Transition=\d+ State=DONE Action=grow", timeout=90)
    (companion,) = companions(cluster, job)
    assert gpus(cluster, job) + gpus(cluster, companion) == 2
    assert run_count(cluster, job) == 0


def test_a_limit_on_gpus_that_is_not_known_yet(daemon: Daemon, cluster: SlurmCluster) -> None:
    """The companion waits for the limit: it is cancelled, and the job is not stopped for good."""
    job = submit(cluster, "place", "--qos=lowered")
    lower = "sacctmgr -iQ modify qos lowered set MaxTRESPerUser=gres/gpu=2"
    daemon.when(job, "ASK", lower, action="grow")
    daemon.wait_for(rf"JobId={job} Transition=\d+ State=UNDONE Action=grow .*QOSMaxGRESPerUser")
    assert "QOSMaxGRESPerUser" in daemon.selastic("history")
    # The limit is read again within a minute; until then the change may be tried by a requeue.
    until(lambda: gpus(cluster, job) == 2, seconds=120, what=daemon.log)
    assert not companions(cluster, job)


def test_a_limit_of_the_association_that_is_not_known_yet(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    # The controller may keep a limit for a minute after its end: no other test has this account.
    job = submit(cluster, "place", "--account=narrow")
    lower = "sacctmgr -iQ modify user where name=alice account=narrow set GrpTRES=gres/gpu=2"
    daemon.when(job, "ASK", lower, action="grow")
    daemon.wait_for(rf"JobId={job} Transition=\d+ State=UNDONE Action=grow .*AssocGrpG[RE]+S")
    assert "AssocGrpG" in daemon.selastic("history")
    # Until the limit is read again the change may be tried by a requeue.
    until(lambda: shown(cluster, job)["job_state"] == ["RUNNING"], seconds=120, what=daemon.log)
    assert not companions(cluster, job)


def test_tasks_of_an_array_have_companions_of_their_own(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    array = cluster.sbatch(
        "exec sleep 1200", "--elastic=1-2", "--array=1-2", "-o/dev/null", "--job-name=place",
        "--time=60", PLACE,
    )  # fmt: skip

    def tasks() -> dict[str, int]:
        rows = cluster.exec(f"squeue -h -j {array} -t R -o '%K %A'").stdout.splitlines()
        return {number: int(raw) for number, raw in (row.split() for row in rows)}

    until(lambda: tasks().keys() == {"1", "2"})
    raw_ids = tasks()
    for task, raw in raw_ids.items():
        daemon.wait_for(rf"JobId={array}_{task} Transition=\d+ State=DONE Action=grow", timeout=90)
        assert len(companions(cluster, raw)) == 1
        assert shown(cluster, f"{array}_{task}")["restart_cnt"] == 0
    cluster.exec(["scancel", f"{array}_1"], user="alice")
    until(lambda: not companions(cluster, raw_ids["1"]), seconds=60, what=daemon.log)
    assert shown(cluster, f"{array}_2")["job_state"] == ["RUNNING"]
    assert len(companions(cluster, raw_ids["2"])) == 1


def test_a_hold_of_a_running_job_and_its_companion_keeps_both(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    job = submit(cluster)
    companion = grown(daemon, cluster, job)
    cluster.exec(f"scontrol hold {job}; scontrol hold {companion}", user="alice")
    for _ in range(3):
        daemon.wait_for("Round ", after=len(daemon.log()))
    assert companions(cluster, job) == [companion]
    begun = len(daemon.log())
    cluster.exec(["scontrol", "release", str(job)], user="alice")
    daemon.wait_for("Round ", after=begun)
    daemon.selastic("update", str(job), "--elastic=1-1")
    daemon.wait_for(rf"JobId={job} Transition=\d+ State=DONE Action=shrink", after=begun)
    assert (gpus(cluster, job), run_count(cluster, job)) == (1, 0)
    assert not companions(cluster, job)


def test_a_training_that_cannot_is_requeued(daemon: Daemon, cluster: SlurmCluster) -> None:
    job = submit(cluster, "plain")
    until(lambda: gpus(cluster, job) == 4, seconds=120)
    assert run_count(cluster, job) == 1


def test_companions_of_a_base_that_ends_are_cancelled(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    job = submit(cluster, "stays")
    grown(daemon, cluster, job)
    cluster.exec(["scancel", str(job)], user="alice")
    until(lambda: not companions(cluster, job), seconds=60, what="a companion outlives its base")


def test_an_imitation_gains_nothing(daemon: Daemon, cluster: SlurmCluster) -> None:
    job = submit(cluster, sizes="1-1")
    forged = cluster.sbatch(
        "exec sleep 60", "-H", "-o/dev/null", "--gres=gpu:a100:4", PLACE,
        f"--comment=selastic:companion:{job}:0:1",
    )  # fmt: skip
    record = shown(cluster, forged)
    assert '"companion"' in record["admin_comment"], "job_submit.lua records it"
    for _ in range(3):
        after = len(daemon.log())
        daemon.wait_for("Round ", after=after)
        record = shown(cluster, forged)
        assert record["priority"]["number"] == 0
        assert record["required_nodes"] == ""


@pytest.mark.parametrize("state", ["PIN", "START"])  # ASK, JOIN: test_in_place_training.py
def test_selasticd_is_killed_while_a_job_grows(
    daemon: Daemon, cluster: SlurmCluster, state: str
) -> None:
    job = submit(cluster, sizes="1-1")
    # selasticd may not know the job yet.
    wider = f"until selastic update {job} --elastic={SIZES}; do sleep 0.2; done"
    daemon.when(job, state, daemon.kill_command, action="grow", first=wider)
    daemon.start()
    companion = grown(daemon, cluster, job)
    assert run_count(cluster, job) == 0
    time.sleep(3)
    assert companions(cluster, job) == [companion]


@pytest.mark.parametrize("state", ["LEAVE", "FREE"])
def test_selasticd_is_killed_while_a_job_shrinks(
    daemon: Daemon, cluster: SlurmCluster, state: str
) -> None:
    job = submit(cluster)
    companion = grown(daemon, cluster, job)
    rigid = "sbatch -o/dev/null -C'a100&rack2' --gres=gpu:a100:2 --wrap 'exec sleep 120'"
    daemon.when(job, state, daemon.kill_command, action="shrink", first=f'su bob -c "{rigid}"')
    daemon.start()
    until(lambda: "bob" in cluster.exec("squeue -h -t R -o %u").stdout, seconds=60)
    assert run_count(cluster, job) == 0
    # It may have grown again, onto the GPU that the other job leaves free.
    assert companion not in companions(cluster, job)
