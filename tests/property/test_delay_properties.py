"""Properties of `[placement] mode = "delay"` on random clusters."""

import dataclasses
import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.config.placement_settings import PlacementSettings
from slurm_elastic.config.schema import Config, ControllerSettings, ResizeSettings, SpeedupSettings
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import Alternative, Proposal
from slurm_elastic.placement.delay.delay_gate import DelayGate
from slurm_elastic.placement.delay.wait_timers import NODE, RACK, WaitTimers
from slurm_elastic.placement.eligibility import elastic_jobs
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.policies.goodput.marginal_value import MarginalValue
from slurm_elastic.policies.policy_protocol import Capabilities
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import told
from tests.support.decisions.synthetic_clusters import Cluster, node, racks

TIMERS = st.sampled_from(["own", "fixed", "auto", "nowait", "full", "2,5"])


class Greedy:
    """Policy that gives each job in turn the largest size that is left."""

    capabilities = Capabilities(binding_proposals=True)

    def decide(self, question, state):
        left = sum(question.capacity.values())
        proposals = []
        for job, _, directive in question.elastic():
            sizes = [s for s in reversed(directive.sizes("a100")) if s <= left]
            left -= sizes[0] if sizes else 0
            wishes = [Alternative(gpu_type="a100", gpus=s, value=float(s)) for s in sizes[:1]]
            wishes.append(Alternative(gpu_type="", gpus=0, value=0.0, reason=told("waits")))
            proposals.append(Proposal(job_id=job.job_id, alternatives=tuple(wishes)))
        return tuple(proposals), state


def config(timers):
    return Config(
        controller=ControllerSettings(queue="controller"),
        resize=ResizeSettings(min_interval_s=0.0, per_hour=1000, min_gain=0.0, restart_s=0.0),
        speedup=SpeedupSettings(loss_across_nodes=0.4),
        placement=PlacementSettings(
            mode="delay", timers=timers, lease_s=100.0, wait_node_s=100.0, wait_rack_s=300.0
        ),
    )


def invent(seed):
    """Draw racks of nodes, some GPUs taken; running jobs, wide and narrow waiting ones."""
    rng = random.Random(seed)
    nodes = [node(f"n{i}", rng.choice([2, 4, 4])) for i in range(rng.randint(2, 8))]
    c = Cluster(nodes, switches=racks([n.name for n in nodes], rng.choice([2, 3])))
    free = {n.name: n.gpus for n in nodes}
    for job_id in range(1, rng.randint(2, 10)):
        names = [n for n in free if free[n]]
        on = {}
        if names and rng.random() < 0.5:
            chosen = rng.sample(names, min(len(names), rng.choice([1, 1, 2])))
            share = min(free[n] for n in chosen)
            on = dict.fromkeys(chosen, rng.randint(1, share))
        for name, gpus in on.items():
            free[name] -= gpus
        held = sum(on.values())
        if held and rng.random() < 0.3:
            c.add(job_id, on=on)
            continue
        least = rng.randint(1, held) if held else rng.choice([1, 1, 4, 6, 8])
        most = max(least, held) * rng.choice([1, 1, 2])
        last = {"last_change": c.time - rng.randint(0, 1000)} if held else {}
        c.add(
            job_id, elastic=f"{least}-{most}", on=on or None, gpus=0 if on else least,
            submit_time=c.time - rng.randint(0, 1000), record=last,
        )  # fmt: skip
    return c


def decide(c, timers, policy, *, state=None, at_once=True):
    chosen = config(timers)
    plan, after = decide_round(
        c.snapshot(), c.records, config=chosen, policy=policy or FairShare(chosen),
        state=state or {}, at_once=at_once,
    )  # fmt: skip
    return plan, json.loads(json.dumps(after))


@settings(max_examples=60)
@given(st.integers(0, 2**32), TIMERS, st.sampled_from(["fair", "greedy", "goodput"]), st.booleans())
def test_rounds_keep_capacity_and_bounds_and_are_deterministic(seed, timers, name, at_once):
    c = invent(seed)
    state = {}
    policy = {"fair": None, "greedy": Greedy(), "goodput": MarginalValue(config(timers))}[name]
    for _ in range(3):
        plan, after = decide(c, timers, policy, state=state, at_once=at_once)
        again, same = decide(c, timers, policy, state=state, at_once=at_once)
        assert plan.decisions == again.decisions
        assert (after, plan.wake) == (same, again.wake)
        assert plan.wake is None or plan.wake > c.time
        held = {n.name: 0 for n in c.nodes}
        for job in c.jobs:
            decision = plan.decision.get(job.job_id)
            target = decision.target if decision else job.allocation
            for name, gpus in target.shares if target else ():
                held[name] += gpus
            if decision and target and target != decision.current:
                assert job.submission.directive.allows(target.gpus, target.gpu_type)
        assert all(held[n.name] <= n.gpus for n in c.nodes)
        c.carry_out(plan)
        state = after
        c.time += 90


@settings(max_examples=60)
@given(st.integers(0, 2**32), TIMERS, st.booleans())
def test_refusals_idle_no_gpu_that_a_job_waits_for(seed, timers, greedy):
    rng = random.Random(seed)
    nodes = [node(f"n{i}", 4) for i in range(rng.randint(2, 6))]
    c = Cluster(nodes, switches=racks([n.name for n in nodes], 2))
    for i, n in enumerate(nodes):
        taken = rng.randint(0, 4)
        if taken:
            c.add(100 + i, on={n.name: taken})
    for job_id in range(1, rng.randint(3, 14)):
        size = rng.choice([1, 1, 4, 6, 8])
        c.add(job_id, elastic=str(size), gpus=size, submit_time=c.time - rng.randint(0, 400))
    plan, _ = decide(c, timers, Greedy() if greedy else MarginalValue(config(timers)))
    idle = sum(n.free_gpus for n in c.snapshot().nodes)
    idle -= sum(d.target.gpus for d in plan.decisions if d.target)
    small = [d for d in plan.decisions if c.records[d.job_id] and _wants_one(c, d.job_id)]
    assert idle == 0 or all(d.target for d in small)


def _wants_one(c, job_id):
    return next(j for j in c.jobs if j.job_id == job_id).submission.directive.max_gpus == 1


@given(
    st.integers(1, 3), st.integers(0, 2), st.sampled_from(["own", "fixed", "auto", "2,5"]),
    st.lists(st.floats(0, 5000), min_size=2, max_size=6),
    st.lists(st.tuples(st.floats(0, 2400), st.floats(1, 60)), max_size=6),
)  # fmt: skip
def test_the_longer_it_has_waited_the_more_a_job_accepts(here, there, timers, waits, known):
    """Places are over `here` nodes of its rack and `there` of another."""
    accepted = []
    for waited in sorted(waits):
        nodes = [node(f"n{i}", 2) for i in range(6)]
        c = Cluster(nodes, switches=racks([n.name for n in nodes], 3))
        gpus = here + there
        c.add(1, elastic=str(gpus), gpus=gpus, submit_time=c.time - waited)
        c.add(2, elastic="2", gpus=2, submit_time=c.time - 700)
        entries = sorted([c.time - ago, leases] for ago, leases in known)
        state = {
            "waits": {RACK: {str(gpus): entries}, NODE: {"2": entries}},
            "waiting": {
                j.key: {"tier": RACK, "since": j.submit_time, "gpus": 4, "seen": c.time}
                for j in c.jobs
            },
        }
        chosen = config(timers)
        frame = NodeArrays(c.snapshot())
        place = {f"n{i}": 1 for i in [*range(here), *range(3, 3 + there)]}
        round_job = elastic_jobs(frame, c.records, chosen)[1]
        gate = DelayGate(chosen.placement, frame, state)
        accepted.append(not gate.refusal(round_job, Allocation.of("a100", place)))
    assert accepted == sorted(accepted)


@given(
    st.floats(0, 1e5), st.floats(1, 1e5), st.floats(0, 1), st.booleans(), st.floats(0, 0.5),
)  # fmt: skip
def test_a_place_is_accepted_when_the_wake_up_says_so(waited, limit, loss, ages, tolerance):
    placement = PlacementSettings(timers="own" if ages else "fixed", tolerance=tolerance)
    patience = WaitTimers(placement, 0.0)
    if loss <= patience.accepted_loss(waited, limit):
        return
    at = patience.accepts_at_s(loss, limit)
    assert waited <= at <= limit * (1 + 1e-9)
    assert loss <= patience.accepted_loss(at * (1 + 1e-9) + 1e-6, limit) + 1e-9


@given(st.lists(st.floats(0.2, 100), max_size=8), st.integers(1, 64))
def test_our_timers_stay_between_their_bounds(waits, gpus):
    placement = config("own").placement
    entries = [[1000.0, leases] for leases in waits]
    state = {"waits": {t: {str(gpus): entries} for t in (NODE, RACK)}}
    patience = WaitTimers(placement, 1000.0, state)
    assert 100.0 <= patience.limit_s(NODE, gpus, "x") <= 12 * placement.lease_s
    assert 300.0 <= patience.limit_s(RACK, gpus, "x") <= 24 * placement.lease_s
    fixed = dataclasses.replace(placement, timers="fixed")
    assert WaitTimers(fixed, 1000.0, state).limit_s(RACK, gpus, "x") == 300.0
