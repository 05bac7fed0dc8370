"""Changes that begin in one round: jobs that grow by companions begin with those that leave."""

import pytest

from slurm_elastic.config.schema import Config, LimitSettings, ResizeSettings
from slurm_elastic.core.cluster import Allocation, Companion
from tests.support.decisions.synthetic_clusters import Cluster, node
from tests.unit.placement.test_binding_proposals import Told, decide, targets

SLURM = Config(resize=ResizeSettings(min_interval_s=0.0))
WISHES = {"j1": [("a100", 2)], "j2": [("a100", 4)]}


def cluster(*, giver=True, taker=True, part=2):
    """Return job 1 with a companion on g1, and job 2 with a GPU there and one of g2."""
    c = Cluster([node("g1", 4), node("g2", 4)])
    companion = Companion(11, Allocation.of("a100", {"g1": part}))
    c.add(
        1, elastic="1-4", on={"g1": 4}, companions=(companion,), record={"in_place": giver},
    )  # fmt: skip
    c.add(2, elastic="1-4", on={"g2": 2}, record={"in_place": taker})
    c.add(3, on={"g2": 2})
    return c


def test_a_job_grows_with_the_one_that_leaves_its_gpus():
    plan = decide(cluster(), Told(**WISHES), SLURM)
    assert targets(plan) == {1: {"g1": 2}, 2: {"g1": 2, "g2": 2}}
    assert plan.decision[2].givers == (1,)
    assert plan.decision[2].waiting_for is None
    assert plan.decision[1].givers == ()


@pytest.mark.parametrize(
    "values", [{"giver": False}, {"taker": False}, {"part": 1}], ids=["giver", "taker", "cut"]
)
def test_where_one_of_them_is_requeued_the_other_waits(values):
    plan = decide(cluster(**values), Told(**WISHES), SLURM)
    assert targets(plan) == {1: {"g1": 2}}
    assert plan.decision[2].givers == ()


def test_a_job_that_may_not_be_resized_any_more_hands_nothing_over():
    config = Config(resize=SLURM.resize, limits=LimitSettings(resizes=1))
    plan = decide(cluster(), Told(**WISHES), config)
    assert len(plan.changes) == 1
    assert plan.changes[0].givers == ()


def test_gpus_that_are_free_are_taken_at_once():
    c = cluster()
    del c.jobs[2]
    plan = decide(c, Told(**WISHES), SLURM)
    assert targets(plan) == {1: {"g1": 2}, 2: {"g2": 4}}
    assert plan.decision[2].givers == ()
