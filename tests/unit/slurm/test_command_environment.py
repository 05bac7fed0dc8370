"""A user's environment does not send Slurm's commands to another cluster, nor shortens lists."""

import pytest

from slurm_elastic.core.cluster import Job, JobState
from slurm_elastic.slurm import slurm_settings, switches
from slurm_elastic.slurm.scontrol import Scontrol
from slurm_elastic.slurm.slurm_command import output


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """Return the variables of Slurm that commands have had."""
    for name in ("scontrol", "squeue", "sacct"):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\nenv | grep '^S' >>{tmp_path}/seen\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("SLURM_CLUSTERS", "SQUEUE_STATES", "SACCT_FEDERATION", "SCONTROL_ALL"):
        monkeypatch.setenv(name, "other")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    return lambda: {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}


def test_reads_and_writes(seen):
    job = Job(
        job_id=7, display_id="7", name="j", user="alice", uid=2001, state=JobState.PENDING,
        partition="gpu", priority=1, submit_time=0.0,
    )  # fmt: skip
    for call in (
        lambda: output("squeue"),
        lambda: output("sacct"),
        lambda: Scontrol().release(job),
        switches.read_topologies,
        slurm_settings.gather,
    ):
        call()
        assert {name for name in seen() if name.endswith(("CLUSTERS", "STATES"))} == set()
    assert not {"SACCT_FEDERATION", "SCONTROL_ALL"} & seen()
    assert {"SLURM_CONF", "SQUEUE_LOCAL", "SACCT_LOCAL"} <= seen()
