"""selasticd on a real cluster: other jobs, limits, constraints, changes by administrators."""

import time
from collections.abc import Iterator

import pytest

from tests.support.container_cluster.selasticd import Daemon, gpus, held, running, shown
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

pytestmark = pytest.mark.usefixtures("no_trace")

SLEEP = "exec sleep 600"


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    cluster.exec(
        """
        sacctmgr -iQ add account capped Cluster=elastic
        sacctmgr -iQ add user alice Account=capped
        sacctmgr -iQ modify account capped set GrpTRES=gres/gpu=3
        sacctmgr -iQ add qos group3 set GrpTRES=gres/gpu=3
        sacctmgr -iQ add qos cpus6 set GrpTRES=cpu=6
        sacctmgr -iQ add qos part2 set MaxTRESPerUser=gres/gpu=2
        sacctmgr -iQ modify user alice set qos+=small,group3,cpus6
        scontrol create PartitionName=narrow Nodes=g[01-06] MaxNodes=1 State=UP
        scontrol create PartitionName=capped Nodes=g[01-06] QOS=part2 State=UP
        """,
        check=False,
    )
    with running(cluster) as daemon:
        yield daemon
    cluster.exec(
        """
        scontrol delete PartitionName=narrow; scontrol delete PartitionName=capped
        sacctmgr -iQ modify user alice set qos-=group3,cpus6
        sacctmgr -iQ delete user alice Account=capped; sacctmgr -iQ delete account capped
        sacctmgr -iQ delete qos group3 cpus6 part2
        """,
        check=False,
    )


def elastic(
    cluster: SlurmCluster, *options: str, directive: str = "1-8", user: str = "alice"
) -> int:
    return cluster.sbatch(SLEEP, f"--elastic={directive}", "-o/dev/null", *options, user=user)


def rigid(cluster: SlurmCluster, *options: str, user: str = "bob", seconds: int = 300) -> int:
    return cluster.sbatch(f"exec sleep {seconds}", "-o/dev/null", *options, user=user)


def attempt(cluster: SlurmCluster, job: int | str) -> tuple[int, int]:
    found = shown(cluster, job)
    return found["start_time"]["number"], found["restart_cnt"]


def settled(cluster: SlurmCluster, sizes: dict[int, int], seconds: float = 40) -> None:
    until(
        lambda: {j: gpus(cluster, j) for j in sizes} == sizes,
        seconds=seconds,
        what=lambda: f"{sizes} {[held(cluster, j) for j in sizes]}",
    )


# --- room for waiting jobs ---


def test_an_elastic_job_gives_way_and_the_rigid_ones_are_left_in_peace(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    first = rigid(cluster, "--gres=gpu:a100:4", "-w", "g04")
    cluster.wait(first, "RUNNING")
    before = attempt(cluster, first)
    job = elastic(cluster, "--gres=gpu:a100:1", "-t10", "--nice=7", directive="1-8,types=a100")
    settled(cluster, {job: 8})
    second = rigid(cluster, "--gres=gpu:a100:4")
    assert shown(cluster, second)["job_state"] == ["PENDING"]
    cluster.wait(second, "RUNNING", timeout=20)
    until(lambda: gpus(cluster, job) == 4)
    until(lambda: shown(cluster, job)["resv_name"] == "")  # given back last
    found = shown(cluster, job)
    assert found["priority"]["number"] < 4_000_000_000
    assert found["nice"] == 7
    assert found["time_limit"]["number"] == 9
    assert attempt(cluster, first) == before
    assert attempt(cluster, second)[1] == 0


def test_what_was_freed_is_kept_for_the_job_it_was_freed_for(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    fast = elastic(cluster, "--gres=gpu:a100:1", "-w", "g01", directive="1-4,types=a100")
    slow = elastic(cluster, "--gres=gpu:a100:1", "-w", "g02", "-Jslow", directive="1-4,types=a100")
    settled(cluster, {fast: 4, slow: 4})
    third = elastic(cluster, "--gres=gpu:a100:1", "-w", "g04", directive="1-8,types=a100")
    settled(cluster, {third: 4})
    begun = len(daemon.log())
    job = rigid(cluster, "-N2", "--ntasks-per-node=1", "--gres=gpu:a100:3", "-t5")
    cluster.wait(job, "RUNNING", timeout=30)
    assert f"JobId={third} Action=grow" not in daemon.log()[begun:]
    assert held(cluster, job) == {"g01": 3, "g02": 3}


# --- limits ---


def test_growth_ends_at_every_limit(daemon: Daemon, cluster: SlurmCluster) -> None:
    """Of QOS, account, partition, and of the partition's QOS; CPUs count too."""
    begun = len(daemon.log())
    v100, a100 = {"directive": "1-8,types=v100"}, {"directive": "1-8,types=a100"}
    sizes = {
        elastic(cluster, "--qos=small", **v100): 4,
        elastic(cluster, "--account=capped", **v100): 3,
        elastic(cluster, "--partition=narrow", **a100, user="bob"): 4,
        elastic(cluster, "--gres=gpu:1", "-c2", "--qos=cpus6", **a100): 3,
        elastic(cluster, "--partition=capped", **a100, user="bob"): 2,
    }
    two = [elastic(cluster, "--qos=group3", **v100) for _ in range(2)]
    settled(cluster, sizes, 60)
    until(lambda: sum(gpus(cluster, j) for j in two) == 3, seconds=60)
    time.sleep(4)
    settled(cluster, sizes, 1)
    assert sum(gpus(cluster, j) for j in two) == 3
    assert "Problem=" not in daemon.log()[begun:]


def test_nobody_grows_into_nodes_that_backfill_has_planned(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    rigid(cluster, "--gres=gpu:a100:1", "-w", "g01", "-t2")
    big = rigid(cluster, "-N3", "--ntasks-per-node=1", "--gres=gpu:a100:4", "-t5")
    until(lambda: "PLANNED" in cluster.exec("sinfo -h -N -o %T | tr a-z A-Z").stdout)
    begun = len(daemon.log())
    job = elastic(cluster, "--gres=gpu:v100:1", "-t60")
    until(lambda: gpus(cluster, job) == 8, what=lambda: held(cluster, job))
    time.sleep(4)
    assert set(held(cluster, job)) <= {"g03", "g05", "g06"}
    assert "a100" not in "".join(
        line for line in daemon.log()[begun:].splitlines() if f"JobId={job} Action" in line
    )
    assert cluster.state(big) == "PENDING"


# --- what users asked for ---


def test_cpus_and_memory_come_along_and_reservations_are_kept(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    """A node that lacks CPUs or memory is not free; neither is somebody's reservation."""
    reserve = "scontrol create reservation ReservationName=hers Users=alice Nodes=g05"
    cluster.exec(f"{reserve} StartTime=now Duration=10")
    try:
        rigid(cluster, "-w", "g01", "-n14", "--mem=1000")
        rigid(cluster, "-w", "g04", "-n1", "--mem=15000")
        wide = elastic(
            cluster, "--gres=gpu:1", "-c4", "--mem=3500", "-wg02", directive="1-8,types=a100"
        )
        inside = elastic(cluster, "--reservation=hers")
        outside = elastic(cluster, directive="1-24,types=v100")
        settled(cluster, {wide: 4, outside: 8})
        time.sleep(4)
        found = shown(cluster, wide)
        assert (found["cpus"]["number"], found["memory_per_node"]["number"]) == (16, 14000)
        assert held(cluster, wide) == {"g02": 4}
        assert shown(cluster, inside)["resv_name"] == "hers"
        assert set(held(cluster, inside)) == {"g05"}
        assert "g05" not in held(cluster, outside)
    finally:
        cluster.cancel()
        cluster.exec("scontrol delete ReservationName=hers")


def test_nodes_reserved_before_its_end_are_not_grown_into(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    cluster.exec(
        "scontrol create reservation ReservationName=soon Users=bob Nodes=g02,g05"
        " StartTime=now+20minutes Duration=10"
    )
    try:
        long = elastic(cluster, "-wg01", "-xg04", "-t60", directive="1-8,types=a100")
        short = elastic(cluster, "-wg03", "-xg06", "-t10", directive="1-8,types=v100")
        settled(cluster, {long: 4, short: 8})
        time.sleep(4)
        settled(cluster, {long: 4, short: 8}, 1)
    finally:
        cluster.cancel()
        cluster.exec("scontrol delete ReservationName=soon")


def test_node_lists_exclusions_features_and_dependencies_are_obeyed(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    first = rigid(cluster, "--gres=gpu:1", "-wg01", seconds=2, user="alice")
    after = elastic(cluster, f"--dependency=afterok:{first}", "-wg02", directive="1-4")
    here = elastic(cluster, "-w", "g06", directive="1-4")
    there = elastic(cluster, "--exclude=g01,g02,g05", "-C", "v100", directive="1-8")
    only = elastic(cluster, "-C", "a100&rack2")
    settled(cluster, {here: 4, there: 4, only: 4, after: 4})
    assert held(cluster, here) == {"g06": 4}
    assert held(cluster, there) == {"g03": 4}
    assert held(cluster, only) == {"g04": 4}
    assert shown(cluster, after)["restart_cnt"] == 1


def test_alternative_and_grouped_features_are_obeyed(daemon: Daemon, cluster: SlurmCluster) -> None:
    one_rack = elastic(cluster, "-C", "[rack1|rack2]", "-xg03,g04", directive="1-8")
    grouped = elastic(cluster, "-C", "(rack1|rack2)&v100", "-xg05", directive="1-8")
    kept = elastic(cluster, "-C", "rack2*1", "-xg01,g02,g03,g06", directive="1-8")
    settled(cluster, {one_rack: 8, grouped: 8, kept: 1})
    assert held(cluster, one_rack) == {"g01": 4, "g02": 4}
    assert held(cluster, grouped) == {"g03": 4, "g06": 4}
    why = "with its --constraint no job gets further GPUs"
    until(lambda: why in daemon.selastic("explain", str(kept)), seconds=20, what=daemon.log)


# --- arrays, and jobs that are none of ours ---


def test_array_tasks_are_resized_one_by_one(daemon: Daemon, cluster: SlurmCluster) -> None:
    """The last task has the array's own id: what is done to it must not reach the others."""
    array = elastic(cluster, "--array=1-3", "-C", "v100", "-Jraw")
    tasks = [f"{array}_{i}" for i in (1, 2, 3)]
    until(lambda: all(gpus(cluster, t) for t in tasks))
    until(lambda: tasks[2] in daemon.selastic("status"))
    daemon.selastic("hold", tasks[0], tasks[1])
    cluster.exec(["scontrol", "update", f"jobid={tasks[2]}", "JobName=now"])
    until(lambda: gpus(cluster, tasks[2]) == 8)
    assert [shown(cluster, t)["restart_cnt"] for t in tasks] == [0, 0, 1]
    assert [gpus(cluster, t) for t in tasks] == [1, 1, 8]
    assert [shown(cluster, t)["required_nodes"] for t in tasks[:2]] == ["", ""]
