"""The allocation read from a batch script's environment; values from a real cluster."""

import pytest

from slurm_elastic.job.slurm_env import (
    STALE,
    AllocationError,
    SlurmAllocation,
    clean,
    expand,
    following_ports,
    master_port,
    unfold,
)

UNEVEN = {
    "SLURMD_NODENAME": "g01",
    "SLURM_CLUSTER_NAME": "elastic",
    "SLURM_GPUS": "6",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_JOB_CPUS_PER_NODE": "4,2",
    "SLURM_JOB_GPUS": "0,1,2,3",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "g[01-02]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "6",
    "SLURM_TASKS_PER_NODE": "4,2",
}


@pytest.mark.parametrize(
    ("folded", "names"),
    [
        ("g01", ["g01"]),
        ("g[01-03]", ["g01", "g02", "g03"]),
        ("g[08-11,20],h", ["g08", "g09", "g10", "g11", "g20", "h"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("a[1,3]b,c[099-100]", ["a1b", "a3b", "c099", "c100"]),
    ],
)
def test_expand(folded: str, names: list[str]) -> None:
    assert expand(folded) == names


def test_unfold() -> None:
    assert unfold("16(x3),8") == [16, 16, 16, 8]
    assert unfold("") == []


def test_an_uneven_job() -> None:
    job = SlurmAllocation(UNEVEN)
    assert (job.job_id, job.run, job.run_id) == (1, 0, "elastic-1")
    assert job.nodes == ("g01", "g02")
    assert job.cpus == (4, 2)
    assert job.gpus == (4, None), "only the batch host's GPUs are in its environment"
    assert job.here == "g01"


def test_a_restarted_job_keeps_its_run_id() -> None:
    job = SlurmAllocation({**UNEVEN, "SLURM_RESTART_COUNT": "3"})
    assert (job.run, job.run_id) == (3, "elastic-1")


def test_a_job_without_gpus() -> None:
    env = {k: v for k, v in UNEVEN.items() if "GPU" not in k}
    assert SlurmAllocation(env).gpus == (0, 0)


def test_salloc_does_not_tell_gpus() -> None:
    env = {k: v for k, v in UNEVEN.items() if "GPU" not in k and k != "SLURMD_NODENAME"}
    job = SlurmAllocation(env)
    assert job.gpus == (None, None)
    assert job.here == ""


@pytest.mark.parametrize("name", ["SLURM_JOB_NODELIST", "SLURM_JOB_ID"])
def test_a_damaged_environment_is_named(name: str) -> None:
    with pytest.raises(AllocationError, match="is invalid"):
        SlurmAllocation({k: v for k, v in UNEVEN.items() if k != name})


def test_heterogeneous_jobs_are_refused() -> None:
    with pytest.raises(AllocationError, match="heterogeneous"):
        SlurmAllocation({**UNEVEN, "SLURM_HET_SIZE": "2"})


def test_clean_takes_what_the_facts_page_found_stale() -> None:
    stale = (
        "SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_NTASKS_PER_NODE SLURM_NTASKS_PER_GPU "
        "SLURM_TRES_PER_TASK SLURM_TRES_BIND SLURM_CPUS_PER_GPU SLURM_MEM_PER_GPU "
        "SLURM_CPUS_PER_TASK SLURM_MEM_PER_NODE SLURM_NTASKS"
    )
    assert set(stale.split()) <= STALE
    env = {**dict.fromkeys(stale.split(), "1"), "SLURM_JOB_ID": "1", "PATH": "/bin"}
    assert clean(env) == {"SLURM_JOB_ID": "1", "PATH": "/bin"}


def test_ports_differ_between_neighbours_and_stay_below_the_ephemeral_ones() -> None:
    ports = [
        master_port(job, run, attempt) for job in (7, 8) for run in (0, 1) for attempt in (0, 1)
    ]
    assert len(set(ports)) == len(ports)
    for port in (master_port(2**32 - 1, 9, 9), 20000, 32699):
        following = list(following_ports(port))
        assert following[0] == port
        assert len(set(following)) == 200
        assert all(20000 <= p < 32700 for p in following)
