"""selastic against a real slurmctld, munge and selasticd, as several users."""

import json
import time
from collections.abc import Iterator

import pytest

from tests.support.container_cluster.slurm_cluster import SlurmCluster

SLEEP = "srun --overlap sleep 300"


@pytest.fixture(scope="module", autouse=True)
def _controller(cluster: SlurmCluster) -> Iterator[None]:
    """Run selasticd during these tests, and stop it after them if it did not run before."""
    ran = cluster.exec("cluster-start selasticd-status", check=False).returncode == 0
    cluster.exec("cluster-start selasticd-start")
    _soon(lambda: cluster.exec("selastic ping", check=False).returncode == 0)
    yield
    if not ran:
        cluster.exec("cluster-start selasticd-stop")


@pytest.fixture
def job(cluster: SlurmCluster) -> int:
    """Return an elastic job of alice's that runs and is known to the controller."""
    number = cluster.sbatch(SLEEP, "--elastic=1-4", "--job-name=te\x1b[31mst", "--chdir=/tmp")
    cluster.wait(number, "RUNNING")
    _soon(lambda: _row(cluster, number).get("gpus"))
    return number


def _soon(happens, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.5)


def _row(cluster: SlurmCluster, number: int) -> dict:
    rows = json.loads(cluster.exec("selastic status --json").stdout)["jobs"]
    return next((r for r in rows if r["job_id"] == number), {})


def _as(cluster: SlurmCluster, user: str, *words: str):
    return cluster.exec(["selastic", *words], user=user, check=False)


def test_status_shows_the_job_and_every_gpu(cluster: SlurmCluster, job: int) -> None:
    answer = json.loads(_as(cluster, "bob", "status", "--json").stdout)
    (partition,) = answer["partitions"]
    parts = ("elastic", "rigid", "idle", "unavailable")
    assert partition["gpus"] == sum(partition[p] for p in parts)
    row = _row(cluster, job)
    assert (row["user"], row["wants"], row["gpus"], row["elastic"]) == ("alice", "1-4", 1, True)
    text = _as(cluster, "bob", "status").stdout
    assert "te?[31mst" in text
    assert "\x1b" not in text


def test_explain_show_plan_and_usage_know_the_job(cluster: SlurmCluster, job: int) -> None:
    assert f"{job} te?[31mst holds 1 " in _as(cluster, "bob", "explain", str(job)).stdout
    shown = _as(cluster, "bob", "show", "job", str(job)).stdout
    assert f"JobId={job} " in shown
    assert "Elastic=1-4 Submitted=1-4" in shown
    plan = json.loads(_as(cluster, "bob", "plan", "--json").stdout)
    assert job in [d["job_id"] for d in plan["changes"] + plan["stays"]]
    _soon(lambda: f"\n{job}|alice|" in _as(cluster, "bob", "usage", "-P", "--user=alice").stdout)


def test_munge_tells_owners_from_others(cluster: SlurmCluster, job: int) -> None:
    refused = _as(cluster, "bob", "hold", str(job))
    assert refused.returncode == 1
    assert refused.stderr == f"selastic: job {job}: only its owner or an operator may hold it\n"
    assert not _row(cluster, job)["held"]
    for user, verb, held in (("alice", "hold", True), ("root", "release", False)):
        assert _as(cluster, user, verb, "-n", str(job)).returncode == 0
        assert _row(cluster, job)["held"] is not held
        assert _as(cluster, user, verb, str(job)).returncode == 0
        _soon(lambda expected=held: _row(cluster, job)["held"] is expected)
    assert _as(cluster, "alice", "update", str(job), "--elastic=1-2").returncode == 0
    _soon(lambda: _row(cluster, job)["wants"] == "1-2")
    for verb in (("retire", "--yes"), ("reconfigure",)):
        assert _as(cluster, "alice", *verb).returncode == 1
    log = cluster.exec("tail -n 200 /var/log/selastic/selasticd.log").stdout
    assert f"JobId={job} Uid=2002 Refused=hold: not the owner" in log


def test_reconfigure_is_for_operators(cluster: SlurmCluster) -> None:
    done = _as(cluster, "root", "reconfigure")
    assert (done.returncode, done.stderr) == (0, "")
    assert "configuration read again" in done.stdout


def test_array_tasks_are_named_as_people_name_them(cluster: SlurmCluster) -> None:
    array = cluster.sbatch(SLEEP, "--elastic=1-2", "--array=1-2", "--chdir=/tmp")
    names = [f"{array}_1", f"{array}_2"]
    shown = ["selastic", "status", "-Ph", "-o", "jobid"]
    _soon(lambda: set(names) <= set(cluster.exec(shown).stdout.split()))
    assert _as(cluster, "bob", "explain", names[1]).stdout.startswith(f"{names[1]} ")
    assert "name one task" in _as(cluster, "bob", "explain", str(array)).stderr
    done = _as(cluster, "alice", "hold", str(array))
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2)


def test_check_finds_nothing_that_breaks_here(cluster: SlurmCluster) -> None:
    done = _as(cluster, "selastic", "check")
    assert done.returncode == 0, done.stdout
    assert "does not answer" not in done.stdout


def test_a_compute_node_can_ask_too(cluster: SlurmCluster) -> None:
    done = cluster.exec(["selastic", "status"], user="alice", node="g01")
    assert "PARTITION gpu" in done.stdout


def test_without_the_controller_there_is_one_line_and_check_still_works(
    cluster: SlurmCluster,
) -> None:
    cluster.exec("cluster-start selasticd-stop")
    try:
        done = _as(cluster, "alice", "status")
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr.startswith("selastic: no controller at ctld:7321 (connection refused): ")
        checked = _as(cluster, "alice", "check")
        assert "selasticd does not answer (no controller at ctld:7321" in checked.stdout
        assert "cannot be asked" not in checked.stdout
    finally:
        cluster.exec("cluster-start selasticd-start")
    _soon(lambda: cluster.exec("selastic ping", check=False).returncode == 0)
