"""Settings of Slurm under which jobs cannot get companions."""

import doctest

from slurm_elastic.slurm import slurm_settings
from slurm_elastic.slurm.slurm_settings import closed_partitions, single_submits


def test_examples():
    assert doctest.testmod(slurm_settings).failed == 0


def test_partitions_that_their_own_nodes_may_submit_to_are_open():
    rows = (
        "PartitionName=a AllocNodes=ALL Nodes=g[01-06] State=UP",
        "PartitionName=b AllocNodes=login1,g[01-06] Nodes=g[01-02] State=UP",
        "PartitionName=c AllocNodes=g01 Nodes=g[01-02] State=UP",
        "PartitionName=d AllocNodes=login1 Nodes=(null)",
        "PartitionName=e AllocNodes=g[1-x] Nodes=g01",
        "no partition",
    )
    assert closed_partitions("\n".join(rows)) == ("c",)


def test_rows_that_cannot_be_read_are_left_out():
    assert single_submits("alice|research\n\nbob|teaching|10\n", "normal\nsmall|") == ()
