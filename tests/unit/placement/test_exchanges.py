"""Running jobs that are to get GPUs of each other, where Slurm starts jobs."""

from dataclasses import replace

import pytest

from slurm_elastic.config.schema import Config, LimitSettings, ResizeSettings
from slurm_elastic.core.cluster import Allocation, Limit
from slurm_elastic.core.plan import Action, Measurement
from slurm_elastic.policies.sia.sia import Sia
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node
from tests.unit.placement.test_binding_proposals import InPlace, Told

A100, V100 = ["a1", "a2", "a3"], ["v1", "v2", "v3"]
CONFIG = Config(resize=ResizeSettings(min_interval_s=0.0))


def measured(**rates):
    """Return the measurements of a job on four and on twelve GPUs, by type: samples/s of each."""
    return tuple(
        Measurement(gpu_type=t, gpus=g, nodes=g // 4, samples_per_s=rate * g, steps=50)
        for t, rate in rates.items()
        for g in (4, 12)
    )


def swapped():
    """Return a cluster where each of two jobs holds the GPUs that suit the other, and no other."""
    c = Cluster([node(n, 4, "a100") for n in A100] + [node(n, 4, "v100") for n in V100])
    typed, even = measured(a100=4.0, v100=1.0), measured(a100=1.0, v100=1.0)
    c.add(1, elastic="4-12", on=dict.fromkeys(V100, 4), record={"measurements": typed})
    c.add(2, elastic="4-12", on=dict.fromkeys(A100, 4), record={"measurements": even})
    return c


def test_two_jobs_that_hold_all_gpus_exchange_them_under_sia():
    c = swapped()
    plan, _ = decide_round(c.snapshot(), c.records, config=CONFIG, policy=Sia(CONFIG), state={})
    assert {d.job_id: d.target.nodes for d in plan.changes} == {1: tuple(A100), 2: tuple(V100)}


def test_an_exchange_is_not_undone_in_the_next_round():
    c = swapped()
    for _ in range(3):
        plan, _ = decide_round(c.snapshot(), c.records, config=CONFIG, policy=Sia(CONFIG), state={})
        c.carry_out(plan)
    assert not plan.changes
    assert c.jobs[0].allocation.nodes == tuple(A100)


def full(*homes, **fields):
    """Return a cluster of one node per type, each held by one job: 1, 2 and so on."""
    c = Cluster([node(f"{kind[0]}1", 4, kind) for kind in homes])
    for job_id, kind in enumerate(homes, start=1):
        c.add(job_id, elastic="2-4", on={f"{kind[0]}1": 4}, **fields.get(f"j{job_id}", {}))
    return c


def decide(c, policy, config=CONFIG):
    plan, _ = decide_round(c.snapshot(), c.records, config=config, policy=policy, state={})
    return plan


def changes(plan):
    return {d.job_id: (d.target.nodes[0], d.target.gpus) for d in plan.changes}


SWAP = {"j1": [("v100", 4)], "j2": [("a100", 4)]}


def test_both_changes_name_the_other_job():
    plan = decide(full("a100", "v100"), Told(**SWAP))
    assert changes(plan) == {1: ("v1", 4), 2: ("a1", 4)}
    first, second = (plan.decision[i] for i in (1, 2))
    assert (first.exchange, second.exchange) == ((2,), (1,))
    assert (first.action, second.action) == (Action.MOVE, Action.MOVE)
    assert words(first.reason) == "exchanges GPUs with alice's 2: told so"
    assert first.cost_s > 0


def test_three_jobs_in_a_ring_change_together():
    c = full("a100", "v100", "h100")
    plan = decide(c, Told(j1=[("v100", 4)], j2=[("h100", 4)], j3=[("a100", 4)]))
    assert changes(plan) == {1: ("v1", 4), 2: ("h1", 4), 3: ("a1", 4)}
    assert plan.decision[1].exchange == (2, 3)


def test_sizes_may_differ_but_stay_within_the_directive():
    plan = decide(full("a100", "v100"), Told(j1=[("v100", 2)], j2=[("a100", 4)]))
    assert changes(plan) == {1: ("v1", 2), 2: ("a1", 4)}
    plan = decide(full("a100", "v100"), Told(j1=[("v100", 1)], j2=[("a100", 4)]))
    assert not plan.changes


def test_jobs_that_want_each_others_nodes_exchange_them():
    class Placed(Told):
        def decide(self, question, state):
            proposals, state = super().decide(question, state)
            nodes = {1: "g2", 2: "g1"}
            return tuple(
                replace(
                    p,
                    alternatives=(replace(p.alternatives[0], shares=((nodes[p.job_id], 4),)),),
                )
                for p in proposals
            ), state

    c = Cluster([node("g1"), node("g2")])
    for job_id in (1, 2):
        c.add(job_id, elastic="2-4", on={f"g{job_id}": 4})
    policy = Placed(j1=[("a100", 4)], j2=[("a100", 4)])
    assert changes(decide(c, policy)) == {1: ("g2", 4), 2: ("g1", 4)}
    c.carry_out(decide(c, policy))
    assert not decide(c, policy).changes


def test_only_an_exchange_that_the_policy_prefers_by_itself_is_made():
    class WithOthers(Told):
        """Prefers the exchange only as long as it decides on the third job as well."""

        def decide(self, question, state):
            wishes, self.wishes = self.wishes, self.wishes if 3 in question.jobs else {}
            try:
                return super().decide(question, state)
            finally:
                self.wishes = wishes

    c = full("a100", "v100", "h100")
    policy = WithOthers(**SWAP)
    assert not decide(c, policy).changes
    assert policy.asked[-1].jobs == (1, 2)
    assert policy.asked[-1].capacity == {"a100": 4, "v100": 4, "h100": 0}


@pytest.mark.parametrize(
    "record",
    [
        {"last_change": NOW - 10},
        {"changes": tuple(NOW - 60 * i for i in range(1, 13))},
        {"held": True},
        {"in_transition": True},
        {"on_trial": NOW - 1},
        {"proven": False},
        {"checkpoint_s": 300.0},
    ],
)
def test_neither_changes_where_one_may_not(record):
    config = Config(resize=ResizeSettings(min_interval_s=300.0))
    if "in_transition" in record:
        record = {**record, "target": Allocation.of("v100", {"v1": 4})}
    assert changes(decide(full("a100", "v100"), Told(**SWAP), config))
    c = full("a100", "v100", j2={"record": record})
    assert not decide(c, Told(**SWAP), config).changes


def test_two_resizes_have_to_be_left_this_hour():
    for left, begun in ((1, 0), (2, 2)):
        config = replace(CONFIG, limits=LimitSettings(resizes=left))
        assert len(decide(full("a100", "v100"), Told(**SWAP), config).changes) == begun


def test_gpus_of_other_jobs_are_left_to_them():
    c = Cluster([node("a1", 4, "a100"), node("v1", 4, "v100")])
    c.add(1, elastic="2-4", on={"a1": 3})
    c.add(2, elastic="2-4", on={"v1": 3})
    c.add(3, on={"v1": 1})
    plan = decide(c, Told(j1=[("v100", 4)], j2=[("a100", 3)]))
    assert not plan.changes
    plan = decide(c, Told(j1=[("v100", 3)], j2=[("a100", 4)]))
    assert changes(plan) == {1: ("v1", 3), 2: ("a1", 4)}


def test_an_idle_gpu_goes_to_one_job_only():
    c = Cluster([node("a1", 5, "a100"), node("v1", 3, "v100")])
    c.add(1, elastic="2-4", on={"a1": 3})
    c.add(2, elastic="2-4", on={"v1": 3})
    c.add(4, elastic="1-4", on={"a1": 1})
    plan = decide(c, Told(j1=[("v100", 3)], j2=[("a100", 4)]))
    assert changes(plan) == {1: ("v1", 3), 2: ("a1", 4)}
    plan = decide(c, Told(j1=[("v100", 3)], j2=[("a100", 4)], j4=[("a100", 2)]))
    assert changes(plan) == {4: ("a1", 2)}


def test_limits_of_slurm_hold():
    c = full("a100", "v100")
    c.limits = (Limit(name="alice", resource="gpu:a100", cap=2, jobs=frozenset([2])),)
    assert not decide(c, Told(**SWAP)).changes
    plan = decide(c, Told(j1=[("v100", 4)], j2=[("a100", 4), ("a100", 2)]))
    assert changes(plan) == {1: ("v1", 4), 2: ("a1", 2)}


def test_a_choice_weighed_as_a_change_in_place_is_no_exchange():
    assert not decide(full("a100", "v100"), InPlace(**SWAP)).changes
