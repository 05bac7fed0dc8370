"""Which limits of QOS and associations bind which jobs, from sacctmgr's lines."""

import dataclasses
import time

import pytest

from slurm_elastic.core.cluster import GPUS_OF_A_NODE, Allocation, Job, JobState, Node
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.submission import Submission
from slurm_elastic.slurm.limit_caps import job_limits
from slurm_elastic.slurm.limits import parse_associations, parse_qos


def job(job_id, user="alice", account="vision", qos="normal", **more):
    return Job(
        job_id=job_id,
        display_id=str(job_id),
        name="",
        user=user,
        uid=1,
        state=JobState.RUNNING,
        partition=more.pop("partition", "gpu"),
        account=account,
        qos=qos,
        **more,
    )


def shown(limits):
    return {(limit.name, limit.cap, tuple(sorted(limit.jobs))) for limit in limits}


def test_each_kind_of_limit_counts_its_own_jobs():
    qos = parse_qos("normal|gres/gpu=10|gres/gpu=4||cpu=64|1-02:00:00\n")
    associations = parse_associations(
        "root||||gres/gpu=100||\nscience|||root|node=5||\nvision|||science|||\n"
        "vision|alice|||gres/gpu=2||00:30:00\n"
    )
    jobs = [job(1), job(2, user="bob"), job(3, account="other")]
    assert shown(job_limits(qos, (), jobs)) == {
        ("QOS normal GrpTRES gres/gpu=10", 10, (1, 2, 3)),
        ("QOS normal MaxTRESPerUser gres/gpu=4", 4, (1, 3)),
        ("QOS normal MaxTRESPerUser gres/gpu=4", 4, (2,)),
        ("QOS normal MaxTRES cpu=64", 64, (1,)),
        ("QOS normal MaxTRES cpu=64", 64, (2,)),
        ("QOS normal MaxTRES cpu=64", 64, (3,)),
        ("QOS normal MaxWall", 93600, (1, 2, 3)),
    }
    assert shown(job_limits((), associations, jobs)) == {
        ("association vision/alice MaxWall", 1800, (1,)),
        ("association root GrpTRES gres/gpu=100", 100, (1, 2)),
        ("association science GrpTRES node=5", 5, (1, 2)),
        ("association vision/alice GrpTRES gres/gpu=2", 2, (1,)),
    }


def test_accounts_that_name_each_other_as_parents_do_not_hang():
    associations = parse_associations("a|||b|cpu=1||\nb|||a|cpu=2||\n")
    assert len(job_limits((), associations, [job(1, account="a")])) == 2


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
    limits = (*job_limits(qos, (), jobs), *job_limits((), associations, jobs))
    assert {(m.name, m.resource, m.cap, tuple(sorted(m.jobs))) for m in limits} == {
        ("QOS normal MaxTRESPerNode gres/gpu=2", GPUS_OF_A_NODE, 2, (1, 3)),
        ("QOS normal MaxTRESMins gres/gpu=60", "gpu", 2, (1,)),
        ("QOS normal GrpTRESRunMins gres/gpu=240", "gpu", 4, (1,)),
        ("association vision MaxTRESMins gres/gpu=30", "gpu", 2, (1,)),  # what it holds it keeps
    }


def test_a_limit_of_a_qos_replaces_the_same_one_of_associations():
    """The jobs of such a QOS still count where the limit of the account binds others."""
    qos = parse_qos("big|gres/gpu=8|||cpu=64|2-00:00:00\nnormal|||||\n")
    associations = parse_associations(
        "vision||||gres/gpu=6,node=9||\nvision|alice||||cpu=8|1-00:00:00\n"
        "vision|bob|||||1-00:00:00\n"
    )
    held = Allocation.of("a100", {"n1": 4})
    jobs = [job(1, qos="big", gpus=4, allocation=held), job(2, user="bob")]
    assert shown(job_limits(qos, associations, jobs)) == {
        ("QOS big GrpTRES gres/gpu=8", 8, (1,)),
        ("QOS big MaxTRES cpu=64", 64, (1,)),
        ("QOS big MaxWall", 172800, (1,)),
        ("association vision GrpTRES gres/gpu=6", 2, (2,)),  # job 1 has four of the six
        ("association vision GrpTRES node=9", 9, (1, 2)),
        ("association vision/bob MaxWall", 86400, (2,)),
    }


@pytest.mark.parametrize(
    ("flags", "partition", "expected"),
    [
        ("", "gpu", {("QOS part", 2, (1,))}),
        ("DenyOnLimit,OverPartQOS", "gpu", {("QOS own", 4, (1,))}),
        ("", "other", {("QOS own", 4, (1,))}),
        ("", "gpu,other", {("QOS part", 2, (1,)), ("QOS own", 4, (1,))}),
    ],
)
def test_of_two_qos_that_of_the_partition_comes_first_but_for_a_flag(flags, partition, expected):
    qos = parse_qos(f"part||gres/gpu=2|||||||\nown||gres/gpu=4|||||||{flags}\n")
    limits = job_limits(qos, (), [job(1, qos="own", partition=partition)], {"gpu": "part"})
    assert shown(limits) == {
        (f"{name} MaxTRESPerUser gres/gpu={cap}", cap, ids) for name, cap, ids in expected
    }


def test_a_users_own_limit_of_a_job_replaces_the_accounts():
    """sacctmgr shows an inherited limit with the user: that of the account binds nobody else."""
    associations = parse_associations(
        "vision|||||gres/gpu=4|\nvision|alice||||gres/gpu=8|\nvision|bob||||gres/gpu=4|\n"
    )
    assert shown(job_limits((), associations, [job(1), job(2, user="bob")])) == {
        ("association vision/alice MaxTRES gres/gpu=8", 8, (1,)),
        ("association vision/bob MaxTRES gres/gpu=4", 4, (2,)),
    }


def test_a_user_may_have_an_association_for_a_partition():
    associations = parse_associations(
        "vision|alice|||gres/gpu=4||\nvision|alice|gpu||gres/gpu=8||\n"
    )
    jobs = [job(1), job(2, partition="other")]
    assert shown(job_limits((), associations, jobs)) == {
        ("association vision/alice GrpTRES gres/gpu=8", 8, (1,)),
        ("association vision/alice GrpTRES gres/gpu=4", 4, (2,)),
    }


def test_the_limits_of_a_relative_qos_are_percentages():
    """Of the cluster or, where it is the QOS of a partition, of that partition."""
    nodes = [
        Node(
            name=f"n{i}", gpu_type="a100", gpus=4, cpus=16, memory_mb=8000, partitions=frozenset(p)
        )
        for i, p in enumerate((["gpu"], ["gpu"], ["gpu", "part"]))
    ]
    qos = parse_qos(
        "rel|gres/gpu=50,node=70|cpu=25|||||||Relative\npart|gres/gpu:a100=75||||||||Relative\n"
    )
    limits = job_limits(qos, (), [job(1, qos="rel", partition="part")], {"part": "part"}, nodes)
    assert shown(limits) == {
        ("QOS part GrpTRES gres/gpu:a100=3", 3, (1,)),
        ("QOS rel GrpTRES gres/gpu=6", 6, (1,)),
        ("QOS rel GrpTRES node=2", 2, (1,)),
        ("QOS rel MaxTRESPerUser cpu=12", 12, (1,)),
    }
