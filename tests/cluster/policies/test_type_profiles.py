"""Policy goodput on a real cluster: jobs measure GPU types on which nothing is known of them."""

import re

from tests.support.container_cluster.selasticd import Daemon, eager_config, running
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until
from tests.support.container_cluster.typed_trainings import explained, fill_up, kind, train

SETTINGS = "[goodput]\nprofiles = 1\nprofile_s = 120\n"


def measured_types(daemon: Daemon, job: int) -> set[str]:
    """Return the types on which a job, or its application, was measured."""
    model = explained(daemon, job).get("model") or {"types": []}
    return {row["gpu_type"] for row in model["types"] if row["observed"]}


def measurements(daemon: Daemon, job: int) -> list[str]:
    """Return the lines of the log with which a job was sent to measure a type."""
    return re.findall(rf"JobId={job} Action=.*Reason=measures-type.*", daemon.log())


def test_each_job_measures_the_other_type_once(cluster: SlurmCluster) -> None:
    text = eager_config(policy="goodput", extra=SETTINGS)
    with running(cluster, text, reporters=()) as daemon:
        fill_up(cluster)
        typed = train(cluster, "typed", "v100")
        until(lambda: measured_types(daemon, typed) == {"a100", "v100"}, what=daemon.log)
        assert len(measurements(daemon, typed)) == 1
        # It stays where it is faster.
        until(lambda: kind(cluster, typed) == "a100", what=daemon.log)
        even = train(cluster, "even", "v100")
        until(lambda: measured_types(daemon, even) == {"v100"}, what=daemon.log)
        daemon.check_log()
