"""Limits of QOS and associations, from sacctmgr's lines."""

import doctest
import os

import pytest
import structlog

from slurm_elastic.core.cluster import Job, JobState
from slurm_elastic.slurm import limits as module
from slurm_elastic.slurm.limits import AccountingLimits, caps, parse_associations, parse_qos


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


def test_each_kind_of_limit_counts_its_own_jobs():
    qos = parse_qos("normal|gres/gpu=10|gres/gpu=4||cpu=64|1-02:00:00\n")
    associations = parse_associations(
        "root||||gres/gpu=100||\nscience|||root|node=5||\nvision|||science|||\n"
        "vision|alice|||gres/gpu=2||00:30:00\n"
    )
    jobs = [job(1), job(2, user="bob"), job(3, account="other")]
    limits = caps(qos, associations, jobs)
    assert {(limit.name, limit.cap, tuple(sorted(limit.jobs))) for limit in limits} == {
        ("QOS normal GrpTRES gres/gpu=10", 10, (1, 2, 3)),
        ("QOS normal MaxTRESPerUser gres/gpu=4", 4, (1, 3)),
        ("QOS normal MaxTRESPerUser gres/gpu=4", 4, (2,)),
        ("QOS normal MaxTRES cpu=64", 64, (1,)),
        ("QOS normal MaxTRES cpu=64", 64, (2,)),
        ("QOS normal MaxTRES cpu=64", 64, (3,)),
        ("QOS normal MaxWall", 93600, (1, 2, 3)),
        ("association vision/alice MaxWall", 1800, (1,)),
        ("association root GrpTRES gres/gpu=100", 100, (1, 2)),
        ("association science GrpTRES node=5", 5, (1, 2)),
        ("association vision/alice GrpTRES gres/gpu=2", 2, (1,)),
    }


def test_accounts_that_name_each_other_as_parents_do_not_hang():
    associations = parse_associations("a|||b|cpu=1||\nb|||a|cpu=2||\n")
    assert len(caps((), associations, [job(1, account="a")])) == 2


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
