"""Properties of plans in which jobs grow into GPUs that others leave in place."""

from collections import Counter

from hypothesis import event, given, settings
from hypothesis import strategies as st

from slurm_elastic.config.schema import Config, ControllerSettings, ResizeSettings
from slurm_elastic.core.cluster import Allocation, Companion
from slurm_elastic.core.resize_kind import companion_change
from slurm_elastic.round import decide_round
from tests.support.decisions.synthetic_clusters import Cluster, node
from tests.unit.placement.test_binding_proposals import Told


@st.composite
def trainings(draw):
    """Return a cluster of jobs with companions, and what each of them wishes."""
    names = [f"n{i}" for i in range(1, draw(st.integers(2, 3)))]
    free = dict.fromkeys(names, 4)
    c, wishes = Cluster([node(name) for name in names]), {}
    for job_id in range(1, draw(st.integers(3, 7))):
        parts = []
        for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
            gpus = draw(st.integers(1, 2))
            if free[name] >= gpus:
                free[name] -= gpus
                parts.append((name, gpus))
        if not parts:
            continue
        shares = Counter()
        for name, gpus in parts:
            shares[name] += gpus
        companions = tuple(
            Companion(10 * job_id + i, Allocation.of("a100", {name: gpus}))
            for i, (name, gpus) in enumerate(parts[1:])
        )
        c.add(
            job_id, elastic=f"{parts[0][1]}-12", on=dict(shares), companions=companions,
            record={"in_place": draw(st.integers(0, 4)) > 0, "restarts": draw(st.booleans())},
        )  # fmt: skip
        least, held = parts[0][1], sum(shares.values())
        wish = draw(
            st.sampled_from([least, least, held + 1, held + 2, draw(st.integers(least, 9))])
        )
        wishes[f"j{job_id}"] = [("a100", wish)]
    return c, wishes


configs = st.builds(
    lambda queue: Config(
        controller=ControllerSettings(queue=queue), resize=ResizeSettings(min_interval_s=0.0)
    ),
    st.sampled_from(["slurm", "controller"]),
)


def members(job, target):
    """Return the companions that leave and join on the way to a target; None: a requeue."""
    return companion_change(job.base_allocation, [c.allocation for c in job.companions], target)


@settings(max_examples=120)
@given(trainings(), configs)
def test_a_plan_fits_before_and_after_the_handover(case, config):
    cluster, wishes = case
    plan, _ = decide_round(
        cluster.snapshot(), cluster.records, config=config, policy=Told(**wishes), state={}
    )
    by_id = {j.job_id: j for j in cluster.jobs}
    takers = {d.job_id: d.givers for d in plan.changes if d.givers}
    givers = {giver for each in takers.values() for giver in each}
    event(f"takers: {len(takers)}")
    assert not givers & takers.keys(), "no job waits for one that waits"
    for job_id in givers | takers.keys():
        job, decision = by_id[job_id], plan.decision[job_id]
        assert cluster.records[job_id].by_companions
        change = members(job, decision.target)
        assert change is not None
        assert bool(change.join) == (job_id in takers)
        assert job_id in takers or change.leave
    first, then = Counter(), Counter()
    for job in cluster.jobs:
        before, target = dict(job.allocation.shares), plan.decision[job.job_id].target
        after = dict(target.shares) if target else {}
        for n in before | after:
            most = max(before.get(n, 0), after.get(n, 0))
            first[n] += before.get(n, 0) if job.job_id in takers else most
            then[n] += after.get(n, 0) if job.job_id in givers else most
    assert all(max(first[n.name], then[n.name]) <= n.gpus for n in cluster.nodes)
