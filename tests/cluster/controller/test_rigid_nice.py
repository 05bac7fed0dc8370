"""[durations] rigid_nice on a real cluster: short rigid jobs start first; it is taken back."""

import pytest

from tests.support.container_cluster.selasticd import eager_config, running, shown
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

pytestmark = pytest.mark.usefixtures("no_trace")

PREDICTED = "[durations]\npredict = true\nboosted = false\nrigid_nice = {}\n"
#: Run times of the past, which no test can wait for: the accounting gets them afterwards.
PAST_S = {"nice-long": 72000, "nice-short": 300}


def rigid(cluster: SlurmCluster, *options: str, seconds: int = 600) -> int:
    return cluster.sbatch(f"exec sleep {seconds}", "-o/dev/null", *options, user="bob")


def nice(cluster: SlurmCluster, job: int) -> int:
    return int(shown(cluster, job)["nice"])


def test_short_rigid_jobs_start_first_where_the_site_allows_it(cluster: SlurmCluster) -> None:
    past = [rigid(cluster, f"-J{name}", "--gres=gpu:4", "-wg01", seconds=0) for name in PAST_S]
    for job in past:
        cluster.wait(job, "COMPLETED")
    longer = "; ".join(
        f"UPDATE elastic_job_table SET time_submit = time_submit - {s}, time_eligible ="
        f" time_eligible - {s}, time_start = time_start - {s} WHERE job_name = '{name}'"
        for name, s in PAST_S.items()
    )
    done = "SELECT COUNT(*) FROM elastic_job_table WHERE job_name LIKE 'nice-%' AND time_end > 0"
    sql = ["mariadb", "-N", "slurm_acct_db", "-e"]
    until(lambda: int(cluster.exec([*sql, done]).stdout) >= len(past))
    cluster.exec([*sql, longer])

    nodes = [f"g{n:02}" for n in range(1, 7)]
    full = [rigid(cluster, "--exclusive", "-w", node) for node in nodes]
    for job in full:
        cluster.wait(job, "RUNNING")
    waiting = ("--gres=gpu:4", "-wg01", "-t10")
    long = rigid(cluster, "-Jnice-long", *waiting)
    short = rigid(cluster, "-Jnice-short", *waiting)
    own = rigid(cluster, "-Jnice-long", "--nice=7", *waiting)
    with running(cluster, eager_config(extra=PREDICTED.format(1000))) as daemon:
        until(lambda: nice(cluster, long) > nice(cluster, short) > 0, seconds=90)
        assert (nice(cluster, long) <= 1000, nice(cluster, own)) == (True, 7)
        assert f"JobId={long} Action=nice From=0" in daemon.log()
        priorities = {job: shown(cluster, job)["priority"]["number"] for job in (long, short)}
        assert priorities[long] < priorities[short]
        cluster.exec(["scancel", str(full[0])])
        cluster.wait(short, "RUNNING")
        assert shown(cluster, long)["job_state"] == ["PENDING"]
        daemon.configure(eager_config(extra=PREDICTED.format(0)))
        daemon.signal("HUP")
        until(lambda: nice(cluster, long) == 0)
        assert nice(cluster, own) == 7
