"""Jobs that stay as they are, as a requeue would let another job start in their place."""

import dataclasses

import pytest

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Limit
from slurm_elastic.core.plan import Action
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.eligibility import Eligibility, elastic_jobs
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.round import decide_round
from tests.support.decisions.synthetic_clusters import Cluster, node


def cluster(reason, *, gpus=1, rival=3, array=10, **of_rival):
    """Return a cluster with an elastic job on 4 of 8 GPUs, and a job that waits for a limit.

    Jobs with odd numbers are of one user, those with even ones of another.
    """
    c = Cluster([node("g1"), node("g2")])
    mine = {"qos": "normal", "account": "vision"}
    c.add(1, elastic="1-8", on={"g1": 4}, **mine)
    c.add(rival, gpus=gpus, reason=reason, **(mine | of_rival))
    names = {1: "10_1", rival: f"{array}_[2-9]"}
    c.jobs = [dataclasses.replace(job, display_id=names[job.job_id]) for job in c.jobs]
    return c


def eligibility(c):
    job = elastic_jobs(NodeArrays(c.snapshot()), c.records, Config())[1]
    return job.eligibility, job.reason


def stays(c):
    state, reason = eligibility(c)
    return state is Eligibility.YIELDS and reason is not None and reason.code == "limit-awaited"


def test_a_task_of_an_array_with_a_limit_stays_while_others_wait_for_their_turn():
    expected = Reason("limit-awaited", slurm_reason="JobArrayTaskLimit")
    assert eligibility(cluster("JobArrayTaskLimit")) == (Eligibility.YIELDS, expected)
    assert not stays(cluster("JobArrayTaskLimit", array=11))


@pytest.mark.parametrize(
    ("reason", "others"),
    [
        ("QOSGrpGRES", {"account": "x", "rival": 2}),
        ("QOSMaxJobsPerUserLimit", {"account": "x"}),
        ("QOSMaxGRESPerUser", {"account": "x"}),
        ("MaxGRESPerAccount", {"rival": 2}),
        ("MaxGRESRunMinsPerUser", {"account": "x"}),
        ("AssocGrpGRES", {"qos": "x", "rival": 2}),
        ("AssocGrpGRESRunMinutes", {"qos": "x", "rival": 2}),
        ("AssocMaxJobsLimit", {"qos": "x"}),
    ],
)
def test_a_job_stays_while_another_waits_for_the_same_limit(reason, others):
    assert stays(cluster(reason, **others))
    strangers = {"qos": "y", "account": "y", "rival": 2}
    assert not stays(cluster(reason, **strangers))


@pytest.mark.parametrize(
    "reason",
    [
        *("Resources", "Priority", "", "Licenses", "QOSMinGRES", "QOSUsageThreshold"),
        *("QOSMaxGRESPerJob", "QOSMaxNodePerJobLimit", "QOSMaxGRESPerNode"),
        *("AssocMaxWallDurationPerJobLimit", "QOSGrpWallLimit", "AssocGrpGRESMinutes"),
    ],
)
def test_what_a_requeue_does_not_free_is_no_obstacle(reason):
    assert not stays(cluster(reason))


def test_a_job_that_could_not_start_in_any_case_hinders_no_other():
    """Else anybody could keep the jobs of a group from growing, by a job that is too large."""
    assert not stays(cluster("QOSGrpGRES", gpus=5))  # four GPUs are free
    c = cluster("QOSGrpGRES", gpus=4)
    assert stays(c)
    ids = frozenset({1, 3})
    c.limits = (Limit(name="QOS normal GrpTRES", resource="gpu", cap=3, jobs=ids),)
    assert not stays(c)  # 3 - 4 held + 4 freed are too few for 4
    c.limits = (Limit(name="QOS normal GrpTRES", resource="gpu", cap=4, jobs=ids),)
    assert stays(c)


def test_jobs_with_licenses_stay_while_another_waits_for_licenses():
    c = Cluster([node("g1"), node("g2")])
    c.add(1, elastic="1-8", on={"g1": 4}, shape={"licenses": "matlab:1"})
    c.add(2, gpus=1, reason="Licenses")
    assert stays(c)


def test_a_job_that_can_be_changed_in_place_gives_nothing_up():
    c = cluster("JobArrayTaskLimit")
    c.records[1] = dataclasses.replace(c.records[1], in_place=True)
    assert eligibility(c)[0] is Eligibility.FREE


def test_a_job_beside_such_a_rival_gives_way_to_others_all_the_same():
    c = cluster("QOSMaxJobsPerUserLimit", gpus=0)
    assert stays(c)
    c.add(8, gpus=6, account="x", reason="Resources", priority=9)
    plan, _ = decide_round(
        c.snapshot(), c.records, config=Config(), policy=FairShare(Config()), state={}
    )
    assert plan.decision[1].action is Action.SHRINK
