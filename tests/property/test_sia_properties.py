"""Properties of policy `sia` on random clusters, jobs and measurements."""

import json
import random

from hypothesis import given, settings

from slurm_elastic.policies.sia.sia import Sia
from slurm_elastic.round import decide_round
from tests.support.decisions.sia_strategies import (
    CASES,
    TYPES,
    random_cluster,
    random_config,
    random_question,
)


@settings(max_examples=150)
@given(*CASES)
def test_what_it_asks_for_first_fits_and_is_allowed(nodes, jobs, seed):
    rng = random.Random(seed)
    config = random_config(rng)
    cluster = random_cluster(rng, nodes, jobs)
    asked = random_question(cluster, seed)
    proposals, state = Sia(config).decide(asked, {})
    assert {p.job_id for p in proposals} == set(asked.jobs)
    used = dict.fromkeys(TYPES, 0)
    for proposal in proposals:
        job = asked.snapshot.job[proposal.job_id]
        shapes = [(a.gpu_type, a.gpus) for a in proposal.alternatives]
        assert len(shapes) == len(set(shapes))
        assert shapes[-1] == ("", 0) or job.allocation is not None
        for alternative in proposal.alternatives:
            assert alternative.reason
            if alternative.gpus:
                assert job.directive.allows(alternative.gpus, alternative.gpu_type)
        best = proposal.alternatives[0]
        if best.gpus:
            used[best.gpu_type] += best.gpus
    assert all(used[t] <= asked.capacity[t] for t in TYPES)
    again, _ = Sia(config).decide(asked, json.loads(json.dumps(state)))
    assert again == proposals


@settings(max_examples=60)
@given(*CASES)
def test_removing_a_job_never_breaks_a_round(nodes, jobs, seed):
    rng = random.Random(seed)
    config = random_config(rng)
    cluster = random_cluster(rng, nodes, jobs + 1)
    policy = Sia(config)
    policy.decide(random_question(cluster, seed), {})
    proposals, _ = policy.decide(
        random_question(cluster, seed, leave_out=rng.randint(1, jobs + 1)), {}
    )
    assert len(proposals) == jobs


@settings(max_examples=60)
@given(*CASES)
def test_whole_rounds_keep_capacity_and_classes(nodes, jobs, seed):
    rng = random.Random(seed)
    config = random_config(rng)
    cluster = random_cluster(rng, nodes, jobs)
    policy, state = Sia(config), {}
    for _ in range(2):
        snapshot = cluster.snapshot()
        plan, state = decide_round(
            snapshot, cluster.records, config=config, policy=policy, state=state, seed=seed
        )
        used = {n.name: 0 for n in snapshot.nodes}
        for decision in plan.decisions:
            target = decision.target
            if target is None:
                continue
            directive = snapshot.job[decision.job_id].directive
            assert directive.allows(target.gpus, target.gpu_type) or target == decision.current
            for name, gpus in target.shares:
                used[name] += gpus
        assert all(used[n.name] <= n.gpus for n in snapshot.nodes)
        cluster.carry_out(plan)
        cluster.time += 60
        state = json.loads(json.dumps(state))
