"""Policy goodput on a real cluster: jobs measure GPU types on which nothing is known of them."""

import re
import time

from tests.support.container_cluster.selasticd import Daemon, eager_config, running
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until
from tests.support.container_cluster.typed_trainings import (
    explained,
    fill_up,
    measured,
    ratio,
    train,
)

SETTINGS = "[goodput]\nprofiles = 1\nprofile_s = 120\n"


def measured_types(daemon: Daemon, job: int) -> set[str]:
    """Return the types on which a job, or its application, was measured."""
    model = explained(daemon, job).get("model") or {"types": []}
    return {row["gpu_type"] for row in model["types"] if row["observed"]}


def measurements(daemon: Daemon, job: int) -> list[str]:
    """Return the lines of the log with which a job was sent to measure a type."""
    return re.findall(rf"JobId={job} Action=\w+ .*measures-type.*", daemon.log())


def test_a_type_is_measured_once_for_all_jobs_of_an_application(cluster: SlurmCluster) -> None:
    """By the configuration an a100 is twice as fast, so that nothing else leads to a v100."""
    text = eager_config(policy="goodput", extra=SETTINGS)
    with running(cluster, text, reporters=()) as daemon:
        fill_up(cluster)
        first = train(cluster, "even", "a100")
        until(lambda: measured_types(daemon, first) == {"a100", "v100"}, what=daemon.log)
        (line,) = measurements(daemon, first)
        assert "Action=move From=1 To='1 v100 on g03'" in line
        assert ratio(daemon, first) < 1.5
        second = train(cluster, "even", "v100")
        until(lambda: measured(daemon, second), what=daemon.log)
        time.sleep(6)  # three rounds
        assert not measurements(daemon, second)
        assert len(measurements(daemon, first)) == 1
        daemon.check_log()
