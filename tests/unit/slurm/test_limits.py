"""Limits of QOS and associations, read with sacctmgr."""

import doctest
import os

import pytest
import structlog

from slurm_elastic.core.cluster import Job, JobState
from slurm_elastic.slurm import limits as module
from slurm_elastic.slurm.limits import AccountingLimits


def job(job_id, user="alice", account="vision", qos="normal"):
    return Job(
        job_id=job_id,
        display_id=str(job_id),
        name="",
        user=user,
        uid=1,
        state=JobState.RUNNING,
        partition="gpu",
        account=account,
        qos=qos,
    )


def test_examples_in_the_docs():
    assert doctest.testmod(module).failed == 0


@pytest.fixture
def sacctmgr(tmp_path, monkeypatch):
    """Set what sacctmgr does, in the language of the shell."""

    def install(script):
        command = tmp_path / "sacctmgr"
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


def test_without_slurmdbd_one_line_says_so_and_the_known_limits_stay(sacctmgr):
    limits = AccountingLimits(refresh_s=-1.0)
    sacctmgr('[ "$3" = assoc ] || echo "normal|gres/gpu=4||||"')
    jobs = [job(1)]
    known = limits.limits(jobs)
    assert len(known) == 1
    with structlog.testing.capture_logs() as log:
        sacctmgr("echo accounting storage is disabled >&2; exit 1")
        assert limits.limits(jobs) == limits.limits(jobs) == known
        assert [line["event"] for line in log] == [
            "sacctmgr -nP show: accounting storage is disabled; the last known limits stay in force"
        ]
