"""A short fault campaign (tests/chaos): one seed, the faults of a minute."""

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.schedule import schedule
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

#: What Slurm itself mends within seconds; the rest takes minutes: make chaos.
KINDS = ("selasticd-kill", "munged-kill", "slurmdbd-kill", "reports-slow", "user-hold", "drain",
         "ledger-deleted", "clock-step", "user-update")  # fmt: skip


@pytest.fixture
def quiet(cluster: SlurmCluster) -> SlurmCluster:
    """Yield a cluster on which nothing else runs."""
    until(lambda: not cluster.exec("squeue -h").stdout.strip(), what="other jobs run here")
    return cluster


def test_a_minute_of_faults_breaks_nothing(quiet: SlurmCluster) -> None:
    said: list[str] = []
    record = Campaign(quiet, schedule(8, 1.0, only=KINDS), said.append).run()
    assert record["breaches"] == [], "\n".join(said)
    assert record["troubles"] == []
    assert len(record["faults"]) >= 3
    assert record["transitions"]["DONE"] >= 1
    assert record["trainings"] >= 1
    assert record["scripts"]["answers"] >= 1
