"""[durations] rigid_nice on a real cluster: short rigid jobs start first; it is taken back."""

from collections.abc import Iterator

import pytest

from tests.support.container_cluster.selasticd import Daemon, eager_config, running, shown
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

pytestmark = pytest.mark.usefixtures("no_trace")

PREDICTED = "[durations]\npredict = true\nboosted = false\nrigid_nice = {}\n"
#: Run times of the past, which no test can wait for: the accounting gets them afterwards.
PAST_S = {"nice-long": 72000, "nice-short": 300}


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    past = {
        rigid(cluster, f"-J{name}", "--gres=gpu:4", "-wg01", seconds=0): seconds
        for name, seconds in PAST_S.items()
    }
    for job in past:
        cluster.wait(job, "COMPLETED")
    ids = ",".join(map(str, past))
    done = f"SELECT COUNT(*) FROM elastic_job_table WHERE id_job IN ({ids}) AND time_end > 0"
    longer = "; ".join(
        f"UPDATE elastic_job_table SET time_submit = time_submit - {s}, time_eligible ="
        f" time_eligible - {s}, time_start = time_start - {s} WHERE id_job = {job}"
        for job, s in past.items()
    )
    sql = ["mariadb", "-N", "slurm_acct_db", "-e"]
    until(lambda: int(cluster.exec([*sql, done]).stdout) >= len(past))
    cluster.exec([*sql, longer])
    with running(cluster, eager_config(extra=PREDICTED.format(1000))) as daemon:
        yield daemon


def rigid(cluster: SlurmCluster, *options: str, seconds: int = 600) -> int:
    return cluster.sbatch(f"exec sleep {seconds}", "-o/dev/null", *options, user="bob")


def nice(cluster: SlurmCluster, job: int) -> int:
    return int(shown(cluster, job)["nice"])


def test_short_rigid_jobs_start_first_where_the_site_allows_it(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    full = rigid(cluster, "--exclusive", "-w", "g01")
    cluster.wait(full, "RUNNING")
    waiting = ("--gres=gpu:4", "-wg01", "-t10")
    long = rigid(cluster, "-Jnice-long", *waiting)
    short = rigid(cluster, "-Jnice-short", *waiting)
    own = rigid(cluster, "-Jnice-long", "--nice=2000", *waiting)
    until(
        lambda: nice(cluster, long) > nice(cluster, short) > 0,
        what=lambda: f"{nice(cluster, long)} {nice(cluster, short)}\n{daemon.log()}",
    )
    assert (nice(cluster, long) <= 1000, nice(cluster, own)) == (True, 2000)
    assert f"JobId={long} Action=nice From=0" in daemon.log()
    priorities = {job: shown(cluster, job)["priority"]["number"] for job in (long, short)}
    assert priorities[long] < priorities[short]
    cluster.exec(["scancel", str(full)])
    cluster.wait(short, "RUNNING")
    assert shown(cluster, long)["job_state"] == ["PENDING"]
    daemon.configure(eager_config(extra=PREDICTED.format(0)))
    daemon.signal("HUP")
    until(lambda: nice(cluster, long) == 0)
    assert nice(cluster, own) == 2000
