"""Limits of QOS and associations, from sacctmgr's lines."""

import dataclasses
import doctest
import os
import time

import pytest
import structlog

from slurm_elastic.core.cluster import GPUS_OF_A_NODE, Allocation, Job, JobState
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.submission import Submission
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


def test_limits_of_a_node_and_in_minutes_become_caps_on_gpus():
    qos = parse_qos("normal||||||gres/gpu=2|gres/gpu=60|gres/gpu=240\n")
    associations = parse_associations("vision||||||||gres/gpu=30|\n")
    directive = Submission(Directive.parse("1-8"), {})
    held = Allocation.of("a100", {"n1": 2})
    own = dataclasses.replace(
        job(1), submission=directive, time_limit_s=1800, start_time=time.time() - 5, gpus=2
    )
    jobs = [
        dataclasses.replace(own, allocation=held),
        # A rigid job: 3 GPUs for 40 minutes more leave 120 of 240.
        dataclasses.replace(job(2), gpus=3, time_limit_s=2400, start_time=time.time() - 5),
        dataclasses.replace(job(3), submission=directive),  # no time limit: no cap
    ]
    limits = caps(qos, associations, jobs)
    assert {(m.name, m.resource, m.cap, tuple(sorted(m.jobs))) for m in limits} == {
        ("QOS normal MaxTRESPerNode gres/gpu=2", GPUS_OF_A_NODE, 2, (1, 3)),
        ("QOS normal MaxTRESMins gres/gpu=60", "gpu", 2, (1,)),
        ("QOS normal GrpTRESRunMins gres/gpu=240", "gpu", 4, (1,)),
        ("association vision MaxTRESMins gres/gpu=30", "gpu", 2, (1,)),  # what it holds it keeps
    }
