"""GPUs of each node from `scontrol show job --details`."""

import doctest

import pytest

from slurm_elastic.job.environment import held_gpus as module
from slurm_elastic.job.environment.held_gpus import held_gpus

#: In the form of Slurm 24.11.5, for three GPUs on two nodes.
UNEVEN = """JobId=14 JobName=light
   JOB_GRES=gpu:v100:3
     Nodes=g03 CPU_IDs=0-1 Mem=0 GRES=gpu:v100:2(IDX:0-1)
     Nodes=g06 CPU_IDs=0-1 Mem=0 GRES=gpu:v100:1(IDX:2)
   MinCPUsNode=2 MinMemoryNode=0 MinTmpDiskNode=0
"""


@pytest.mark.parametrize(
    ("details", "gpus"),
    [
        (UNEVEN, (2, 1)),
        ("     Nodes=g[03,06] CPU_IDs=0-1 Mem=0 GRES=gpu:2(IDX:0-1)", (2, 2)),
        ("  Nodes=g[03,06] CPU_IDs=0 Mem=0 GRES=gpu:a:1(IDX:0),shard:8,gpu:b:2(IDX:1-2)", (3, 3)),
        ("     Nodes=g[03,06] CPU_IDs=0-1 Mem=0 GRES=", (0, 0)),
        (UNEVEN.replace("g06", "g05"), None),
        ("", None),
    ],
)  # fmt: skip
def test_the_gpus_of_each_node(details: str, gpus: tuple[int, ...] | None) -> None:
    assert held_gpus(details, ["g03", "g06"]) == gpus


def test_examples() -> None:
    assert doctest.testmod(module).failed == 0
