"""Properties of rounds in which jobs leave a node, on random clusters without waiting jobs."""

from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.config.schema import Config, ResizeSettings, SleepSettings
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.round import decide_round
from tests.support.decisions.synthetic_clusters import Cluster, node

GPUS, BOOT_S, COST_S, MOST_S = 8, 60.0, 30.0, 4000.0
CONFIG = Config(
    resize=ResizeSettings(restart_s=COST_S),
    sleep=SleepSettings(mode="act", clear_s=MOST_S, boot_s=BOOT_S),
)
#: GPUs of a job, whether it is elastic, and minutes that it has left.
jobs = st.tuples(st.integers(1, 4), st.sampled_from([True, True, False]), st.integers(1, 60))


@st.composite
def quiet_clusters(draw):
    """Draw nodes of two types, on which jobs of one node each run that cannot grow."""
    types = draw(st.lists(st.sampled_from(["a100", "v100"]), min_size=2, max_size=6))
    cluster = Cluster([node(f"g{i}", GPUS, gpu_type) for i, gpu_type in enumerate(types)])
    for n in cluster.nodes:
        free = GPUS
        for gpus, elastic, minutes in draw(st.lists(jobs, max_size=3)):
            if gpus <= free:
                free -= gpus
                cluster.add(
                    len(cluster.jobs) + 1,
                    elastic=f"{gpus}-{gpus}" if elastic else "",
                    on={n.name: gpus},
                    time_limit_s=5000 + 60 * minutes,
                )
    return cluster


def in_use(cluster):
    return {name for job in cluster.jobs for name in job.allocation.nodes}


@given(quiet_clusters())
def test_each_round_empties_one_node_until_none_is_worth_it(cluster):
    for _ in range(len(cluster.nodes)):
        snapshot, before = cluster.snapshot(), in_use(cluster)
        plan, _ = decide_round(
            snapshot, cluster.records, config=CONFIG, policy=FairShare(CONFIG), state={}
        )
        if not plan.changes:
            return
        (source,) = {name for d in plan.changes for name in d.current.nodes}
        there = [j for j in cluster.jobs if j.allocation.nodes == (source,)]
        assert {d.job_id for d in plan.changes} == {j.job_id for j in there}
        for decision in plan.changes:
            assert decision.reason.code == "clears-node"
            assert decision.target.gpus == decision.current.gpus
            assert decision.target.gpu_type == decision.current.gpu_type
        longest_s = max(j.start_time + j.time_limit_s - snapshot.time for j in there)
        assert min(longest_s, MOST_S) - BOOT_S >= 20 * COST_S * len(there)
        cluster.carry_out(plan)
        assert in_use(cluster) == before - {source}
        assert all(n.free_gpus >= 0 for n in cluster.snapshot().nodes)
    raise AssertionError("more nodes were emptied than there are")
